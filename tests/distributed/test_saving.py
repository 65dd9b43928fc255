"""Checkpoints, saved at once or in the background, are complete or absent, and errors end all ranks."""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from commands import largest_file
from ranks import quick_only, read_metrics, train_on_ranks
from test_layouts import DP2_OVERLAP, TP2
from tests_tiny import ITERATIONS

from megatron_neobert.checkpoint import save as saver
from megatron_neobert.checkpoint.contents import StoredTensors
from megatron_neobert.checkpoint.folder import iteration_of, list_checkpoints, verify_files
from megatron_neobert.checkpoint.save import Saver
from megatron_neobert.config.schema import Settings
from megatron_neobert.errors import NeoBERTError
from megatron_neobert.runtime.watcher import Watcher
from megatron_neobert.training import loop


def tensors_of(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(checkpoint.glob("*.safetensors"))}


def saves_each_iteration(settings: Any, name: str, **checkpoint: Any) -> Settings:
    return settings(name).with_section("checkpoint", save_interval=1, **checkpoint)


def write_after_the_next_update() -> None:
    """Delay the writing of every file until the next update has changed the weights."""
    write, save = saver._write, Saver.save

    def save_later(self: Saver) -> None:
        saved = self.run.state.iteration

        def write_later(*args: Any) -> Any:
            while self.run.state.iteration == saved < ITERATIONS:
                time.sleep(0.001)
            return write(*args)

        saver._write = write_later
        save(self)

    Saver.save = save_later


CASES = {
    "one rank": (1, "parallel", {}),
    "data parallel 2, overlapped": (2, "parallel", DP2_OVERLAP),
    "data parallel 2, Muon": (2, "optimizer", {"optimizer": "muon"}),
    "tensor parallel 2": (2, "parallel", TP2),
}


@pytest.mark.parametrize("case", quick_only(CASES, "data parallel 2, overlapped"))
def test_checkpoint_written_in_the_background_has_the_state_of_its_iteration(settings, case):
    world_size, section, changes = CASES[case]
    sync_run, async_run = (
        saves_each_iteration(settings, name, async_save=name == "async")
        .with_section(section, **changes)
        .with_section("training", bf16=True)
        for name in ("sync", "async")
    )
    train_on_ranks(sync_run, world_size=world_size)
    train_on_ranks(async_run, world_size=world_size, prepare=write_after_the_next_update)
    assert read_metrics(async_run.checkpoint.save) == read_metrics(sync_run.checkpoint.save)
    expected, saved = (list_checkpoints(Path(run.checkpoint.save)) for run in (sync_run, async_run))
    assert [folder.name for folder in saved] == [folder.name for folder in expected]
    assert len(saved) == ITERATIONS
    for folder, expected_folder in zip(saved, expected, strict=True):
        verify_files(folder)
        assert tensors_of(folder) == tensors_of(expected_folder)
        stored = StoredTensors(folder)
        weights = [name for name in stored.shapes if not name.startswith("optimizer.")]
        assert weights
        # Weights equal the main weights, also if weights of other ranks are gathered only in the next step.
        for name in weights:
            assert stored.main_name(name) != name
            assert torch.equal(stored.read_whole(stored.main_name(name)).bfloat16(), stored.read_whole(name)), name


def fill_the_disk_of_rank_1() -> None:
    """Let the kernel refuse large files of rank 1 while it writes the checkpoint of iteration 3."""
    write = saver._write

    def write_or_fail(path: Path, *args: Any) -> Any:
        if torch.distributed.get_rank() == 1 and "0000003" in str(path):
            with largest_file(1 << 16):
                return write(path, *args)
        return write(path, *args)

    saver._write = write_or_fail


def fail_to_publish() -> None:
    """Let a function of checkpoint/save.py, which only rank 0 calls, fail at iteration 3."""
    publish = saver.publish

    def publish_or_fail(temporary: Path, final: Path) -> None:
        if final.name == "iter_0000003":
            raise OSError(28, "No space left on device")
        publish(temporary, final)

    saver.publish = publish_or_fail


def error_of_all_ranks(run: Settings, *, prepare: Callable[[], None]) -> str:
    """Train on two ranks, and return the error message, which must be the same on all ranks.

    If a rank did not learn of the error, it would lose the other rank or hang for two minutes, without this message.
    """
    folder = Path(run.checkpoint.save).parent

    def record_error(settings: Settings, watcher: Watcher) -> None:
        with pytest.raises(NeoBERTError) as caught:
            loop.run_training(settings, watcher)
        (folder / f"error.{os.environ['RANK']}").write_text(f"{caught.value.exit_code}: {caught.value}")

    def prepare_rank() -> None:
        prepare()
        ranks.run_training = record_error

    run = run.with_section("parallel", distributed_timeout_minutes=2)
    train_on_ranks(run, world_size=2, prepare=prepare_rank)
    first, second = ((folder / f"error.{rank}").read_text() for rank in range(2))
    assert first == second
    return first


def poison_a_weight_after_the_update() -> None:
    """Set a weight of rank 1 to NaN before it is saved, when losses and gradients are finite."""
    save = Saver.save

    def save_poisoned(self: Saver) -> None:
        if self.run.state.iteration == 2 and torch.distributed.get_rank() == 1:
            with torch.no_grad():
                self.run.unwrapped_model.decoder.layers[1].mlp.linear_fc2.weight[0, 0] = float("nan")
        save(self)

    Saver.save = save_poisoned


@pytest.mark.parametrize(
    ("prepare", "is_async", "sentence", "saved"),
    [
        (fill_the_disk_of_rank_1, True, "74: iteration 3 could not be saved: rank 1 on .*File too large.*", 2),
        (fail_to_publish, False, "74: iteration 3 could not be saved: rank 0 on .*No space left.*", 2),
        (poison_a_weight_after_the_update, False, r"70: iteration 2 could not be saved: .*linear_fc2\.weight.*", 1),
    ],
)
def test_error_of_one_rank_ends_all_ranks_and_keeps_older_checkpoints(settings, prepare, is_async, sentence, saved):
    run = saves_each_iteration(settings, "run", async_save=is_async).with_section("parallel", **TP2)
    error = error_of_all_ranks(run, prepare=prepare)
    assert re.match(f"{sentence} The newest checkpoint is .*/iter_000000{saved}", error), error
    save = Path(run.checkpoint.save)
    assert [iteration_of(folder) for folder in list_checkpoints(save)] == list(range(saved, 0, -1))
    assert not list(save.glob(".*")), "no temporary folder is left"


def refuse_reads_of_each_box() -> None:
    """Let a save fail if the host reads numbers of tensors one by one. On a GPU, it waits for each of them."""
    check = Saver._check_finite

    def counted(self: Saver, boxes: Any) -> None:
        with torch.profiler.profile() as profile:
            check(self, boxes)
        reads = sum(event.name == "aten::_local_scalar_dense" for event in profile.events())
        # Without boxes 2 reads, by all_gather_object.
        assert 0 < reads < 4 < len(boxes), reads

    Saver._check_finite = counted


def test_the_host_reads_whether_all_boxes_are_finite_at_once(settings):
    train_on_ranks(settings("run", training={"train_iters": 2}), prepare=refuse_reads_of_each_box)
