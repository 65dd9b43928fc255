"""The two conversions, each compared with its source before the output gets its name.

A folder for Hugging Face is loaded again with transformers and compared with `model/reference.py` holding the same
weights. A folder from Hugging Face is read by our own rules, and nothing in it is executed; the checkpoint made of it
is read back from disk and run against the folder's model.
"""

import json
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors
import torch

import megatron_neobert
from checkpoint_conversion.comparison import COMPARED_SETTINGS, Checks, checkpoint_model, dtype_name, verify
from checkpoint_conversion.hf_reader import ImportedModel, read_folder
from checkpoint_conversion.hf_writer import FolderSpec, write_folder, write_sentence_transformers_files
from checkpoint_conversion.mapping import TABLES, to_internal
from checkpoint_conversion.megatron_io import MegatronCheckpoint, model_shape, read_checkpoint, write_checkpoint
from checkpoint_conversion.model_card import REPORT, read_declared, write_model_card
from checkpoint_conversion.output_folder import build_folder
from megatron_neobert.checkpoint.folder import MANIFEST
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer
from megatron_neobert.runtime.atomic_files import sha256_of

_SECTIONS = ("model", "data", "optimizer", "training")  # of the settings: what the weights were made with
_PATHS = ("data_path", "tokenizer_model", "valid_data_path")  # of machines that no reader of the report knows


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What can be chosen about a folder."""

    layout: str = "eurobert"
    dtype: torch.dtype = torch.float32
    max_shard_size: str = "5GB"
    sentence_transformers: bool = False
    verified: bool = True
    license: str | None = None  # the Hub's identifier, for the model card
    base_model: str | None = None  # on the Hub, whose weights training began from; for the model card


def export(checkpoint: MegatronCheckpoint, output: Path, *, tokenizer: Tokenizer, options: ExportOptions) -> Checks:
    """Writes and verifies the folder.

    Args:
        tokenizer: Written beside the weights; encodes as the checkpoint's own.

    Returns:
        How far the written model is from the reference, empty if that was not wanted.

    Raises:
        OutputError: The folder exists, or cannot be created.
        ConversionError: The weights do not fit, or the written model computes something else. Nothing is left behind.
    """
    with build_folder(output) as temporary:
        model, size = checkpoint.settings.model, options.max_shard_size
        spec = FolderSpec(model, checkpoint.shape, tokenizer, options.dtype)
        write_folder(temporary, options.layout, spec, checkpoint.tensors, max_shard_size=size)
        checks = {}
        if options.verified:
            from checkpoint_conversion.hf_model import load_logit_model  # transformers: seconds

            source, load = checkpoint_model(checkpoint, options.dtype), partial(load_logit_model, temporary)
            checks = verify(source, load, stored=options.dtype, what="the exported model")
        if options.sentence_transformers:
            write_sentence_transformers_files(temporary, options.layout, model)
        _write_report(checkpoint, temporary, checks, options)
        declared = checkpoint.declared
        write_model_card(
            temporary,
            license=options.license or declared.get("license"),
            base_model=options.base_model or declared.get("base_model"),
        )
    return checks


def is_export_of(folder: Path, checkpoint: Path, options: ExportOptions) -> bool:
    """Whether a folder was made from this checkpoint with these options."""
    try:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        found = (report["source"]["manifest_sha256"], report["format"], report["dtype"], report["options"])
        is_verified = bool(report["verification"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    wanted = (sha256_of(checkpoint / MANIFEST), options.layout, dtype_name(options.dtype), _choices(options))
    return found == wanted and is_verified >= options.verified


def import_folder(
    folder: Path,
    output: Path,
    *,
    verified: bool = True,
    drop_padding: bool = False,
    license: str | None = None,
    base_model: str | None = None,
) -> tuple[ImportedModel, Checks]:
    """Writes and verifies the checkpoint.

    Args:
        drop_padding: As `read_folder`.
        license: Of the weights; by default as the folder's README.md has it.
        base_model: The weights' name on the Hub; by default as a cache of the Hub or the folder's README.md has it.

    Returns:
        What was read, and how far the checkpoint's model is from the folder's (empty if that was not wanted).

    Raises:
        OutputError: The output exists, or cannot be created.
        MissingInputError, ConversionError: The folder cannot be used. Nothing is left behind.
    """
    imported = read_folder(folder, drop_padding=drop_padding)
    declared = read_declared(folder) | {
        name: value for name, value in (("license", license), ("base_model", base_model)) if value
    }
    settings = Settings(model=imported.model)
    shape = model_shape(settings, vocab_size=imported.tokenizer.vocab_size)
    tensors = to_internal(imported.weights, shape, TABLES[imported.layout])
    with build_folder(output) as temporary:
        write_checkpoint(temporary, tensors, imported.model, imported.tokenizer, declared=declared)
        checks = {}
        if verified:
            from checkpoint_conversion.hf_model import build_logit_model  # transformers: seconds

            written = checkpoint_model(read_checkpoint(temporary))
            source = build_logit_model(folder, imported.layout, imported.weights)
            checks = verify(source, lambda _: written, stored=torch.float32, what="the written checkpoint")
    return imported, checks


def _write_report(checkpoint: MegatronCheckpoint, folder: Path, checks: Checks, options: ExportOptions) -> None:
    """What the folder was made of and how it was checked, for those who meet it later."""
    progress, continued = checkpoint.progress, checkpoint.settings.checkpoint.continue_from
    sections = {name: asdict(getattr(checkpoint.settings, name)) for name in _SECTIONS}
    settings = {
        section: {name: value for name, value in values.items() if name not in _PATHS}
        for section, values in sections.items()
    }
    counts = {"consumed_rows": "consumed_samples", "consumed_tokens": "consumed_tokens"}
    report = {
        "source": {
            "checkpoint": checkpoint.folder.name,
            "iteration": checkpoint.iteration,
            **{name: progress[key] for name, key in counts.items() if key in progress},
            **({"continued_from": Path(continued).name} if continued else {}),
            "manifest_sha256": sha256_of(checkpoint.folder / MANIFEST),
        },
        "format": options.layout,
        "dtype": dtype_name(options.dtype),
        "options": _choices(options),
        "training": settings if checkpoint.iteration else {},  # 0: converted, not trained
        "verification": {name: check.to_report() for name, check in checks.items()},
        # Read back from the written folder; one that differed would not be here.
        "compared": {"settings": COMPARED_SETTINGS, "weights": len(checkpoint.tensors)} if checks else {},
        "files": {
            str(path.relative_to(folder)): sha256_of(path) for path in sorted(folder.rglob("*")) if path.is_file()
        },
        "versions": {
            "megatron_neobert": megatron_neobert.__version__,
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "safetensors": safetensors.__version__,
        },
    }
    (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _choices(options: ExportOptions) -> dict[str, Any]:
    """What else the files depend on."""
    return {"max_shard_size": options.max_shard_size, "sentence_transformers": options.sentence_transformers}
