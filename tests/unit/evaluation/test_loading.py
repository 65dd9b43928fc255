"""Models under evaluation are loaded from local folders, none of whose code runs, and known by their weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from unit.evaluation.pseudo_perplexity_models import WORDS, write_model

from megatron_neobert.errors import ConversionError
from megatron_neobert.evaluation import models
from megatron_neobert.evaluation.ledger import open_ledger, read_record, write_record


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", "Bert")


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_fingerprint_changes_with_weights_or_tokenizer_and_not_with_the_card_or_an_export(folder: Path, tmp_path: Path):
    first = models.fingerprint(folder)
    (folder / "README.md").write_text("a card")
    (folder / "onnx").mkdir()
    shutil.copy(folder / "config.json", folder / "onnx")  # as an export to ONNX leaves it
    assert models.fingerprint(folder) == first
    other = write_model(tmp_path / "other", "Bert", seed=1)
    assert models.fingerprint(other) != first
    found = {first}
    (folder / "1_Pooling").mkdir()
    modules = ("tokenizer.json", "modules.json", "1_Pooling/config.json", "config_sentence_transformers.json")
    for name, content in zip(modules, ("{}", '[{"path": "1_Pooling"}]', "{}", "{}"), strict=True):
        (folder / name).write_text(content)
        found.add(models.fingerprint(folder))
    assert len(found) == 1 + len(modules)


def test_record_names_the_model_and_the_machines_and_versions_of_the_measurements(folder: Path, tmp_path: Path):
    path = tmp_path / "results" / "model" / "throughput.json"
    with open_ledger(tmp_path, "cpu") as ledger:
        ledger.add({"here": 1}, {})
        ledger.add({"there": 1}, {}, {"machine": "a GPU", "versions": {"torch": "1.0"}})
    results = {"tokens": 1.5}
    write_record(path, "throughput", folder=folder, settings={"seed": 3}, results=results, lines=ledger.lines.values())
    record = read_record(path)
    assert record["model"] == {"name": "model", "fingerprint": models.fingerprint(folder)}
    assert (record["kind"], record["settings"], record["results"]) == ("throughput", {"seed": 3}, {"tokens": 1.5})
    assert record["versions"]["torch"] == f"{torch.__version__}, 1.0"
    assert record["command"]
    assert "CPU" in record["machine"] and record["machine"].endswith("; a GPU")


def test_head_that_the_folder_does_not_hold_is_refused_and_not_drawn(tmp_path: Path):
    folder = write_model(tmp_path / "model", "EuroBert")
    weights = load_file(folder / "model.safetensors")
    save_file({name: weights[name] for name in weights if name != "lm_head.weight"}, folder / "model.safetensors")
    with pytest.raises(
        ConversionError, match=r"lm_head\.weight is not there; AutoModelForMaskedLM would have random weights"
    ):
        models.load_model(folder, "AutoModelForMaskedLM")
    assert models.load_model(folder, "AutoModel") is not None


def test_a_classification_head_may_be_new_and_the_encoder_may_not(folder: Path):
    three = models.load_model(folder, "AutoModelForSequenceClassification", num_labels=3)
    three.save_pretrained(folder)
    assert models.load_model(folder, "AutoModelForSequenceClassification", num_labels=5).num_labels == 5
    weights = load_file(folder / "model.safetensors")
    lost = next(name for name in weights if "attention" in name)
    save_file({name: one for name, one in weights.items() if name != lost}, folder / "model.safetensors")
    with pytest.raises(ConversionError, match=f"{lost} is not there"):
        models.load_model(folder, "AutoModelForSequenceClassification", num_labels=3)


@pytest.mark.parametrize(
    "auto_class", ["AutoModel", "AutoModelForSequenceClassification", "AutoModelForTokenClassification"]
)
@pytest.mark.parametrize("kind", ["Bert", "EuroBert", "neobert"])
def test_encoder_whose_weights_have_another_shape_is_refused_and_not_drawn(tmp_path: Path, kind: str, auto_class: str):
    folder = write_model(tmp_path / "model", kind)
    change_config(folder, vocab_size=len(WORDS) + 8)
    with pytest.raises(
        ConversionError, match=rf"embed|encoder\.weight.*the shape \({len(WORDS)}, 32\) and not"
    ) as refused:
        models.load_model(folder, auto_class)
    assert refused.value.exit_code == 78
