"""The model card: front matter, examples, and facts of the folder."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import call
from huggingface_hub import EvalResult, ModelCard
from huggingface_hub.repocard_data import eval_results_to_model_index
from saved_model import MODEL, SHAPE, WORDS, build_reference
from transformers import AutoTokenizer

from checkpoint_conversion.card import MARKER, NO_MODEL_ID, CardOptions, read_results, write_model_card
from checkpoint_conversion.config_json import FolderSpec
from checkpoint_conversion.export import write_folder, write_sentence_transformers_files
from checkpoint_conversion.mapping import NEOBERT, TABLES, to_internal
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.errors import ConversionError, MissingInputError, OutputError
from megatron_neobert.evaluation.models import fingerprint


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return an exported folder of each layout, without report and card."""
    root = tmp_path_factory.mktemp("layouts")
    (root / "vocab.txt").write_text("".join(f"{word}\n" for word in WORDS))
    tokenizer = load_tokenizer(root / "vocab.txt")
    internal = to_internal(build_reference().state_dict(), SHAPE, NEOBERT)
    folders = {name: root / name for name in TABLES}
    for name, folder in folders.items():
        folder.mkdir()
        write_folder(folder, name, FolderSpec(SHAPE, tokenizer), internal)
    return folders


@pytest.fixture
def copy(originals: dict[str, Path], tmp_path: Path) -> Any:
    """Return a function that copies a folder, optionally with files of sentence-transformers."""

    def make(layout: str = "eurobert", *, sentences: bool = False) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(originals[layout], folder)
        if sentences:
            write_sentence_transformers_files(folder, layout, MODEL, max_seq_length=64)
        return folder

    return make


def front_matter(folder: Path) -> dict[str, Any]:
    """Return the front matter as huggingface_hub reads it."""
    return ModelCard.load(folder / "README.md").data.to_dict()


def text_of(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def run_examples(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run every Python block of the card, and return the blocks."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    blocks = re.findall(r"^```python\n(.*?)^```$", text_of(folder), flags=re.DOTALL | re.MULTILINE)
    for block in blocks:
        exec(compile(block.replace(NO_MODEL_ID, str(folder)), "README.md", "exec"), {})
    return blocks


# --- the examples ---


@pytest.mark.parametrize("sentences", [False, True], ids=["plain", "sentence-transformers"])
@pytest.mark.parametrize(("layout", "examples", "is_trusted"), [("eurobert", 3, False), ("neobert", 4, True)])
def test_examples_run_and_use_remote_code_only_for_the_neobert_layout(
    copy, layout, examples, is_trusted, sentences, monkeypatch, capsys
):
    folder = copy(layout, sentences=sentences)
    write_model_card(CardOptions(model=folder))
    blocks = run_examples(folder, monkeypatch)
    if sentences:
        assert capsys.readouterr().out.splitlines()[0] == "(2, 32)"
        return
    assert len(blocks) == examples
    assert ("trust_remote_code" in text_of(folder)) == is_trusted
    if is_trusted:
        assert all("trust_remote_code=True" in block for block in blocks if "peft" not in block)
    output = capsys.readouterr().out
    assert "'token_str'" in output and "torch.Size([2, " in output


@torch.no_grad()
def test_example_of_the_llama_layout_predicts_with_the_separate_head(copy, monkeypatch, capsys):
    folder = copy("llama")
    write_model_card(CardOptions(model=folder))
    blocks = run_examples(folder, monkeypatch)
    assert len(blocks) == 2
    ids = AutoTokenizer.from_pretrained(folder)("Paris is the [MASK] of France.").input_ids
    predicted = build_reference()(torch.tensor([ids]))[0, ids.index(WORDS.index("[MASK]"))].argmax()
    assert capsys.readouterr().out.splitlines()[-1] == f"['{WORDS[predicted]}']"


# --- the front matter ---


@pytest.mark.parametrize(
    ("layout", "sentences", "library", "task"),
    [
        ("eurobert", False, "transformers", "fill-mask"),
        ("llama", False, "transformers", "feature-extraction"),
        ("llama", True, "sentence-transformers", "sentence-similarity"),
    ],
)
def test_front_matter_of_a_new_folder_has_library_task_and_tags(copy, layout, sentences, library, task):
    folder = copy(layout, sentences=sentences)
    write_model_card(CardOptions(model=folder))
    data = front_matter(folder)
    tags = ["neobert", "encoder"] + (["sentence-transformers", "feature-extraction"] if sentences else [])
    assert data == {"license": "unknown", "library_name": library, "pipeline_tag": task, "tags": tags}


def test_declared_facts_are_in_the_front_matter_and_stay_when_the_card_is_rewritten(copy):
    folder = copy()
    flags = "--name ann/little --license mit --base-model ann/first --dataset ann/web ann/books --language no en"
    code, output, errors = call("model-card", "--model", folder, *flags.split())
    assert (code, output, errors) == (0, f"wrote {folder / 'README.md'}\n", "")
    first = front_matter(folder)
    declared = {
        "license": "mit",
        "base_model": "ann/first",
        "datasets": ["ann/web", "ann/books"],
        "language": ["no", "en"],
    }
    assert first.items() >= declared.items()
    assert 'model_id = "ann/little"' in text_of(folder)

    text = text_of(folder)
    write_model_card(CardOptions(model=folder))
    assert text_of(folder) == text
    write_model_card(CardOptions(model=folder, license="apache-2.0"))
    assert front_matter(folder) == {**first, "license": "apache-2.0"}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--model", "nowhere"), 66, "--model nowhere: no such folder"),
        (("--model", ".", "--dataset", "a/b/c"), 2, "--dataset 'a/b/c' cannot be a name on the Hub"),
        (("--model", ".", "--name", '"); import os'), 2, "cannot be a name on the Hub; expected owner/name."),
    ],
)
def test_invalid_options_end_with_one_message(arguments, code, message):
    exit_code, output, errors = call("model-card", *arguments)
    assert (exit_code, output) == (code, "")
    assert message in errors and errors.count("\n") == 1


def test_front_matter_and_text_that_the_user_added_stay(copy):
    folder = copy()
    write_model_card(CardOptions(model=folder, name="ann/little-neobert"))
    result = EvalResult("text-classification", "nyu-mll/glue", "GLUE", "accuracy", 0.875, dataset_config="sst2")
    results = yaml.safe_dump({"model-index": eval_results_to_model_index("little-neobert", [result])})
    added = text_of(folder).replace("tags:\n", f"thumbnail: picture.png\n{results}tags:\n- biology\n", 1)
    (folder / "README.md").write_text(f"{added}\n## Thanks\n\nTo Ann | all.\n")
    write_model_card(CardOptions(model=folder, license="mit"))
    data = front_matter(folder)
    assert data["thumbnail"] == "picture.png"
    assert data["tags"] == ["neobert", "encoder", "biology"]
    assert ModelCard.load(folder / "README.md").data.eval_results == [result]
    assert text_of(folder).endswith(f"\n{MARKER}\n\n## Thanks\n\nTo Ann | all.\n")
    assert text_of(folder).count(MARKER) == 1


def write_glue_record(folder: Path, *, model: str, accuracy: float) -> Path:
    """Write a record of a GLUE evaluation with one task."""
    folder.mkdir(exist_ok=True)
    metrics = {"accuracy": {"mean": accuracy, "sd": 0.01}}
    record = {
        "kind": "glue",
        "model": {"name": "model", "fingerprint": model},
        **{"command": "", "settings": {}, "machine": "", "versions": {}},
        "results": {"tasks": {"sst2": {"metrics": metrics}}},
    }
    (folder / "glue.json").write_text(json.dumps(record))
    return folder


def test_scores_of_this_model_are_in_the_model_index_and_replace_older_scores(copy, tmp_path):
    folder = copy()
    for accuracy in (0.875, 0.9375):
        records = write_glue_record(tmp_path / "results", model=fingerprint(folder), accuracy=accuracy)
        write_model_card(CardOptions(model=folder), read_results([records], folder))
    (result,) = ModelCard.load(folder / "README.md").data.eval_results
    assert (result.dataset_name, result.dataset_config, result.metric_type) == ("GLUE sst2", "sst2", "accuracy")
    assert result.metric_value == 0.9375
    write_glue_record(tmp_path / "results", model="0" * 12, accuracy=0.5)
    with pytest.raises(MissingInputError, match="no record of GLUE or named-entity recognition is of"):
        read_results([tmp_path / "results"], folder)


# --- the text ---


def test_card_shows_settings_and_differences(exported):
    text = text_of(exported()[0])
    zero_biases = 2 * (2 * 48 + 32)
    parameters = sum(parameter.numel() for parameter in build_reference().parameters()) + zero_biases
    for row in (
        f"| parameters | {parameters:,} |",
        "| tokens seen | 9,000 |",
        "| attention across packed documents | no |",
        "| Adam betas | 0.9 and 0.95 |",
        "|  | padded | packed |",
        "| same prediction | 100.00% | 100.00% |",
    ):
        assert f"\n{row}\n" in text
    assert f"{zero_biases:,} of its parameters are biases" in text
    assert "All 16 weights were equal to the checkpoint's" in text
    assert "pre-trained only" in text


def test_card_without_the_marker_line_is_not_overwritten(copy):
    folder = copy()
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    with pytest.raises(OutputError, match="Add the line <!-- Text below"):
        write_model_card(CardOptions(model=folder))
    assert text_of(folder) == "---\nlicense: mit\n---\n# Mine\n"


# --- invalid folders ---


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("config.json", None, MissingInputError),
        ("tokenizer_config.json", "{}", ConversionError),
        ("conversion_report.json", "{", ConversionError),
        ("model.safetensors", None, MissingInputError),
        ("model.safetensors", "x" * 100, ConversionError),
    ],
)
def test_folder_with_a_missing_or_invalid_file_is_refused_by_name(copy, name, content, error):
    folder = copy()
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(error, match=re.escape(name if content else str(folder))):
        write_model_card(CardOptions(model=folder))
    assert not (folder / "README.md").exists()
