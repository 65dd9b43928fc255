"""Proof that a run survives what happens to runs: real starts of the training command, and one run to compare with.

Where what is proven (two gloo ranks unless something else is said; "exact" compares the tensors of the last
checkpoint bit for bit with those of a run that nothing has happened to):

    ranks end with the same weights                                         test_interruptions.py
    a run that was stopped goes on exactly                                  test_interruptions.py; every layout:
                                                                            distributed/test_resume.py
    another number of ranks, another layout                                 distributed/test_resume.py
    signals in training, to one rank and to the launcher                    distributed/test_launch.py
    signals during imports, validation and a save in the background         test_interruptions.py
    signals before the ranks have met                                       unit/runtime/test_signals.py
    second Ctrl-C                                                           distributed/test_launch_restarts.py
    time limit, SAVE_NOW, STOP                                              test_interruptions.py; SAVE_NOW and a save
                                                                            in the background:
                                                                            distributed/test_saving.py
    kill -9 of everything, of one rank, of the launcher, during saves       test_kills.py
    bit flip, truncation, every checkpoint damaged                          test_damage.py; other damage:
                                                                            unit/checkpoint/test_folder.py
    disk full, before and while a checkpoint is written                     test_full_disk.py
    a save that fails on one rank ends all with one sentence                distributed/test_saving.py
    a loss or gradient on one rank that is not finite, spikes               distributed/test_skipped_updates.py; the
                                                                            end with 70: test_hangs_and_restarts.py
    a weight that is not finite is not saved                                distributed/test_saving.py
    replicas that drift apart are not saved                                 distributed/test_saving.py
    a rank that hangs                                                       test_hangs_and_restarts.py
    ranks started again by torchrun                                         test_hangs_and_restarts.py; by our launcher:
                                                                            distributed/test_launch_restarts.py
    which checkpoints are deleted                                           distributed/test_saving.py
    a crash at every file-system event of a save and of deleting            unit/checkpoint/test_folder.py
    settings that have changed                                              unit/config/test_resume_rules.py,
                                                                            distributed/test_resume.py
    --resume                                                                unit/checkpoint/test_folder.py,
                                                                            distributed/test_resume.py
"""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

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


class Start(Protocol):
    """Starts the training command; the options come after, and win over, those of the tiny run."""

    def __call__(
        self, save: Path, *options: object, ranks: int = 2, command: list[str] = BASH, **variables: object
    ) -> Training: ...


@pytest.fixture(scope="session")
def start(tiny_corpus: Any) -> Start:
    """To be used as a context, so that no process outlives its test."""

    def start_training(
        save: Path, *options: object, ranks: int = 2, command: list[str] = BASH, **variables: object
    ) -> Training:
        data = ["--data-path", tiny_corpus.prefix, "--tokenizer-model", tiny_corpus.tokenizer]
        folders = ["--save", str(save), "--load", str(save), "--save-interval", str(SAVE_INTERVAL)]
        words = [*data, *MODEL.split(), *STEPS.split(), *folders, *map(str, options)]
        return Training([*command, *words], ranks=ranks, **variables)

    return start_training


@pytest.fixture(scope="session")
def undisturbed(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SAVE of a run of 300 iterations that nothing happens to, with a checkpoint after each 50; only to be read."""
    save = tmp_path_factory.mktemp("undisturbed")
    with start(save, command=LAUNCH_FAULTY) as training:
        assert training.finish() == 0, training.output
    (save / "output.txt").write_text(training.output)
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
