"""Exported and fine-tuned folders give equal outputs with every supported version of the libraries that load them.

The installed version is tested in this process. Another version needs an environment `transformers-VERSION` in the
folder that the variable TRANSFORMERS_ENVIRONMENTS names. As negative controls, the checks also run on wrong folders.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import succeed
from export_checks import CHECKS, FIRST_NATIVE, Subject, run_checks
from folder_outputs import TEXTS
from json_files import edit_json
from packaging.version import Version
from safetensors.torch import load_file, save_file
from unit.conversion.saved_model import convert, save_model

from checkpoint_conversion.mapping import TABLES
from megatron_neobert.evaluation.embed import save_final
from megatron_neobert.evaluation.models import load_model, load_sentence_transformer, load_tokenizer
from megatron_neobert.huggingface.folder_files import restore_files

OTHER_VERSIONS = ("4.57.6",)  # the last of 4
INSTALLED = transformers.__version__


def run_script(version: str, script: str, cache: Path, *arguments: str | Path) -> Any:
    """Run a script of this folder, and return the JSON in the last line that it prints.

    Args:
        cache: Folder for the code that transformers copies. Each version has another one.
    """
    environments = os.environ.get("TRANSFORMERS_ENVIRONMENTS", "")
    python = Path(sys.executable if version == INSTALLED else f"{environments}/transformers-{version}/bin/python")
    if not python.exists():
        pytest.skip(f"TRANSFORMERS_ENVIRONMENTS has no transformers-{version}")
    changes = {"HF_HOME": str(cache / f"cache-{version}"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | changes
    options = {"stdin": subprocess.DEVNULL, "timeout": 3600}
    printed = succeed(python, Path(__file__).with_name(script), *arguments, env=environment, **options)
    assert "custom code" not in printed, "transformers asks whether code of the folder may run"
    return json.loads(printed.splitlines()[-1])


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder of each layout, with weights so large that every token affects every other."""
    root = tmp_path_factory.mktemp("folders")
    saved = save_model(root)
    for layout in TABLES:
        convert(saved, root / layout, layout=layout, sentence_transformers=True, verified=False)
    return {layout: root / layout for layout in TABLES}


# --- all checks


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


# --- fine-tuned folders


# Kind of folder -> class that loads it.
KINDS = {
    "export": "SentenceTransformer",
    "embedder": "SentenceTransformer",
    "glue and classify": "AutoModelForSequenceClassification",
    "ner": "AutoModelForTokenClassification",
}


def fine_tune(kind: str, source: Path, folder: Path) -> tuple[Path, Any]:
    """Return a folder that this project writes for a fine-tuned model, and the model's outputs; see folder_outputs."""
    torch.manual_seed(0)
    if kind in ("export", "embedder"):
        embedder = load_sentence_transformer(source, max_length=64)
        if kind == "embedder":
            torch.nn.init.normal_(embedder[0].model.get_input_embeddings().weight, std=0.3)
            save_final(embedder, source, folder)
        return source if kind == "export" else folder, embedder.encode(TEXTS)
    model, tokenizer = load_model(source, KINDS[kind], num_labels=3), load_tokenizer(source)
    # Trainer writes these files.
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    restore_files(folder, source)
    with torch.no_grad():
        return folder, model(**tokenizer(TEXTS, padding=True, return_tensors="pt")).logits


@pytest.mark.parametrize(
    ("layout", "version"),
    [
        ("neobert", INSTALLED),
        pytest.param("eurobert", INSTALLED, marks=pytest.mark.slow),
        *(pytest.param("neobert", version, marks=pytest.mark.slow) for version in OTHER_VERSIONS),
    ],
)
def test_every_kind_of_folder_gives_the_outputs_of_its_model(folders, tmp_path, layout, version):
    written = {kind: fine_tune(kind, folders[layout], tmp_path / kind) for kind in KINDS}
    words = [f"{folder}={KINDS[kind]}" for kind, (folder, _) in written.items()]
    trust = ["--trust-remote-code"] if layout == "neobert" else []
    results = run_script(version, "folder_outputs.py", tmp_path, *trust, *words)
    for kind, (folder, expected) in written.items():
        result = results[str(folder)]
        difference = (torch.tensor(result["outputs"]) - torch.as_tensor(expected)).abs().max()
        assert difference <= 1e-5 and result["longest"] == 64, kind
