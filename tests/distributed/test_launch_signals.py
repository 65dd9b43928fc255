"""Two Ctrl-C to a launcher with a hanging rank."""

import signal
import subprocess
import sys

import psutil
import pytest
from tests_tiny import tiny_settings
from training_command import environment, flags_of

# The training command. Rank 1 sleeps before its fifth update.
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


@pytest.mark.slow
def test_second_interrupt_aborts_launcher_and_ranks_with_130(tiny_corpus, tmp_path):
    script = tmp_path / "hanging.py"
    script.write_text(HANGING_SCRIPT)
    command = [sys.executable, "-m", "megatron_neobert.launch", str(script), *flags_of(tiny_settings(tiny_corpus))]
    with subprocess.Popen(
        command, env=environment(2), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        assert any("rank 1 sleeps" in line for line in process.stdout)
        ranks = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGINT)
        assert any("Ctrl-C again aborts at once" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=600)
    assert process.returncode == 130, output
    assert "rank 0: aborted\n" in output
    assert "rank 1: aborted\n" in output
    assert not any(rank.is_running() for rank in ranks)
