"""The commands `neobert convert` (Megatron checkpoint to Hugging Face folder and back) and `neobert verify`.

Every output folder is compared with its source before it gets its final name. An exported folder is loaded with
transformers and compared with the reference model (model/reference.py) with the same weights. An imported folder is
read as data, and none of its code is executed; the new checkpoint is read again and compared with the folder's model.
Conversion runs in one CPU process, without torchrun or Transformer Engine, for checkpoints of any number of ranks.

`python checkpoint_conversion/convert.py` in a checkout is the same as `neobert convert`.
"""

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

# Import this checkout, not an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_neobert import __main__ as neobert
from megatron_neobert.cli import option
from megatron_neobert.errors import ConversionError, run_command
from megatron_neobert.huggingface.checks import check_folder
from megatron_neobert.huggingface.hub import find_model
from megatron_neobert.runtime.atomic_files import refuse_existing

if TYPE_CHECKING:  # --help answers without importing torch
    from checkpoint_conversion.compare import Checks, LogitModel


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The command line of `neobert convert megatron-to-hf`."""

    load: Path = option(help="folder given to training as --save", metavar="DIR")
    output: Path = option(help="folder to create", metavar="DIR")
    layout: Literal["eurobert", "neobert"] = option(
        "eurobert",
        "layout of the output: eurobert needs no remote code; neobert has the published names",
        flag="--format",
    )
    dtype: Literal["float32", "bfloat16"] = option("float32", "dtype of the stored weights")
    sentence_transformers: bool = option(False, "add the files that SentenceTransformer(DIR) reads: mean pooling")
    iteration: int | None = option(None, "checkpoint to convert (default: the newest)")
    no_verification: bool = option(False, "do not compare the output with its source")


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """The command line of `neobert convert hf-to-megatron`."""

    load: Path = option(help="masked language model: Hugging Face folder, or OWNER/NAME[@REVISION]", metavar="DIR")
    output: Path = option(help="folder to create, for training's --continue-from", metavar="DIR")
    tokenizer_model: Path | None = option(
        None, "tokenizer to continue with, instead of the folder's; its tokens start with weights of the old ones"
    )
    no_verification: bool = option(False, "do not compare the output with its source")


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """The command line of `neobert verify`."""

    first: Path = option(help="checkpoints, Hugging Face folder or OWNER/NAME", positional=True, metavar="A")
    second: Path = option(help="checkpoints, Hugging Face folder or OWNER/NAME", positional=True, metavar="B")
    tolerance: float | None = option(
        None,
        "largest accepted difference, relative to the largest logit and to the largest value of each weight (default: "
        "1e-4 for logits, 0 for weights; if one side is rounded to bfloat16, logits differ by 0.015)",
        minimum=0,
    )


def megatron_to_hf(options: ExportOptions) -> None:
    """Write a Megatron checkpoint as a Hugging Face folder and compare it with the reference model.

    The reference is a plain PyTorch model with the checkpoint's weights. --no-verification skips the comparison.
    """
    from megatron_neobert.checkpoint.folder import latest_checkpoint

    start = time.monotonic()
    refuse_existing(options.output)
    latest_checkpoint(options.load, iteration=options.iteration)  # fails before torch is imported
    from checkpoint_conversion.checkpoint import read_checkpoint
    from checkpoint_conversion.export import export
    from megatron_neobert.config.phases import phases_until

    checkpoint = read_checkpoint(options.load, iteration=options.iteration)
    print(f"converting {checkpoint.folder}")
    phases = phases_until(checkpoint.settings, checkpoint.train_state.iteration)
    if {phase.settings.data.objective for phase in phases} == {"clm"}:
        print(
            "warning: this run was trained with --objective clm only. The exported model attends to both sides, which "
            "these weights have not learned; train with mlm first."
        )
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
    """Write a Hugging Face folder as a checkpoint for --continue-from and compare it with the folder's model."""
    start = time.monotonic()
    refuse_existing(options.output)
    options = replace(options, load=find_model("--load", options.load))
    from checkpoint_conversion.imports import import_folder
    from megatron_neobert.config.cli import model_flags
    from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

    print(f"converting {options.load}")
    tokenizer = None if options.tokenizer_model is None else load_tokenizer(options.tokenizer_model)
    imported, checks = import_folder(
        options.load, options.output, tokenizer=tokenizer, verified=not options.no_verification
    )
    for note in imported.notes:
        print(f"note: {note}")
    print(
        f"{imported.layout} layout; continue pre-training with --continue-from {options.output} --tokenizer-model "
        f"{options.tokenizer_model or options.load} and the settings of this model: "
        f"{model_flags(imported.model) or 'the defaults'}"
    )
    print_result(options.output, checks, source=f"the model of {options.load}", start=start)


def print_result(output: Path, checks: "Checks", *, source: str, start: float) -> None:
    """Print a table of `checks` if there are any, and the seconds since `start`, an earlier time.monotonic()."""
    if checks:
        from checkpoint_conversion.compare import to_table

        print(f"{output} against {source}:\n{to_table(checks)}")
    print(f"wrote {output} in {time.monotonic() - start:.0f} s")


def verify(options: VerifyOptions) -> int:
    """Compare two models, each a checkpoint or a Hugging Face folder: exit 0 if they are equal, else 1.

    Both run in fp32 on the same fixed prompts. The logits of B, padded and packed, may differ from A's padded logits by
    --tolerance (default 1e-4) of A's largest logit. Settings that affect the function must be equal. Weights must be
    equal bit for bit or, if --tolerance is given, within it. Vocabularies of different sizes raise ConversionError.
    """
    folders = find_model("A", options.first, holding=""), find_model("B", options.second, holding="")
    import torch

    from checkpoint_conversion import compare

    first, second = map(load_side, folders)
    if first.vocab_size != second.vocab_size:
        raise ConversionError(
            f"{first.description} has a vocabulary of {first.vocab_size} tokens, and {second.description} of "
            f"{second.vocab_size}. Compare models with the same vocabulary."
        )
    checks, settings = compare.compare_models(first, second), compare.differing_settings(first, second)
    expected = first.weights()
    differences = compare.differing_weights(expected, second.weights())
    tolerance = compare.TOLERANCES[torch.float32] if options.tolerance is None else options.tolerance
    are_logits_equal = all(comparison.within(tolerance) for comparison in checks.values())
    print(f"A  {first.description}\nB  {second.description}\n\n{compare.to_table(checks)}\n")
    print(f"logits: {'equal' if are_logits_equal else 'NOT equal'} within {tolerance:g} of the largest")
    print(f"settings: {'; '.join(settings) + ' in A and B' if settings else 'equal'}")
    worst = max(differences, key=lambda name: differences[name], default="")
    if differences:
        largest = f"largest in {worst}, by {differences[worst]:.2g} of its largest value"
        print(f"weights: {len(differences)} of {len(expected)} tensors differ; {largest}")
    else:
        print(f"weights: all {len(expected)} tensors equal bit for bit")
    are_equal = are_logits_equal and not settings and differences.get(worst, 0.0) <= (options.tolerance or 0.0)
    print("equal" if are_equal else "NOT equal")
    return 0 if are_equal else 1


def load_side(folder: Path) -> "LogitModel":
    """Return the model of a Hugging Face folder, or of the newest checkpoint in a --save folder, in fp32.

    Biases that the files of a Hugging Face folder lack are zero.
    """
    from checkpoint_conversion.checkpoint import read_checkpoint
    from checkpoint_conversion.compare import build_logit_model, checkpoint_model
    from checkpoint_conversion.config_json import read_model_config
    from checkpoint_conversion.imports import read_weights

    if (folder / "config.json").is_file():
        parsed = read_model_config(check_folder(folder), folder / "config.json")
        return build_logit_model(folder, parsed.layout, read_weights(folder, parsed)[0])
    checkpoint = read_checkpoint(folder)
    return checkpoint_model(checkpoint, description=f"{checkpoint.folder} (Megatron)")


def main() -> int | None:
    """Run `neobert convert` with the arguments of this command line."""
    sys.argv.insert(1, "convert")
    return neobert.main()


if __name__ == "__main__":
    run_command(main)
