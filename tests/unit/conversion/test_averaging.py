"""Averages of several checkpoints."""

from pathlib import Path

import pytest
import torch
from commands import call
from saved_model import SavedModel
from torch import Tensor

from checkpoint_conversion.checkpoint import read_checkpoint


@pytest.fixture
def run(saved: SavedModel, internal: dict[str, Tensor]) -> Path:
    """A save folder with iterations 30, 40 and 50, whose weights are `internal` times 1, 2 and 3."""
    for times, number in ((2, 40), (3, 50), (1, 30)):
        saved.write({name: times * tensor for name, tensor in internal.items()})
        if number != 30:
            saved.iteration_folder.rename(saved.save / f"iter_00000{number}")
    return saved.save


@pytest.mark.parametrize(
    ("options", "iterations", "times"),
    [((2,), (50, 40), 2.5), ((3,), (50, 40, 30), 2.0), ((2, "--iteration", 40), (40, 30), 1.5)],
)
def test_average_of_checkpoints_is_a_checkpoint_with_their_mean(run, tmp_path, internal, options, iterations, times):
    _, output, _ = call("average", "--load", run, "--output", tmp_path / "mean", "--last", *options)
    assert f"the mean of iterations {', '.join(map(str, iterations))}," in output
    mean = read_checkpoint(tmp_path / "mean")
    assert mean.tensors.keys() == internal.keys()
    for name, tensor in mean.tensors.items():
        torch.testing.assert_close(tensor, times * internal[name], msg=name)


@pytest.mark.parametrize(
    ("last", "code", "message"),
    [
        (4, 66, "has 3 checkpoints up to iteration 50, fewer than --last 4"),
        (3, 78, "are checkpoints of different models"),
    ],
)
def test_too_few_checkpoints_and_checkpoints_of_different_models_are_refused(run, saved, tmp_path, last, code, message):
    settings = saved.iteration_folder / "settings.yaml"
    settings.write_text(settings.read_text().replace("rotary_base: 5000", "rotary_base: 7000"))
    saved.seal()
    exit_code, _, error = call("average", "--load", run, "--output", tmp_path / "mean", "--last", last)
    assert exit_code == code and message in error
    assert not (tmp_path / "mean").exists()
