"""The commands that convert checkpoints: a Megatron checkpoint as a Hugging Face folder, and back.

Each written folder is compared with its source before it gets its name. A folder for Hugging Face is loaded again with
transformers and compared with `model/reference.py` holding the same weights. A folder from Hugging Face is read by our
own rules, and nothing in it is executed; the checkpoint made of it is read back from disk and run against the folder's
model. Runs on one CPU without GPU, torchrun or Transformer Engine, for any number of ranks that wrote the checkpoint.

As a file of the checkout this module is `neobert convert`.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

from megatron_neobert import __main__ as neobert
from megatron_neobert.cli import option
from megatron_neobert.errors import ConversionError, run_command
from megatron_neobert.runtime.atomic_files import refuse_existing, require_folder

if TYPE_CHECKING:  # --help answers without importing torch
    from checkpoint_conversion.compare import Checks, LogitModel


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The command line of `neobert convert megatron-to-hf`."""

    load: Path = option(help="folder that training was given as --save", metavar="DIR")
    output: Path = option(help="folder to create", metavar="DIR")
    layout: Literal["eurobert", "neobert", "llama"] = option(
        "eurobert",
        "layout to write: eurobert needs no remote code; neobert has the published names",
        flag="--format",
    )
    dtype: Literal["float32", "bfloat16"] = option("float32", "of the stored weights")
    sentence_transformers: bool = option(False, "add what SentenceTransformer(DIR) reads: mean pooling")
    iteration: int | None = option(None, "checkpoint to convert; without it the newest")
    no_verification: bool = option(False, "do not run the written model against its source")


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """The command line of `neobert convert hf-to-megatron`."""

    load: Path = option(help="Hugging Face folder with a masked language model", metavar="DIR")
    output: Path = option(help="folder to create, for training's --continue-from", metavar="DIR")
    no_verification: bool = option(False, "do not run the written model against its source")


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """The command line of `neobert verify`."""

    first: Path = option(help="folder of checkpoints, or Hugging Face folder", positional=True, metavar="A")
    second: Path = option(help="the same", positional=True, metavar="B")
    tolerance: float | None = option(
        None,
        "largest difference that still counts as equal, over the largest logit, and over the largest value of a "
        "weight; without it 1e-4 for logits, as after a conversion, and none for weights (rounded to bfloat16 on one "
        "side, logits differ by 0.015)",
        minimum=0,
    )


def main() -> int | None:
    """Run `neobert convert` with the words of this command line."""
    sys.argv.insert(1, "convert")
    return neobert.main()


def megatron_to_hf(options: ExportOptions) -> None:
    """Write a Megatron checkpoint as a Hugging Face folder and compare it with the reference.

    Raises:
        MissingInputError: There is no checkpoint.
        ConversionError: The weights do not fit, or the written model computes something else.
        OutputError: The output exists or cannot be created.
    """
    from megatron_neobert.checkpoint.folder import latest_checkpoint

    start = time.monotonic()
    refuse_existing(options.output)
    latest_checkpoint(options.load, iteration=options.iteration)  # refuses a folder without any before torch is loaded
    from checkpoint_conversion.checkpoint import read_checkpoint
    from checkpoint_conversion.export import export

    checkpoint = read_checkpoint(options.load, iteration=options.iteration)
    print(f"converting {checkpoint.folder}")
    checks = export(
        checkpoint,
        options.output,
        layout=options.layout,
        dtype=options.dtype,
        sentence_transformers=options.sentence_transformers,
        verified=not options.no_verification,
    )
    print_result(options.output, checks, source="the reference in plain PyTorch", start=start)


def hf_to_megatron(options: ImportOptions) -> None:
    """Write a checkpoint to continue pre-training from and compare it with the model of the Hugging Face folder.

    Raises:
        MissingInputError: There is no config.json.
        ConversionError: The folder holds no model that a checkpoint can hold, or the written one computes another.
        OutputError: The output exists or cannot be created.
    """
    start = time.monotonic()
    refuse_existing(options.output)
    require_folder("--load", options.load, holding="config.json")
    from checkpoint_conversion.imports import import_folder
    from megatron_neobert.config.cli import model_flags

    print(f"converting {options.load}")
    imported, checks = import_folder(options.load, options.output, verified=not options.no_verification)
    for note in imported.notes:
        print(f"note: {note}")
    print(
        f"{imported.layout} layout; continue pre-training with --continue-from {options.output} --tokenizer-model "
        f"{options.load} and the settings of this model: {model_flags(imported.model) or 'the default ones'}"
    )
    print_result(options.output, checks, source=f"the model of {options.load}", start=start)


def print_result(output: Path, checks: "Checks", *, source: str, start: float) -> None:
    """Print how the output compares with its source, and the duration of the conversion."""
    if checks:
        from checkpoint_conversion.compare import to_table

        print(f"{output} against {source}:\n{to_table(checks)}")
    print(f"wrote {output} in {time.monotonic() - start:.0f} s")


def verify(options: VerifyOptions) -> int:
    """Check whether two models are the same, as checkpoints or Hugging Face folders: exit 0 if they are, else 1.

    Both run in fp32 on the same fixed prompts, padded and packed into one row, each against A's padded rows. The
    settings that decide the function must be equal as well, and every weight in every bit, or within the tolerance if
    one is given.
    """
    for name, folder in (("A", options.first), ("B", options.second)):
        require_folder(name, folder)

    import torch

    from checkpoint_conversion.compare import (
        TOLERANCES,
        compare_models,
        differing_settings,
        differing_weights,
        to_table,
    )

    first, second = (load_side(folder) for folder in (options.first, options.second))
    if first.vocab_size != second.vocab_size:
        raise ConversionError(
            f"{first.description} predicts {first.vocab_size} tokens and {second.description} {second.vocab_size}; "
            "only models of one vocabulary can be compared."
        )
    checks, settings = compare_models(first, second), differing_settings(first, second)
    weights, count = differing_weights(first.weights(), second.weights()), len(first.weights())
    tolerance = TOLERANCES[torch.float32] if options.tolerance is None else options.tolerance
    are_logits_equal = all(comparison.within(tolerance) for comparison in checks.values())
    print(f"A  {first.description}\nB  {second.description}\n\n{to_table(checks)}\n")
    print(f"logits: {'equal' if are_logits_equal else 'NOT equal'} within {tolerance:g} of the largest")
    print(f"settings: {'; '.join(settings) + ' in A and B' if settings else 'equal'}")
    worst = max(weights, key=lambda name: weights[name], default="")
    if weights:
        largest = f"most of all {worst}, by {weights[worst]:.2g} of its largest value"
        print(f"weights: {len(weights)} of {count} tensors differ; {largest}")
    else:
        print(f"weights: all {count} tensors equal bit for bit")
    alike = are_logits_equal and not settings and weights.get(worst, 0.0) <= (options.tolerance or 0.0)
    print("equal" if alike else "NOT equal")
    return 0 if alike else 1


def load_side(folder: Path) -> "LogitModel":
    """Return the model of a folder in fp32, whichever kind it is.

    Raises:
        MissingInputError: It holds no model.
        CheckpointError, ConversionError: The model cannot be used.
    """
    if (folder / "config.json").is_file():
        from checkpoint_conversion.imports import load_as_read

        return load_as_read(folder)
    from checkpoint_conversion.checkpoint import read_checkpoint
    from checkpoint_conversion.compare import checkpoint_model

    checkpoint = read_checkpoint(folder)
    return checkpoint_model(checkpoint, description=f"{checkpoint.folder} (Megatron)")


if __name__ == "__main__":
    run_command(main)
