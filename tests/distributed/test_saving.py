"""Saving: at once or in the background, whole or not at all, the same on all ranks."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import read_metrics, train_on_ranks
from test_layouts import DP2_OVERLAP, TP2
from tests_tiny import ITERATIONS
from torch import multiprocessing

from megatron_neobert.config import Settings
from megatron_neobert.training import checkpoint_writer, loop, saver
from megatron_neobert.training.checkpoint_files import list_checkpoints, verify_files
from megatron_neobert.training.checkpoint_writer import TensorWriter
from megatron_neobert.training.saver import Saver

WHOLE_OPTIMIZER = {"use_distributed_optimizer": False}


def tensors_of(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(checkpoint.glob("*.distcp"))}


def saves_each_iteration(settings: Any, name: str, **checkpoint: Any) -> Settings:
    run = settings(name)
    return run.with_section("checkpoint", load=run.checkpoint.save, save_interval=1, **checkpoint)


def write_after_the_next_update() -> None:
    """Every file waits until the weights have changed since it was asked for."""
    updated = threading.Event()
    write, save, step = checkpoint_writer._write, Saver.save, loop.train_step

    def write_later(*args: Any) -> Any:
        assert updated.wait(30)
        return write(*args)

    def save_and_hold(self: Saver) -> None:
        updated.clear()
        if self.run.progress.iteration == ITERATIONS:  # no other update will come
            updated.set()
        save(self)

    def step_and_release(*args: Any) -> Any:
        report = step(*args)
        updated.set()
        return report

    checkpoint_writer._write, Saver.save, loop.train_step = write_later, save_and_hold, step_and_release


def write_after_the_next_update_from_no_copy() -> None:
    write_after_the_next_update()
    begin = TensorWriter.__init__

    def without_copy(self: TensorWriter, *args: Any, copy: bool) -> None:
        begin(self, *args, copy=False)

    TensorWriter.__init__ = without_copy


CASES = {
    "one rank": (1, {}),
    "one rank, whole optimizer": (1, WHOLE_OPTIMIZER),
    "data parallel 2, overlapped": (2, DP2_OVERLAP),
    "tensor parallel 2": (2, TP2),
}


def checkpoints_at_once_and_beside(settings: Any, case: str, prepare: Any) -> tuple[list[Path], list[Path]]:
    world_size, parallel = CASES[case]
    at_once = saves_each_iteration(settings, "at_once").with_section("parallel", **parallel)
    beside = saves_each_iteration(settings, "beside", async_save=True).with_section("parallel", **parallel)
    train_on_ranks(at_once, world_size=world_size)
    train_on_ranks(beside, world_size=world_size, prepare=prepare)
    assert read_metrics(beside.checkpoint.save) == read_metrics(at_once.checkpoint.save)
    return list_checkpoints(Path(at_once.checkpoint.save)), list_checkpoints(Path(beside.checkpoint.save))


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_written_while_training_goes_on_is_that_of_the_iteration_it_was_asked_for(settings, case):
    expected, saved = checkpoints_at_once_and_beside(settings, case, write_after_the_next_update)
    assert [folder.name for folder in saved] == [folder.name for folder in expected]
    assert len(saved) == ITERATIONS
    for folder, other in zip(saved, expected, strict=True):
        verify_files(folder)
        assert tensors_of(folder) == tensors_of(other)


def test_without_the_copy_it_would_hold_later_moments(settings):
    expected, saved = checkpoints_at_once_and_beside(
        settings, "one rank, whole optimizer", write_after_the_next_update_from_no_copy
    )
    assert saved[2].name == expected[2].name
    assert tensors_of(saved[2]) != tensors_of(expected[2])


def fail_on_rank(rank: int, iteration: int) -> Any:
    """No room on one rank's disk from some iteration on."""

    def prepare() -> None:
        write = checkpoint_writer._write

        def write_or_fail(storage: Any, bucket: Any) -> Any:
            if torch.distributed.get_rank() == rank and f"{iteration:07d}" in str(bucket[0]):
                raise OSError(28, "No space left on device", str(bucket[0]))
            return write(storage, bucket)

        checkpoint_writer._write = write_or_fail

    return prepare


def fail_in(function: str) -> Any:
    """Rank 0 alone meets the error, after all tensors are written."""

    def prepare() -> None:
        def fail(*args: Any, **kwargs: Any) -> None:
            raise OSError(28, "No space left on device")

        setattr(saver, function, fail)

    return prepare


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_ends_all_ranks_and_the_older_checkpoint_stays(settings, capfd, rank, is_async):
    run = saves_each_iteration(settings, "run", async_save=is_async).with_section("parallel", **TP2)
    with pytest.raises(multiprocessing.ProcessRaisedException, match=f"rank {rank} on .*No space left on device"):
        train_on_ranks(run, world_size=2, prepare=fail_on_rank(rank, iteration=3))
    save = Path(run.checkpoint.save)
    assert [folder.name for folder in list_checkpoints(save)] == ["iter_0000002", "iter_0000001"]
    assert not list(save.glob(".*"))
    train_on_ranks(run, world_size=2)
    assert f"from {save}/iter_0000002" in capfd.readouterr().out
    assert list_checkpoints(save)[0].name == f"iter_{ITERATIONS:07d}"


@pytest.mark.parametrize("function", ["write_record", "write_manifest", "publish"])
def test_an_error_that_rank_0_alone_meets_ends_all_ranks(settings, function):
    run = saves_each_iteration(settings, "run")
    with pytest.raises(multiprocessing.ProcessRaisedException, match=r"iteration 1 could not be saved: rank 0"):
        train_on_ranks(run, world_size=2, prepare=fail_in(function))
    assert list_checkpoints(Path(run.checkpoint.save)) == []


def poison_a_weight_after_the_update() -> None:
    """On the last rank, where only a look at the weights can find it: gradients and losses are finite."""
    save = Saver.save

    def save_poisoned(self: Saver) -> None:
        if self.run.progress.iteration == 2 and torch.distributed.get_rank() == 1:
            with torch.no_grad():
                self.run.unwrapped_models[0].decoder.layers[1].mlp.linear_fc2.weight[0, 0] = float("nan")
        save(self)

    Saver.save = save_poisoned


def test_weights_that_are_not_finite_are_not_saved(settings):
    run = saves_each_iteration(settings, "run").with_section("parallel", **TP2)
    with pytest.raises(multiprocessing.ProcessRaisedException, match=r"iteration 2 is not saved: .*linear_fc2\.weight"):
        train_on_ranks(run, world_size=2, prepare=poison_a_weight_after_the_update)
    assert [folder.name for folder in list_checkpoints(Path(run.checkpoint.save))] == ["iter_0000001"]
    unchecked = saves_each_iteration(settings, "unchecked", check_for_nan=False).with_section("parallel", **TP2)
    unchecked = unchecked.with_section("training", exit_interval=2)
    train_on_ranks(unchecked, world_size=2, prepare=poison_a_weight_after_the_update)
    assert list_checkpoints(Path(unchecked.checkpoint.save))[0].name == "iter_0000002"


def test_only_the_newest_checkpoints_are_kept_and_those_of_every_so_many_iterations(settings):
    run = saves_each_iteration(settings, "run", keep_last=2, keep_every=3)
    train_on_ranks(run)
    kept = [folder.name for folder in list_checkpoints(Path(run.checkpoint.save))]
    assert kept == ["iter_0000006", "iter_0000005", "iter_0000003"]
