"""The model card: front matter, examples, and facts of the folder."""

import os
import re
import subprocess
import sys

import pytest
from commands import succeed
from huggingface_hub import ModelCard
from saved_model import build_reference

from checkpoint_conversion.card import MODEL_ID


@pytest.mark.parametrize(("layout", "examples", "is_trusted"), [("eurobert", 4, False), ("neobert", 5, True)])
def test_examples_run_without_a_question_and_use_remote_code_only_for_the_neobert_layout(
    exported, layout, examples, is_trusted
):
    folder, _ = exported(layout=layout, sentence_transformers=True)
    text = (folder / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == examples
    assert ("trust_remote_code" in text) == is_trusted
    # A new process: in this one, the neobert classes are registered, and transformers would not ask.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    program = "\n".join(blocks).replace(MODEL_ID, str(folder))
    output = succeed(sys.executable, "-c", program, env=environment, stdin=subprocess.DEVNULL)
    assert "custom code" not in output
    assert output.splitlines()[0] == "(2, 32)"
    assert "'token_str'" in output and "torch.Size([2, " in output


@pytest.mark.parametrize("sentences", [False, True])
def test_front_matter_has_library_task_and_tags(exported, sentences):
    folder, _ = exported(sentence_transformers=sentences)
    data = ModelCard.load(folder / "README.md").data.to_dict()
    tags = ["neobert", "encoder"] + (["sentence-transformers", "feature-extraction"] if sentences else [])
    assert data == {"license": "unknown", "library_name": "transformers", "pipeline_tag": "fill-mask", "tags": tags}


def test_card_shows_settings_and_differences(exported):
    text = (exported()[0] / "README.md").read_text(encoding="utf-8")
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
