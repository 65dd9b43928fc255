"""The model card: front matter, examples, and facts of the folder."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from saved_model import MODEL, SHAPE, WORDS, build_reference
from transformers import AutoTokenizer

from checkpoint_conversion.card import MODEL_ID, write_model_card
from checkpoint_conversion.config_json import FolderSpec
from checkpoint_conversion.export import write_folder, write_sentence_transformers_files
from checkpoint_conversion.mapping import NEOBERT, TABLES, to_internal
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer


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
        exec(compile(block.replace(MODEL_ID, str(folder)), "README.md", "exec"), {})
    return blocks


# --- the examples ---


@pytest.mark.parametrize("sentences", [False, True], ids=["plain", "sentence-transformers"])
@pytest.mark.parametrize(("layout", "examples", "is_trusted"), [("eurobert", 3, False), ("neobert", 4, True)])
def test_examples_run_and_use_remote_code_only_for_the_neobert_layout(
    copy, layout, examples, is_trusted, sentences, monkeypatch, capsys
):
    folder = copy(layout, sentences=sentences)
    write_model_card(folder)
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
    write_model_card(folder)
    blocks = run_examples(folder, monkeypatch)
    assert len(blocks) == 2
    ids = AutoTokenizer.from_pretrained(folder)("Paris is the [MASK] of France.").input_ids
    predicted = build_reference()(torch.tensor([ids]))[0, ids.index(WORDS.index("[MASK]"))].argmax()
    assert capsys.readouterr().out.splitlines()[-1] == f"['{WORDS[predicted]}']"


# --- the front matter ---


@pytest.mark.parametrize(
    ("layout", "sentences", "task"),
    [("eurobert", False, "fill-mask"), ("llama", True, "feature-extraction")],
)
def test_front_matter_of_a_new_folder_has_library_task_and_tags(copy, layout, sentences, task):
    folder = copy(layout, sentences=sentences)
    write_model_card(folder)
    data = front_matter(folder)
    tags = ["neobert", "encoder"] + (["sentence-transformers", "feature-extraction"] if sentences else [])
    assert data == {"license": "unknown", "library_name": "transformers", "pipeline_tag": task, "tags": tags}


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
