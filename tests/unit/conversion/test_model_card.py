"""The model card: front matter, examples, and facts of the folder."""

import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from saved_model import build_reference

from checkpoint_conversion.card import MODEL_ID


def text_of(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def run_examples(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run every Python block of the card, and return the blocks."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    blocks = re.findall(r"^```python\n(.*?)^```$", text_of(folder), flags=re.DOTALL | re.MULTILINE)
    for block in blocks:
        exec(compile(block.replace(MODEL_ID, str(folder)), "README.md", "exec"), {})
    return blocks


@pytest.mark.parametrize("sentences", [False, True], ids=["plain", "sentence-transformers"])
@pytest.mark.parametrize(("layout", "examples", "is_trusted"), [("eurobert", 3, False), ("neobert", 4, True)])
def test_examples_run_and_use_remote_code_only_for_the_neobert_layout(
    exported, layout, examples, is_trusted, sentences, monkeypatch, capsys
):
    folder, _ = exported(layout=layout, sentence_transformers=sentences)
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


@pytest.mark.parametrize("sentences", [False, True])
def test_front_matter_has_library_task_and_tags(exported, sentences):
    folder, _ = exported(sentence_transformers=sentences)
    data = ModelCard.load(folder / "README.md").data.to_dict()
    tags = ["neobert", "encoder"] + (["sentence-transformers", "feature-extraction"] if sentences else [])
    assert data == {"license": "unknown", "library_name": "transformers", "pipeline_tag": "fill-mask", "tags": tags}


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
