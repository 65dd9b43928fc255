"""Fixtures for runs that are killed, stopped or damaged: real starts of the training command, and an undisturbed run.

Tests compare the last checkpoint bit for bit with that of the undisturbed run. They take minutes and run in
`make test-all` only; tests/distributed guards the same promises with forked ranks.
"""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed.training_command import BASH
from reliability.training_process import Training

FAULTY_SCRIPT = str(Path(__file__).with_name("faulty_training.py"))
LAUNCH_FAULTY = [sys.executable, "-m", "megatron_neobert.launch", FAULTY_SCRIPT]

ITERATIONS, SAVE_INTERVAL, EVAL_INTERVAL = 300, 50, 200
MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --max-position-embeddings 64 --seq-length 64"
STEPS = (
    f"--micro-batch-size 2 --global-batch-size 4 --train-iters {ITERATIONS} --lr-warmup-iters 1 --lr 2e-3 "
    f"--min-lr 2e-4 --eval-iters 200 --eval-interval {EVAL_INTERVAL} --log-interval 1 --num-workers 0"
)


Start = Callable[..., Training]


@pytest.fixture(scope="session")
def start(tiny_corpus: Any) -> Start:
    """Return a function that starts the training command; its result is a context that ends all processes.

    Options replace those of the small run.
    """

    def start_training(save: Path, *options: object, command: list[str] = BASH, **variables: object) -> Training:
        data = ["--data-path", tiny_corpus.prefix, "--tokenizer-model", tiny_corpus.tokenizer]
        folders = ["--save", str(save), "--load", str(save), "--save-interval", str(SAVE_INTERVAL)]
        arguments = [*data, *MODEL.split(), *STEPS.split(), *folders, *map(str, options)]
        return Training([*command, *arguments], **variables)

    return start_training


@pytest.fixture(scope="session")
def undisturbed(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save folder of an undisturbed run of 300 iterations with a checkpoint every 50 iterations. Read only."""
    save = tmp_path_factory.mktemp("undisturbed")
    with start(save, command=LAUNCH_FAULTY) as training:
        assert training.finish() == 0, training.output
    return save


@pytest.fixture
def copy_until(undisturbed: Path, tmp_path: Path) -> Callable[[int], Path]:
    """Return a function that copies the undisturbed run's checkpoints up to an iteration into a new save folder."""

    def copy(iteration: int) -> Path:
        save = tmp_path / "run"
        save.mkdir()
        for number in range(SAVE_INTERVAL, iteration + 1, SAVE_INTERVAL):
            name = f"iter_{number:07d}"
            shutil.copytree(undisturbed / name, save / name)
        if iteration:
            (save / "latest_checkpointed_iteration.txt").write_text(str(iteration))
        return save

    return copy
