"""Exported folders of every layout work with every supported version of transformers.

The installed version is tested in this process, other versions in the environments of environments.py. As negative
controls, the checks also run on wrong folders.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import export_checks  # noqa: F401
import pytest
from environments import INSTALLED, OTHER_VERSIONS, run_script
from exported_folder import CHECKS, FIRST_NATIVE, Subject, run_checks
from json_files import edit_json
from packaging.version import Version
from safetensors.torch import load_file, save_file


def edit(name: str, **fields: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / name, **fields)


def outcomes(folder: Path, version: str) -> dict[str, str]:
    """Return the result of every check with a version of transformers."""
    trusted = folder.name == "neobert"
    if version == INSTALLED:
        return run_checks(folder, trusted=trusted)
    return run_script(version, "export_checks.py", folder.parent, folder, *["--trust-remote-code"] * trusted)


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
    ("eurobert", edit("config.json", vocab_size=48), "tokenizer", "13 tokens, 48 rows"),
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
