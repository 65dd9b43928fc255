"""Runs with damaged checkpoints, a full disk or crashed ranks resume from the newest undamaged checkpoint."""

from pathlib import Path

import pytest
from reliability.conftest import ITERATIONS, LAUNCH_FAULTY
from reliability.states import assert_same_state, names_in

from megatron_neobert.checkpoint.folder import verify_files

pytestmark = pytest.mark.slow

LAST = f"iter_{ITERATIONS:07d}"


def flip_bit(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_flipped_bit_and_truncated_file_are_named_and_the_run_resumes_from_an_older_checkpoint(
    start, copy_until, undisturbed
):
    save = copy_until(250)
    flipped, truncated = (min((save / name).glob("*.safetensors")) for name in ("iter_0000250", "iter_0000200"))
    size = truncated.stat().st_size
    flip_bit(flipped)
    with truncated.open("r+b") as stream:
        stream.truncate(size // 2)
    with start(save) as training:
        assert training.finish() == 0, training.output
    warnings = [line for line in training.lines if line.startswith("warning: skipped a damaged checkpoint")]
    assert len(warnings) == 2
    assert str(flipped) in warnings[0] and "sha256" in warnings[0]
    assert str(truncated) in warnings[1] and f"{size // 2} bytes, expected {size}" in warnings[1]
    assert f"from {save / 'iter_0000150'}" in training.output
    assert_same_state(save / LAST, undisturbed / LAST)
    assert {"iter_0000250.damaged", "iter_0000200.damaged", "iter_0000250", "iter_0000200"} <= names_in(save)


OFTEN = ("--save-interval", 10)
# Fault, and options of the run. Rank 1 writes tensors with tensor parallelism only. tests/distributed/test_saving.py
# tests errors in the files that rank 0 alone writes.
FULL_DISKS = {
    "file_size_limit:0:255": (),
    "file_size_limit:1:255": ("--async-save", "--tensor-model-parallel-size", 2),
}


def test_full_disk_of_one_rank_ends_all_ranks_with_74_and_loses_no_checkpoint(start, copy_until, undisturbed):
    save = copy_until(250)
    before = names_in(save)
    for fault, options in FULL_DISKS.items():
        with start(save, *OFTEN, *options, command=LAUNCH_FAULTY, FAULTS=fault) as training:
            assert training.finish() == 74, training.output
        (error,) = [line for line in training.lines if line.startswith("error")]
        rank = fault.split(":")[1]
        assert "iteration 260 could not be saved: " in error and f"rank {rank}" in error and "File too large" in error
        assert f"The newest checkpoint is {save / 'iter_0000250'}" in error
        assert "Traceback" not in training.output
        assert {name for name in names_in(save) if not name.startswith(".tmp-")} == before
        verify_files(save / "iter_0000250")
    with start(save, *OFTEN) as training:
        assert training.finish() == 0, training.output
    assert_same_state(save / LAST, undisturbed / LAST)
    assert [name for name in names_in(save) if name.startswith(".")] == []
