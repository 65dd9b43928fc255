"""The command `neobert verify`: check whether two models compute the same function."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_neobert.cli import option
from megatron_neobert.errors import ConversionError
from megatron_neobert.huggingface.checks import check_folder
from megatron_neobert.huggingface.hub import find_model

if TYPE_CHECKING:  # --help answers without importing torch
    from checkpoint_conversion.compare import LogitModel


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    first: Path = option(help="checkpoints, Hugging Face folder or OWNER/NAME", positional=True, metavar="A")
    second: Path = option(help="checkpoints, Hugging Face folder or OWNER/NAME", positional=True, metavar="B")
    tolerance: float | None = option(
        None,
        "largest accepted difference, relative to the largest logit and to the largest value of each weight (default: "
        "1e-4 for logits, 0 for weights; if one side is rounded to bfloat16, logits differ by 0.015)",
        minimum=0,
    )


def verify(options: VerifyOptions) -> int:
    """Compare two models, each a checkpoint or a Hugging Face folder: exit 0 if they are equal, else 1.

    Both run in fp32 on the same fixed prompts. The logits of B, padded and packed, may differ from A's padded logits by
    --tolerance (default 1e-4) of A's largest logit. Settings that affect the function must be equal. Weights must be
    equal bit for bit, or within --tolerance if given. Vocabularies of different sizes raise ConversionError.
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
