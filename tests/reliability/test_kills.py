"""A run whose processes are killed at random moments equals an undisturbed run.

Real starts of the training command take minutes. tests/distributed/test_interruptions.py has runs that are stopped or
damaged, with forked ranks.
"""

import os
import random
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from distributed.ranks import read_metrics
from reliability.states import assert_same_state, names_in
from reliability.training_process import Training

ITERATIONS = 300
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --max-position-embeddings 64 --seq-length 64 "
    f"--micro-batch-size 2 --global-batch-size 4 --train-iters {ITERATIONS} --lr-warmup-iters 1 --lr 2e-3 "
    "--min-lr 2e-4 --eval-iters 200 --eval-interval 200 --log-interval 1 --num-workers 0"
).split()
SYNC, ASYNC = ("--save-interval", 5), ("--save-interval", 5, "--async-save")


def start_training(corpus: Any, save: Path, *options: object) -> Training:
    """Start the training command, which resumes. The end of the context kills its processes."""
    data = ["--data-path", corpus.prefix, "--tokenizer-model", corpus.tokenizer]
    return Training([*data, *FLAGS, "--save", str(save), "--load", str(save), *map(str, options)])


def wait_for_a_random_moment(training: Training, rng: random.Random) -> None:
    """Wait for 5 to 25 iterations of this start, and then for a random part of an iteration or a save."""
    first = int(training.wait_for("iteration ").split()[1].split("/")[0])
    training.wait_for(f"iteration {first + rng.randint(5, 25)}/")
    time.sleep(rng.uniform(0, 0.1))


def stop_in_a_save(training: Training, save: Path) -> None:
    """Stop all processes while a checkpoint is half written, after this start has saved another one."""
    training.wait_for("saved ")
    while True:
        training.wait_until(lambda: is_half_written(save))
        training.send_to_all(signal.SIGSTOP)
        if is_half_written(save):
            return
        training.send_to_all(signal.SIGCONT)  # the save was completed; try with the next one


def is_half_written(save: Path) -> bool:
    return any(save.glob(".tmp-iter_*/*.safetensors"))


@pytest.mark.slow
def test_run_killed_five_times_equals_the_undisturbed_run_bit_for_bit(tiny_corpus, tmp_path):
    rng, start = random.Random(5), partial(start_training, tiny_corpus)
    save, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    with start(undisturbed) as training:
        assert training.finish() == 0, training.output

    with start(save, *ASYNC) as training:  # all processes, as in a power failure
        wait_for_a_random_moment(training, rng)
        training.kill()
        assert training.finish() == -signal.SIGKILL, training.output
    for options in (ASYNC, SYNC):  # all processes during a save
        with start(save, *options) as training:
            stop_in_a_save(training, save)
            training.kill()
        assert is_half_written(save)

    with start(save, *SYNC) as training:  # one rank
        training.wait_for("training ")
        rank_1 = training.rank(1)
        wait_for_a_random_moment(training, rng)
        os.kill(rank_1, signal.SIGKILL)
        assert training.finish() == 128 + signal.SIGKILL, training.output
    (error,) = [line for line in training.lines if line.startswith("error")]
    assert "error on rank 1 (" in error and ": was ended by signal 9 (Killed). The last checkpoint" in error
    assert "Traceback" not in training.output

    with start(save, *ASYNC) as training:  # the launcher, whose ranks must end by themselves
        wait_for_a_random_moment(training, rng)
        os.kill(training.process.pid, signal.SIGKILL)
        training.finish()
    assert training.processes() == []
    assert max(read_metrics(save)) < ITERATIONS

    with start(save) as training:
        assert training.finish() == 0, training.output
    assert_same_state(save / f"iter_{ITERATIONS:07d}", undisturbed / f"iter_{ITERATIONS:07d}")
    assert read_metrics(save) == read_metrics(undisturbed)
    assert [name for name in names_in(save) if name.startswith(".")] == []
    assert "damaged" not in " ".join(names_in(save))
