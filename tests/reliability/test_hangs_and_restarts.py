"""How a broken rank ends the command, and that a run that is started again resumes as if nothing had been."""

import re

import pytest
from distributed.training_command import TORCHRUN
from reliability.conftest import FAULTY_SCRIPT, ITERATIONS, LAUNCH_FAULTY
from reliability.states import assert_same_state, progress_of, tensors_of

LAST = f"iter_{ITERATIONS:07d}"


@pytest.mark.slow
def test_a_hanging_rank_ends_all_with_69_and_is_named_with_its_iteration(start, tmp_path):
    limit = ("--distributed-timeout-minutes", 0.15)  # 9 s, which building the run must not take
    with start(tmp_path, *limit, command=LAUNCH_FAULTY, FAULTS="hang:1:5") as training:
        assert training.finish() == 69, training.output
    (sentence,) = [line for line in training.lines if "no progress for" in line]
    assert "in iteration 5 (training)" in sentence
    # The rank that reports first does so for all, of itself or of the other.
    culprit = r"rank 1 \(\S+\)( in iteration 5 \(training\); it)? is behind in iteration 5"
    assert re.search(culprit, sentence), sentence
    assert training.output.count("where rank 1 stands:") == 1
    assert "in hang\n" in training.output.split("where rank 1 stands:")[1], "its stack shows the line"
    assert "iteration 4/" in training.output


@pytest.mark.slow
def test_torchrun_starts_a_crashed_run_again_and_it_ends_exactly_as_without_the_crash(start, copy_until, undisturbed):
    save = copy_until(200)
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "2", FAULTY_SCRIPT]
    with start(save, command=command, FAULTS="crash:1:260") as training:
        assert training.finish() == 0, training.output
    assert "crashed on purpose" in training.output
    assert f"from {save / 'iter_0000250'}" in training.output
    assert_same_state(save / LAST, undisturbed / LAST)


@pytest.mark.slow
def test_too_many_losses_that_are_not_finite_end_the_command_with_70_and_one_sentence_and_what_is_saved_is_finite(
    start, tmp_path
):
    with start(tmp_path, command=LAUNCH_FAULTY, FAULTS="one_skip:0:1 one_skip:1:1 nan_loss:1:4") as training:
        assert training.finish() == 70, training.output
    assert sorted(line for line in training.lines if "ends with" in line) == [
        f"rank {i} ends with 70\n" for i in (0, 1)
    ]
    (error,) = [line for line in training.lines if line.startswith("error")]
    assert "--iteration 4" in error, "how to replay it"
    assert "Traceback" not in training.output
    last = tmp_path / "iter_0000004"
    assert all(tensor.isfinite().all() for tensor in tensors_of(last).values())
    assert progress_of(last)["skipped_iterations"] == 1
