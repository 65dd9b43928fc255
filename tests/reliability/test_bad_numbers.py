"""Losses and gradients that are not finite on one rank of two: no rank takes them into its weights."""

import re

from reliability.conftest import LAUNCH_FAULTY
from reliability.states import progress_of, tensors_of


def test_a_bad_loss_or_gradient_on_one_rank_is_skipped_by_all_and_too_many_in_a_row_end_the_run_saved(start, tmp_path):
    faults = "nan_loss:1:7 infinite_gradient:0:9 nan_loss:1:12 nan_loss:0:13 nan_loss:1:14"
    options = ("--max-skipped-iters", 3)
    with start(tmp_path, *options, command=LAUNCH_FAULTY, FAULTS=faults) as training:
        assert training.finish() == 70, training.output
    skipped = re.findall(r"iteration (\d+)/300 \| update skipped: .* \| (\d+) skipped, (\d) in a row", training.output)
    expected = [(7, 1, 1), (9, 2, 1), (12, 3, 1), (13, 4, 2), (14, 5, 3)]
    assert [tuple(map(int, skip)) for skip in skipped] == expected, training.output
    (error,) = [line for line in training.lines if line.startswith("error")]
    assert "14" in error and "--iteration 14" in error, error
    hashes = dict(re.findall(r"weights of rank (\d): (\w+)", training.output))
    assert hashes["0"] == hashes["1"]
    assert "Traceback" not in training.output
    last = tmp_path / "iter_0000014"
    assert all(tensor.isfinite().all() for tensor in tensors_of(last).values())
    progress = progress_of(last)
    assert (progress["skipped_iterations"], progress["consumed_samples"]) == (5, 14 * 4)
