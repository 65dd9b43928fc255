"""What the launcher does when a rank crashes or hangs, and what the ranks do when the launcher has gone."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import run_command
from ranks import read_metrics, train_on_ranks
from tests_tiny import tiny_settings
from training_command import SCRIPT, environment, flags_of

from megatron_neobert.config.schema import Settings

TRAIN_ITERS = 8
LAUNCHER = [sys.executable, "-m", "megatron_neobert.launch"]

# The training command, with a rank 1 that fails once, before its fifth update.
FAILING_SCRIPT = """
import os, signal, time
from pathlib import Path
from megatron_neobert.errors import run_command
from megatron_neobert.pretrain import main
from megatron_neobert.training import loop

train_step, marker = loop.train_step, Path(__file__).with_suffix(".failed")

def fail_once(run, batches):
    if run.state.iteration == 4 and os.environ["RANK"] == "1" and not marker.exists():
        marker.touch()
        {failure}
    return train_step(run, batches)

loop.train_step = fail_once
run_command(main)
"""
SLEEP = 'print("rank 1 sleeps", flush=True); time.sleep(300)'


def failing_script(folder: Path, failure: str) -> str:
    path = folder / "failing.py"
    path.write_text(FAILING_SCRIPT.replace("{failure}", failure))
    return str(path)


def resumable(corpus: Any, save: Path) -> Settings:
    settings = tiny_settings(corpus, save=save, checkpoint={"load": str(save), "save_interval": 2})
    return settings.with_section("training", train_iters=TRAIN_ITERS, eval_iters=0)


@pytest.fixture(scope="module")
def undisturbed(tiny_corpus, tmp_path_factory) -> dict[int, float]:
    """Losses of two ranks that nothing happens to."""
    save = tmp_path_factory.mktemp("undisturbed") / "run"
    train_on_ranks(resumable(tiny_corpus, save), world_size=2)
    return read_metrics(save)


@pytest.mark.slow
def test_run_restarted_after_a_crash_ends_as_if_nothing_had_happened(tiny_corpus, tmp_path, undisturbed):
    script = failing_script(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    words = [*LAUNCHER, script, *flags_of(resumable(tiny_corpus, tmp_path / "run"))]
    finished = subprocess.run(
        words, env=environment(2, MAX_RESTARTS=1), capture_output=True, text=True, check=False, timeout=600
    )
    assert finished.returncode == 0, finished.stderr
    assert "iter_0000004 on 2 x cpu" in finished.stdout, "it went on from the last checkpoint"
    for sentence in ("error: rank 1 was ended by signal 9", "restart 1 of 1, from the last checkpoint"):
        assert sentence in finished.stderr
    assert "rank 1 (" in finished.stderr, "rank 0 says whom it lost"
    assert read_metrics(tmp_path / "run") == undisturbed
    assert sorted(undisturbed) == list(range(1, TRAIN_ITERS + 1))


@pytest.fixture
def hanging(tiny_corpus, tmp_path) -> Iterator[subprocess.Popen[str]]:
    """A launcher whose rank 1 sleeps, for which rank 0 waits; MAX_RESTARTS would allow another start."""
    words = [*LAUNCHER, failing_script(tmp_path, SLEEP), *flags_of(resumable(tiny_corpus, tmp_path / "run"))]
    with subprocess.Popen(
        words, env=environment(2, MAX_RESTARTS=1), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        read_until(process, "rank 1 sleeps")
        ranks = psutil.Process(process.pid).children()
        yield process
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
        process.kill()


@pytest.mark.slow
def test_signal_before_a_single_rank_has_any_handler_ends_it_with_75(tiny_corpus, tmp_path):
    script = tmp_path / "early.py"
    script.write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n" + FAILING_SCRIPT.replace("{failure}", "")
    )
    words = [*LAUNCHER, str(script), *flags_of(tiny_settings(tiny_corpus))]
    finished = subprocess.run(words, env=environment(1), capture_output=True, text=True, check=False, timeout=600)
    assert (finished.returncode, finished.stderr) == (75, "rank 0: stopped by SIGTERM before the first iteration\n")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core is all there is")
def test_ranks_get_as_many_threads_as_the_launcher_may_use_cores(tiny_corpus, tmp_path):
    """Slurm and containers allow a process fewer cores than the machine has."""
    script = tmp_path / "threads.py"
    script.write_text('import os\nprint(os.environ["OMP_NUM_THREADS"], "threads")\n')
    words = [*LAUNCHER, str(script), *flags_of(resumable(tiny_corpus, tmp_path / "run"))]
    one = min(os.sched_getaffinity(0))
    here = {name: value for name, value in environment(1, MAX_RESTARTS=1).items() if name != "OMP_NUM_THREADS"}
    finished = subprocess.run(
        words, env=here, capture_output=True, text=True, check=False, preexec_fn=lambda: os.sched_setaffinity(0, {one})
    )
    assert (finished.returncode, finished.stdout) == (0, "1 threads\n"), finished.stderr


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
    assert "restart" not in said
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.slow
def test_ranks_without_their_launcher_end_by_themselves(hanging):
    ranks = psutil.Process(hanging.pid).children()
    assert len(ranks) == 2
    hanging.kill()
    _, alive = psutil.wait_procs(ranks, timeout=600)
    assert not alive
    assert hanging.stdout is not None
    said = hanging.stdout.read()
    for rank in (0, 1):
        assert f"error: rank {rank}: the launcher that started it has gone." in said


def test_restarts_that_could_not_resume_are_refused_before_any_rank_is_started(tiny_corpus, tmp_path):
    words = flags_of(tiny_settings(tiny_corpus, save=tmp_path / "run"))
    environment = {"NPROC_PER_NODE": "2", "MAX_RESTARTS": "1"}
    ended = run_command("megatron_neobert.launch", SCRIPT, *words, environment=environment)
    assert ended.refused(2), ended.output
    assert ended.output.startswith("error: MAX_RESTARTS is set, but --save is ")
