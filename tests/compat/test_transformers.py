"""Exported folders of every layout work with every supported version of transformers.

The installed version is tested in this process. Other versions need an environment `transformers-VERSION` in the folder
that the variable TRANSFORMERS_ENVIRONMENTS names. As negative controls, the checks also run on wrong folders.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import export_checks  # noqa: F401
import pytest
import torch
import transformers
from exported_folder import CHECKS, FIRST_NATIVE, Subject, run_checks
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers import EuroBertConfig, EuroBertForMaskedLM

from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.huggingface import modeling_neobert

OTHER_VERSIONS = ("4.57.3",)  # the last of 4
INSTALLED = transformers.__version__
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(40)), "##s"]
SIZES = {"vocab_size": len(WORDS), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def write(folder: Path, model: transformers.PreTrainedModel) -> Path:
    """Save a model and its tokenizer, with weights so large that every token affects every other."""
    torch.manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in WORDS))
    load_tokenizer(folder / "vocab.txt").save_tokenizer_files(folder, model_max_length=64)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder of each layout."""
    root = tmp_path_factory.mktemp("folders")
    eurobert = EuroBertConfig(
        **SIZES, num_key_value_heads=4, head_dim=8, intermediate_size=48, max_position_embeddings=64, mlp_bias=True,
        pad_token_id=0, bos_token_id=2, eos_token_id=3, mask_token_id=4, classifier_pooling="bos",
    )  # fmt: skip
    neobert = modeling_neobert.NeoBERTConfig(
        **SIZES, dim_head=8, intermediate_size=72, max_position_embeddings=64, pad_token_id=0
    )
    models = {
        "eurobert": EuroBertForMaskedLM(eurobert),
        "neobert": modeling_neobert.NeoBERTForMaskedLM(neobert),
    }
    return {layout: write(root / layout, model) for layout, model in models.items()}


def edit(name: str, **fields: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def outcomes(folder: Path, version: str) -> dict[str, str]:
    """Return the result of every check with a version of transformers."""
    trusted = folder.name == "neobert"
    if version == INSTALLED:
        return run_checks(folder, trusted=trusted)
    environments = os.environ.get("TRANSFORMERS_ENVIRONMENTS", "")
    python = Path(environments, f"transformers-{version}", "bin", "python")
    if not (environments and python.exists()):
        pytest.skip(f"TRANSFORMERS_ENVIRONMENTS has no transformers-{version}")
    # A separate cache, because transformers copies remote code there under the folder's name.
    changes = {"HF_HOME": str(folder.parent / f"cache-{version}"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [python, Path(__file__).with_name("export_checks.py"), folder, *["--trust-remote-code"] * trusted]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | changes
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("layout", "version"),
    [
        ("eurobert", INSTALLED),
        ("neobert", INSTALLED),
        *(
            pytest.param(layout, version, marks=pytest.mark.slow)
            for version in OTHER_VERSIONS
            for layout in ("neobert", "eurobert")
        ),
    ],
)
def test_folder_passes_all_checks_that_apply_to_its_layout_and_version(folders, layout, version):
    results = outcomes(folders[layout], version)
    assert results.keys() == CHECKS.keys()
    assert {name: result for name, result in results.items() if result.startswith("FAILED")} == {}
    is_known = layout == "neobert" or Version(version) >= FIRST_NATIVE
    assert {name for name, result in results.items() if result == "ok"} == (set(CHECKS) if is_known else {"tokenizer"})


def remove_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


add_token_types = edit("tokenizer_config.json", model_input_names=["input_ids", "token_type_ids", "attention_mask"])
WRONG: list[tuple[str, Callable[[Path], None], str, str]] = [
    ("eurobert", edit("config.json", model_type="llama"), "attention to both sides", "does not attend to later tokens"),
    ("eurobert", remove_weight, "AutoModel", "weights that the folder lacks: .*up_proj"),
    ("eurobert", remove_weight, "AutoModelForMaskedLM, loss", "missing_keys.*up_proj"),
    ("eurobert", remove_weight, "AutoModelForTokenClassification, loss", "other weights: .*up_proj"),
    ("eurobert", edit("config.json", vocab_size=48), "tokenizer", "46 tokens, 48 rows"),
    ("eurobert", edit("config.json", pad_token_id=3), "tokenizer", "pad_token_id is not config.json's"),
    ("eurobert", add_token_types, "tokenizer", "a batch has .*token_type_ids"),
    ("eurobert", edit("tokenizer_config.json", padding_side="left"), "tokenizer", "mask of a padded text"),
    ("eurobert", edit("tokenizer_config.json", truncation_side="left"), "tokenizer", "not truncated at its end"),
]


@pytest.mark.parametrize(("layout", "change", "check", "reason"), WRONG)
def test_wrong_folder_fails_its_check(folders, tmp_path, layout, change, check, reason):
    folder = shutil.copytree(folders[layout], tmp_path / layout)
    change(folder)
    with pytest.raises(AssertionError, match=reason):
        CHECKS[check](Subject(folder, trusted=False))
