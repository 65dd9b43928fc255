"""How a broken rank ends the command, and that a run that is started again resumes as if nothing had been."""

import pytest
from distributed.training_command import TORCHRUN
from reliability.conftest import FAULTY_SCRIPT, ITERATIONS
from reliability.states import assert_same_state

LAST = f"iter_{ITERATIONS:07d}"


@pytest.mark.slow
def test_torchrun_starts_a_crashed_run_again_and_it_ends_exactly_as_without_the_crash(start, copy_until, undisturbed):
    save = copy_until(200)
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "2", FAULTY_SCRIPT]
    with start(save, command=command, FAULTS="crash:1:260") as training:
        assert training.finish() == 0, training.output
    assert "crashed on purpose" in training.output
    assert f"from {save / 'iter_0000250'}" in training.output
    assert_same_state(save / LAST, undisturbed / LAST)
