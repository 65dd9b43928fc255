"""Proof that a run survives what happens to runs: real starts of the training command, and one run to compare with.

"Exactly" compares the tensors of the last checkpoint bit for bit with those of a run that nothing has happened to. All
of this takes minutes and is left to `make test-all`; tests/distributed guards the same promises with forked ranks.
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
    """Return a function that starts the training command, to be used as a context, so that no process outlives it.

    Its options come after those of the tiny run, and win over them.
    """

    def start_training(save: Path, *options: object, command: list[str] = BASH, **variables: object) -> Training:
        data = ["--data-path", tiny_corpus.prefix, "--tokenizer-model", tiny_corpus.tokenizer]
        folders = ["--save", str(save), "--load", str(save), "--save-interval", str(SAVE_INTERVAL)]
        words = [*data, *MODEL.split(), *STEPS.split(), *folders, *map(str, options)]
        return Training([*command, *words], **variables)

    return start_training


@pytest.fixture(scope="session")
def undisturbed(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SAVE of a run of 300 iterations that nothing happens to, with a checkpoint after each 50; only to be read."""
    save = tmp_path_factory.mktemp("undisturbed")
    with start(save, command=LAUNCH_FAULTY) as training:
        assert training.finish() == 0, training.output
    return save


@pytest.fixture
def copy_until(undisturbed: Path, tmp_path: Path) -> Callable[[int], Path]:
    """Makes a SAVE that holds the undisturbed run's checkpoints up to an iteration, as if it had ended there."""

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
