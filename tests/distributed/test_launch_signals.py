"""Signals to a launcher whose rank hangs, and ranks whose launcher has gone."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests_tiny import tiny_settings
from training_command import environment, flags_of

from megatron_neobert.config.schema import Settings

TRAIN_ITERS = 8
LAUNCHER = [sys.executable, "-m", "megatron_neobert.launch"]

# The training command, with a rank 1 that sleeps before its fifth update.
HANGING_SCRIPT = """
import os, time
from megatron_neobert.errors import run_command
from megatron_neobert.pretrain import main
from megatron_neobert.training import loop

train_step = loop.train_step

def hang(run, batches):
    if run.state.iteration == 4 and os.environ["RANK"] == "1":
        print("rank 1 sleeps", flush=True)
        time.sleep(300)
    return train_step(run, batches)

loop.train_step = hang
run_command(main)
"""


def resumable(corpus: Any, save: Path) -> Settings:
    settings = tiny_settings(corpus, save=save, checkpoint={"load": str(save), "save_interval": 2})
    return settings.with_section("training", train_iters=TRAIN_ITERS, eval_iters=0)


@pytest.fixture
def hanging(tiny_corpus, tmp_path) -> Iterator[subprocess.Popen[str]]:
    """A launcher whose rank 1 sleeps, for which rank 0 waits."""
    script = tmp_path / "hanging.py"
    script.write_text(HANGING_SCRIPT)
    words = [*LAUNCHER, str(script), *flags_of(resumable(tiny_corpus, tmp_path / "run"))]
    with subprocess.Popen(
        words, env=environment(2), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        read_until(process, "rank 1 sleeps")
        ranks = psutil.Process(process.pid).children()
        yield process
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
        process.kill()


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if text in line:
            return
    raise AssertionError("".join(said))


@pytest.mark.slow
def test_second_interrupt_aborts_launcher_and_ranks_with_130(hanging):
    ranks = psutil.Process(hanging.pid).children()
    hanging.send_signal(signal.SIGINT)
    read_until(hanging, "Ctrl-C again aborts at once")
    hanging.send_signal(signal.SIGINT)
    said, _ = hanging.communicate(timeout=600)
    assert hanging.returncode == 130, said
    assert "rank 0: aborted\n" in said
    assert "rank 1: aborted\n" in said
    assert not any(rank.is_running() for rank in ranks)
