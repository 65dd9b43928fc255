"""The command that writes a model card anew, as a user starts it."""

import json

import pytest
from commands import call
from huggingface_hub import ModelCard


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


def test_card_carries_every_flag(model):
    flags = "--name ann/neobert --license mit --base-model ann/first --dataset ann/web ann/books --language en de"
    code, output, errors = call("model-card", "--model", model, *flags.split())
    assert (code, errors) == (0, "")
    assert output == f"wrote {model / 'README.md'}\n"
    card = ModelCard.load(model / "README.md")
    data = card.data.to_dict()
    assert (data["license"], data["base_model"]) == ("mit", "ann/first")
    assert (data["datasets"], data["language"]) == (["ann/web", "ann/books"], ["en", "de"])
    assert 'model_id = "ann/neobert"' in card.text
    assert "Paris is the <mask> of France." in card.text
    assert "| parameters | 15 |" in card.text


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--model", "nowhere"), 66, "--model nowhere: no such folder"),
        (
            ("--model", ".", "--base-model", "runs/stage 1"),
            2,
            "'runs/stage 1' cannot be a name on the Hub",
        ),
        (("--model", ".", "--dataset", "a/b/c"), 2, "--dataset 'a/b/c' cannot be a name on the Hub"),
        (("--model", ".", "--name", '"); import os'), 2, "cannot be a name on the Hub; expected owner/name."),
    ],
)
def test_command_that_cannot_work_ends_with_one_sentence(arguments, code, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended, output, errors = call("model-card", *arguments)
    assert (ended, output) == (code, "")
    assert said in errors
    assert errors.count("\n") == 1
