"""A disk that is full: the checkpoint is not there, all others are, and the run goes on exactly once there is room."""

import re

import pytest
from reliability.conftest import ITERATIONS, LAUNCH_FAULTY
from reliability.states import assert_same_state, names_in

from megatron_neobert.checkpoint.folder import verify_files

OFTEN = ("--save-interval", 10)
# What is broken, which rank, in which iteration; and how the checkpoint is written. The kernel refuses the writing. The
# second rank writes tensors with tensor parallelism only. Errors of rank 0 alone: distributed/test_saving.py, planted.
CASES = {
    "file_size_limit:0:255": (),
    "file_size_limit:1:255": ("--async-save", "--tensor-model-parallel-size", 2),
}


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_rank_ends_all_with_74_leaves_the_old_checkpoints_and_loses_no_bit(
    start, copy_until, undisturbed
):
    save = copy_until(250)
    before = names_in(save)
    for fault, options in CASES.items():
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
    last = f"iter_{ITERATIONS:07d}"
    assert_same_state(save / last, undisturbed / last)
    assert [name for name in names_in(save) if name.startswith(".")] == []
