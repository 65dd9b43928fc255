"""The command that writes a model card anew, as a user starts it."""

import json

import pytest
from commands import call
from huggingface_hub import ModelCard

from megatron_neobert.commands import write_model_card as tool
from megatron_neobert.errors import DataError

COMPLETE = {
    "task_type": "text-classification",
    "dataset_type": "nyu-mll/glue",
    "dataset_name": "GLUE",
    "metric_type": "accuracy",
    "metric_value": 0.875,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with all that a card is made of; nobody loads it."""
    import numpy as np
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("card") / "model"
    folder.mkdir()
    config = {"model_type": "eurobert", "architectures": ["EuroBertForMaskedLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": "<mask>"}))
    save_file({"w": np.zeros((3, 5), np.float32)}, folder / "model.safetensors")
    return folder


def evaluations(tmp_path, content):
    path = tmp_path / "evaluations.json"
    path.write_text(json.dumps(content))
    return path


def test_card_carries_every_flag(model, tmp_path):
    results = evaluations(tmp_path, [COMPLETE, {**COMPLETE, "metric_type": "f1", "metric_value": "0.5 ± 0.1"}])
    flags = "--name ann/neobert --license mit --base-model ann/first --dataset ann/web ann/books --language en de"
    code, output, errors = call("write_model_card", "--model", model, *flags.split(), "--evaluations", results)
    assert (code, errors) == (0, "")
    assert output == f"wrote {model / 'README.md'}\n"
    card = ModelCard.load(model / "README.md")
    data = card.data.to_dict()
    assert (data["license"], data["base_model"]) == ("mit", "ann/first")
    assert (data["datasets"], data["language"]) == (["ann/web", "ann/books"], ["en", "de"])
    assert [metric["value"] for metric in data["model-index"][0]["results"][0]["metrics"]] == [0.875, "0.5 ± 0.1"]
    assert 'model_id = "ann/neobert"' in card.text
    assert "Paris is the <mask> of France." in card.text
    assert "| parameters | 15 |" in card.text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, "expected a list"),
        ([], "expected a list"),
        ([COMPLETE, 3], "result 1: .*mapping"),
        ([{**COMPLETE, "metric_type": None}], "result 0 has the metric_type None"),
        ([{**COMPLETE, "metrik": 1}], "result 0: .*'metrik'; the fields are"),
        ([{**COMPLETE, "metric_value": float("nan")}], "the metric_value nan"),
        ([{**COMPLETE, "metric_value": True}], "the metric_value True"),
        ([{**COMPLETE, "dataset_name": 7}], "the dataset_name 7"),
        ([{**COMPLETE, "source_name": "somewhere"}], "source_url"),
    ],
)
def test_evaluation_that_is_incomplete_or_unknown_is_refused(content, said, tmp_path):
    with pytest.raises(DataError, match=said):
        tool.read_evaluations(evaluations(tmp_path, content))


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--model", "nowhere"), 66, "--model nowhere: no such folder"),
        (("--model", ".", "--evaluations", "nothing.json"), 66, "--evaluations nothing.json: no such file"),
        (("--model", ".", "--license", "My License"), 2, "license 'My License' is no identifier of the Hub"),
    ],
)
def test_command_that_cannot_work_ends_with_one_sentence(arguments, code, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended, output, errors = call("write_model_card", *arguments)
    assert (ended, output) == (code, "")
    assert said in errors
    assert errors.count("\n") == 1
