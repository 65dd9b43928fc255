"""A loss that is not finite on one rank of two, as the launcher and whoever started it see it."""

from reliability.conftest import LAUNCH_FAULTY
from reliability.states import progress_of, tensors_of


def test_too_many_losses_that_are_not_finite_end_the_command_with_70_and_one_sentence_and_what_is_saved_is_finite(
    start, tmp_path
):
    options = ("--max-skipped-iters", 1)
    with start(tmp_path, *options, command=LAUNCH_FAULTY, FAULTS="nan_loss:1:4") as training:
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
