"""The mean of several checkpoints, as a checkpoint and as a Hugging Face folder."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from saved_model import SavedModel
from torch import Tensor
from unit.tools.commands import call

from checkpoint_conversion.megatron_io import read_checkpoint
from megatron_neobert.errors import ConversionError, MissingInputError

BIAS = "output_layer.bias"


@pytest.fixture
def run(saved: SavedModel, internal: dict[str, Tensor]) -> Path:
    """A save folder with iterations 30, 40 and 50, whose weights are one, two and three times the same."""
    for times, number in ((2, 40), (3, 50), (1, 30)):
        saved.write({name: times * tensor for name, tensor in internal.items()})
        if number != 30:
            saved.iteration_folder.rename(saved.save / f"iter_00000{number}")
    return saved.save


@pytest.mark.parametrize(
    ("options", "iterations", "times"),
    [((2,), (50, 40), 2.5), ((3,), (50, 40, 30), 2.0), ((2, "--iteration", 40), (40, 30), 1.5)],
)
def test_the_mean_of_checkpoints_is_a_checkpoint(run, tmp_path, internal, options, iterations, times):
    _, output, _ = call("average_checkpoints", "--load", run, "--output", tmp_path / "mean", "--last", *options)
    assert f"the mean of iterations {', '.join(map(str, iterations))}," in output
    mean = read_checkpoint(tmp_path / "mean")
    assert mean.tensors.keys() == internal.keys()
    for name, tensor in mean.tensors.items():
        torch.testing.assert_close(tensor, times * internal[name], msg=name)


def test_a_conversion_writes_the_mean_and_names_what_it_is_of(run, tmp_path, internal):
    options = ("--format", "neobert", "--average", 3)
    code, _, error = call("convert", "megatron-to-hf", "--load", run, "--output", tmp_path / "model", *options)
    assert code == 0, error
    written = load_file(tmp_path / "model" / "model.safetensors")
    torch.testing.assert_close(written["decoder.bias"], 2 * internal[BIAS][: len(written["decoder.bias"])])
    report = json.loads((tmp_path / "model" / "conversion_report.json").read_text())
    assert report["source"]["averaged_iterations"] == [50, 40, 30]
    card = (tmp_path / "model" / "README.md").read_text()
    assert "weights were equal to the mean of the weights of iterations 50, 40, 30, rounded" in card
    assert "the checkpoint's" not in card


def test_every_checkpoint_with_enough_before_it_is_averaged(run, tmp_path, internal):
    options = ("--format", "neobert", "--all-iterations", "--average", 2)
    code, output, error = call("convert", "megatron-to-hf", "--load", run, "--output", tmp_path / "models", *options)
    assert code == 0, error
    assert "without iter_0000030: too few before them to average" in output
    found = {path.name: load_file(path / "model.safetensors") for path in (tmp_path / "models").iterdir()}
    assert found.keys() == {"iter_0000040", "iter_0000050"}
    for name, times in (("iter_0000040", 1.5), ("iter_0000050", 2.5)):
        bias = found[name]["decoder.bias"]
        torch.testing.assert_close(bias, times * internal[BIAS][: len(bias)])
    code, _, error = call(
        "convert", "megatron-to-hf", "--load", run, "--output", tmp_path / "none", "--all-iterations", "--average", 4
    )
    assert code == 66 and "holds 3 checkpoints up to iteration 50, and 4 are to be averaged" in error


def test_more_checkpoints_than_there_are_and_those_of_other_models_are_refused(run, saved):
    with pytest.raises(MissingInputError, match="holds 3 checkpoints up to iteration 50, and 4 are to be averaged"):
        read_checkpoint(run, average=4)
    settings = saved.iteration_folder / "settings.yaml"
    settings.write_text(settings.read_text().replace("rotary_base: 5000", "rotary_base: 7000"))
    saved.seal()
    with pytest.raises(ConversionError, match=r"iter_0000030 and .*iter_0000050 are of different models"):
        read_checkpoint(run, average=3)
