"""From a Megatron checkpoint to a Hugging Face folder that has been compared with the reference.

What is written is loaded again with transformers and compared with `model/reference.py` holding the same weights,
before the folder gets its name.
"""

import json
from pathlib import Path

import safetensors
import torch
import transformers

import megatron_neobert
from checkpoint_conversion.comparison import FP32_TOLERANCE, Comparison, build_prompts, compare_functions
from checkpoint_conversion.eurobert import build_config, load_masked_lm, write_folder
from checkpoint_conversion.mapping import EUROBERT, to_published
from checkpoint_conversion.megatron_reader import MegatronCheckpoint
from checkpoint_conversion.output_folder import build_folder
from megatron_neobert.data.tokenizer import Tokenizer
from megatron_neobert.errors import ConversionError
from megatron_neobert.files import sha256_of

REPORT = "conversion_report.json"


def export_eurobert(
    checkpoint: MegatronCheckpoint, output: Path, *, tokenizer: Tokenizer, dtype: torch.dtype
) -> Comparison:
    """Writes and verifies the folder.

    Args:
        tokenizer: Written beside the weights; encodes as the checkpoint's own.
        dtype: Of the stored weights. They are compared in fp32 arithmetic, after rounding.

    Returns:
        How far the written model is from the reference.

    Raises:
        OutputError: The folder exists, or cannot be created.
        ConversionError: The weights do not fit, or the written model computes something else. Nothing is left behind.
    """
    with build_folder(output) as temporary:
        write_weights(checkpoint, temporary, tokenizer, dtype)
        comparison = verify_export(checkpoint, temporary, dtype)
        _write_report(checkpoint, temporary, comparison, dtype)
    return comparison


def verify_export(checkpoint: MegatronCheckpoint, folder: Path, dtype: torch.dtype) -> Comparison:
    """Compares the model that transformers loads from `folder` with the reference holding the checkpoint's weights.

    Raises:
        ConversionError: They compute different logits.
    """
    reference, exported = checkpoint.build_reference(dtype), load_masked_lm(folder)
    prompts = build_prompts(checkpoint.shape.vocab_size, longest=checkpoint.settings.model.max_position_embeddings)
    comparison = compare_functions(reference, lambda *inputs: exported(*inputs).logits, prompts)
    if not comparison.within(FP32_TOLERANCE):
        raise ConversionError(
            f"the exported model's logits differ from the reference's by {comparison.relative:.3g} of the largest, "
            f"more than {FP32_TOLERANCE:g}; nothing was written. transformers is {transformers.__version__}: try the "
            "version in constraints.txt."
        )
    return comparison


def write_weights(checkpoint: MegatronCheckpoint, folder: Path, tokenizer: Tokenizer, dtype: torch.dtype) -> None:
    """Fills an empty folder with everything that transformers needs; nothing is compared yet."""
    rounded = {name: tensor.to(dtype) for name, tensor in checkpoint.tensors.items()}
    config = build_config(checkpoint.settings.model, checkpoint.shape, tokenizer, dtype=dtype)
    write_folder(folder, config, to_published(rounded, checkpoint.shape, EUROBERT), tokenizer)


def _write_report(checkpoint: MegatronCheckpoint, folder: Path, comparison: Comparison, dtype: torch.dtype) -> None:
    """What the folder was made of and how it was checked, for whoever meets it later."""
    report = {
        "source": {
            "checkpoint": checkpoint.folder.name,
            "iteration": checkpoint.iteration,
            "manifest_sha256": sha256_of(checkpoint.folder / "MANIFEST.json"),
        },
        "format": "eurobert",
        "dtype": str(dtype).removeprefix("torch."),
        "verification": {**comparison.to_report(), "tolerance": FP32_TOLERANCE},
        "files": {path.name: sha256_of(path) for path in sorted(folder.iterdir())},
        "versions": {
            "megatron_neobert": megatron_neobert.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "safetensors": safetensors.__version__,
        },
    }
    (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
