"""A run that stops and goes on is the run that never stopped."""

import contextlib
import shutil
from pathlib import Path

import pytest
from ranks import read_metrics, train_on_ranks
from test_layouts import DP2_OVERLAP, largest_relative_gap
from tests_tiny import ITERATIONS
from tolerances import LAYOUT_LOSS

from megatron_neobert import megatron_fixes
from megatron_neobert.errors import CheckpointError
from megatron_neobert.training.checkpoint_files import verify_files

STOP = ITERATIONS // 2
CASES = {
    "one rank": (1, {}, {}),
    "one rank, bfloat16": (1, {}, {"bf16": True}),
    "one rank, whole optimizer": (1, {"use_distributed_optimizer": False}, {}),
    "two ranks, several buckets": (2, DP2_OVERLAP, {}),
    "tensor parallel 2": (2, {"tensor_model_parallel_size": 2}, {}),
}
# 72 is no multiple of 128, so every bucket ends in padding, which is what the defect of megatron.core needs.
PADDED_BUCKETS = {"model": {"hidden_size": 72}, "parallel": DP2_OVERLAP}


def stop_and_resume(settings, *, world_size: int, parallel: dict, training: dict, model: dict | None = None) -> Path:
    model = model or {}
    stop = {**training, "exit_interval": STOP}
    for _ in range(2):  # the same command twice: the first stops at STOP, the second goes on
        run = settings("stopped", model=model, parallel=parallel, training=stop)
        run = run.with_section("checkpoint", load=run.checkpoint.save)
        train_on_ranks(run, world_size=world_size)
    return Path(run.checkpoint.save)


@pytest.mark.parametrize("case", CASES)
def test_losses_after_resume_equal_the_uninterrupted_run_bit_for_bit(settings, case):
    world_size, parallel, training = CASES[case]
    uninterrupted = settings("uninterrupted", parallel=parallel, training=training)
    train_on_ranks(uninterrupted, world_size=world_size)
    save = stop_and_resume(settings, world_size=world_size, parallel=parallel, training=training)
    for key in ("loss", "grad_norm", "consumed_tokens", "validation_loss"):
        assert read_metrics(save, key) == read_metrics(uninterrupted.checkpoint.save, key), key


def test_padded_buckets_resume_exactly_only_with_the_fix_for_megatron(settings):
    uninterrupted = settings("uninterrupted", **PADDED_BUCKETS)
    train_on_ranks(uninterrupted, world_size=2)
    expected = read_metrics(uninterrupted.checkpoint.save)

    save = stop_and_resume(settings, world_size=2, training={}, **PADDED_BUCKETS)
    assert read_metrics(save) == expected

    shutil.rmtree(save)
    run = settings("stopped", training={"exit_interval": STOP}, **PADDED_BUCKETS)
    run = run.with_section("checkpoint", load=run.checkpoint.save)
    for _ in range(2):
        train_on_ranks(run, world_size=2, prepare=leave_bucket_offsets_alone)
    assert read_metrics(run.checkpoint.save)[ITERATIONS] != expected[ITERATIONS], "the defect is gone; so may the fix"


def leave_bucket_offsets_alone() -> None:
    """The control: in this process, buffers keep the offsets that count padding."""
    megatron_fixes._offsets_without_padding = lambda buffer: contextlib.nullcontext()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, {}), (1, {})),
        ((2, {"tensor_model_parallel_size": 2}), (1, {})),
        ((1, {}), (2, {"tensor_model_parallel_size": 2})),
    ],
    ids=["data parallel 2 to 1", "tensor parallel 2 to 1", "1 to tensor parallel 2"],
)
def test_a_checkpoint_goes_on_in_another_layout(settings, before, after):
    uninterrupted = settings("uninterrupted")
    train_on_ranks(uninterrupted)
    for world_size, parallel in (before, after):
        run = settings("moved", parallel=parallel, training={"exit_interval": STOP})
        run = run.with_section("checkpoint", load=run.checkpoint.save)
        train_on_ranks(run, world_size=world_size)
    gap = largest_relative_gap(read_metrics(uninterrupted.checkpoint.save), read_metrics(run.checkpoint.save))
    assert gap <= LAYOUT_LOSS.gate


def test_a_damaged_newest_checkpoint_is_skipped_for_the_one_before(settings):
    save = stop_and_resume(settings, world_size=1, parallel={}, training={})
    newest = save / f"iter_{ITERATIONS:07d}"
    with next(newest.glob("*.distcp")).open("r+b") as stream:
        stream.seek(1000)
        byte = stream.read(1)
        stream.seek(1000)
        stream.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CheckpointError, match="its sha256 is not"):
        verify_files(newest)
    run = settings("stopped")
    train_on_ranks(run.with_section("checkpoint", load=run.checkpoint.save))
    losses = [line for line in (save / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert len(losses) == ITERATIONS + STOP, f"iterations {STOP + 1} to {ITERATIONS} are trained a second time"


def test_another_model_is_refused_with_both_values(settings):
    first = settings("run", training={"exit_interval": 1})
    train_on_ranks(first)
    other = settings("run", model={"num_layers": 3}).with_section("checkpoint", load=first.checkpoint.save)
    with pytest.raises(Exception, match="--num-layers was 2 and is now 3"):
        train_on_ranks(other)
