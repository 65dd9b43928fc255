"""Runs whose checkpoints rot, whose disk is full or whose ranks crash resume exactly from the newest sound one."""

import re
from pathlib import Path

import pytest
from distributed.training_command import TORCHRUN
from reliability.conftest import FAULTY_SCRIPT, ITERATIONS, LAUNCH_FAULTY
from reliability.states import assert_same_state, names_in

from megatron_neobert.checkpoint.folder import verify_files

pytestmark = pytest.mark.slow

LAST = f"iter_{ITERATIONS:07d}"


def flip_bit(path: Path) -> None:
    """Flip one bit in the middle; size and time stay."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_bit_flip_and_a_truncation_are_named_and_the_run_goes_on_exactly_from_the_checkpoint_before_them(
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
# What is broken, which rank, in which iteration; and how the checkpoint is written. The kernel refuses the writing. The
# second rank writes tensors with tensor parallelism only. Errors of rank 0 alone: distributed/test_saving.py, planted.
FULL_DISKS = {
    "file_size_limit:0:255": (),
    "file_size_limit:1:255": ("--async-save", "--tensor-model-parallel-size", 2),
}


def test_a_disk_that_is_full_for_one_rank_ends_all_with_74_leaves_the_old_checkpoints_and_loses_no_bit(
    start, copy_until, undisturbed
):
    save = copy_until(250)
    before = names_in(save)
    for fault, options in FULL_DISKS.items():
        with start(save, *OFTEN, *options, command=LAUNCH_FAULTY, FAULTS=fault) as training:
            assert training.finish() == 74, training.output
        assert sorted(re.findall(r"rank (\d) ends with (\d+)", training.output)) == [("0", "74"), ("1", "74")]
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


def test_torchrun_starts_a_crashed_run_again_and_it_ends_exactly_as_without_the_crash(start, copy_until, undisturbed):
    save = copy_until(200)
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "2", FAULTY_SCRIPT]
    with start(save, command=command, FAULTS="crash:1:260") as training:
        assert training.finish() == 0, training.output
    assert "crashed on purpose" in training.output
    assert f"from {save / 'iter_0000250'}" in training.output
    assert_same_state(save / LAST, undisturbed / LAST)
