"""Exported folders of every layout work with every supported version of transformers.

The installed version is tested in this process, other versions in the environments of environments.py. As negative
controls, the checks also run on wrong folders.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from environments import INSTALLED, OTHER_VERSIONS, run_script
from export_checks import CHECKS, FIRST_NATIVE, Subject, run_checks
from json_files import edit_json
from packaging.version import Version
from safetensors.torch import load_file, save_file


def edit(name: str, **fields: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / name, **fields)


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
    folder, is_known = folders[layout], layout == "neobert" or Version(version) >= FIRST_NATIVE
    ran = run_checks(folder) if version == INSTALLED else run_script(version, "export_checks.py", folder.parent, folder)
    assert ran == (list(CHECKS) if is_known else ["check_tokenizer"])


def remove_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


add_token_types = edit("tokenizer_config.json", model_input_names=["input_ids", "token_type_ids", "attention_mask"])
WRONG: list[tuple[Callable[[Path], None], str, str]] = [
    (edit("config.json", model_type="llama"), "check_attention_to_both_sides", "does not attend to later tokens"),
    (remove_weight, "check_backbone", "weights that the folder lacks: .*up_proj"),
    (remove_weight, "check_masked_lm", "missing_keys.*up_proj"),
    (remove_weight, "check_classification", "other weights: .*up_proj"),
    (edit("config.json", vocab_size=48), "check_tokenizer", "13 tokens, 48 rows"),
    (edit("config.json", pad_token_id=3), "check_tokenizer", "pad_token_id is not config.json's"),
    (add_token_types, "check_tokenizer", "a batch has .*token_type_ids"),
    (edit("tokenizer_config.json", padding_side="left"), "check_tokenizer", "mask of a padded text"),
    (edit("tokenizer_config.json", truncation_side="left"), "check_tokenizer", "not truncated at its end"),
]


@pytest.mark.parametrize(("change", "check", "reason"), WRONG)
def test_wrong_folder_fails_its_check(folders, tmp_path, change, check, reason):
    folder = shutil.copytree(folders["eurobert"], tmp_path / "eurobert")
    change(folder)
    with pytest.raises(AssertionError, match=reason):
        CHECKS[check](Subject(folder))
