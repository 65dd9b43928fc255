"""From a Megatron checkpoint to a Hugging Face folder that has been compared with the reference.

What is written is loaded again with transformers and compared with `model/reference.py` holding the same weights,
before the folder gets its name.
"""

import json
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors
import torch

import megatron_neobert
from checkpoint_conversion.comparison import COMPARED_SETTINGS, dtype_name
from checkpoint_conversion.hf_writer import write_folder
from checkpoint_conversion.layouts import LAYOUTS, Source
from checkpoint_conversion.mapping import to_published
from checkpoint_conversion.megatron_reader import MegatronCheckpoint
from checkpoint_conversion.model_card import write_model_card
from checkpoint_conversion.output_folder import build_folder
from checkpoint_conversion.sentence_transformers_files import write_sentence_transformers_files
from checkpoint_conversion.verification import Checks, checkpoint_model, to_report, verify
from megatron_neobert.checkpoint.folder import MANIFEST
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer
from megatron_neobert.runtime.atomic_files import sha256_of

REPORT = "conversion_report.json"
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
        write_model(checkpoint, temporary, tokenizer=tokenizer, options=options)
        checks = verify_export(checkpoint, temporary, options.dtype) if options.verified else {}
        if options.sentence_transformers:
            write_sentence_transformers_files(
                temporary,
                hidden_size=checkpoint.shape.hidden_size,
                max_seq_length=checkpoint.settings.model.max_position_embeddings,
                needs_remote_code=LAYOUTS[options.layout].carries_code,
            )
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


def write_model(checkpoint: MegatronCheckpoint, folder: Path, *, tokenizer: Tokenizer, options: ExportOptions) -> None:
    """Fills an empty folder with everything that transformers needs; nothing is compared yet."""
    layout, shape = LAYOUTS[options.layout], checkpoint.shape
    rounded = {name: tensor.to(options.dtype) for name, tensor in checkpoint.tensors.items()}
    config = layout.build_config(Source(checkpoint.settings.model, shape, tokenizer, options.dtype))
    weights = to_published(rounded, shape, layout.table)
    write_folder(folder, layout, config, weights, tokenizer, max_shard_size=options.max_shard_size)


def verify_export(checkpoint: MegatronCheckpoint, folder: Path, dtype: torch.dtype) -> Checks:
    """Compares the model that transformers loads from `folder` with the reference holding the checkpoint's weights.

    Raises:
        ConversionError: They compute different logits.
    """
    from checkpoint_conversion.hf_model import load_logit_model  # transformers: seconds

    return verify(
        checkpoint_model(checkpoint, dtype),
        lambda precision: load_logit_model(folder, dtype=precision),
        stored=dtype,
        what="the exported model",
    )


def _write_report(checkpoint: MegatronCheckpoint, folder: Path, checks: Checks, options: ExportOptions) -> None:
    """What the folder was made of and how it was checked, for whoever meets it later."""
    progress, continued = checkpoint.progress, checkpoint.settings.checkpoint.continue_from
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
        "training": _training_settings(checkpoint) if checkpoint.iteration else {},  # 0: converted, not trained
        "verification": to_report(checks),
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


def _training_settings(checkpoint: MegatronCheckpoint) -> dict[str, Any]:
    settings = {name: asdict(getattr(checkpoint.settings, name)) for name in _SECTIONS}
    return {
        section: {name: value for name, value in values.items() if name not in _PATHS}
        for section, values in settings.items()
    }
