"""Fixtures for runs that are killed: real starts of the training command, and an undisturbed run.

These tests take minutes and run in `make test-all` only. tests/distributed has runs that are stopped or damaged, with
forked ranks.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reliability.training_process import Training

ITERATIONS = 300
MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --max-position-embeddings 64 --seq-length 64"
STEPS = (
    f"--micro-batch-size 2 --global-batch-size 4 --train-iters {ITERATIONS} --lr-warmup-iters 1 --lr 2e-3 "
    "--min-lr 2e-4 --eval-iters 200 --eval-interval 200 --log-interval 1 --num-workers 0"
)


Start = Callable[..., Training]


@pytest.fixture(scope="session")
def start(tiny_corpus: Any) -> Start:
    """Return a function that starts the training command; its result is a context that ends all processes."""

    def start_training(save: Path, *options: object) -> Training:
        data = ["--data-path", tiny_corpus.prefix, "--tokenizer-model", tiny_corpus.tokenizer]
        return Training(
            [*data, *MODEL.split(), *STEPS.split(), "--save", str(save), "--load", str(save), *map(str, options)]
        )

    return start_training


@pytest.fixture(scope="session")
def undisturbed(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save folder of an undisturbed run of 300 iterations. Read only."""
    save = tmp_path_factory.mktemp("undisturbed")
    with start(save) as training:
        assert training.finish() == 0, training.output
    return save
