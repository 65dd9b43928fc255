"""Command: are two models the same?

Each side is a folder that training saved to, or a Hugging Face folder of a masked language model. Both run in fp32 on
the same fixed prompts, padded and, where B's architecture can, packed into one row, each against A's padded rows. Where
both have a layout that conversion reads, the settings that decide the function must be equal as well, and every weight
in every bit, or within the tolerance if one is given. Exit code 0: equal; 1: not.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

from megatron_neobert.errors import CommandParser, ConversionError, run_command
from megatron_neobert.runtime.atomic_files import require_folder

if TYPE_CHECKING:  # --help answers without importing torch
    from checkpoint_conversion.comparison import LogitModel


def main() -> int:
    """Compares, prints a table, and returns 0 or 1."""
    parser = CommandParser(__doc__)
    parser.add_argument("first", type=Path, metavar="A", help="folder of checkpoints, or Hugging Face folder")
    parser.add_argument("second", type=Path, metavar="B", help="the same")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest difference that still counts as equal, over the largest logit, and over the largest value of a "
        "weight (default: 1e-4 for logits, as after a conversion, and none for weights; rounded to bfloat16 on one "
        "side, logits differ by 0.015)",
    )
    arguments = parser.parse_args()
    for name, folder in (("A", arguments.first), ("B", arguments.second)):
        require_folder(name, folder)

    import torch

    from checkpoint_conversion.comparison import TOLERANCES, build_prompts, compare_models, to_table

    first, second = (load_side(folder) for folder in (arguments.first, arguments.second))
    if first.vocab_size != second.vocab_size:
        raise ConversionError(
            f"{first.description} predicts {first.vocab_size} tokens and {second.description} {second.vocab_size}; "
            "only models of one vocabulary can be compared."
        )
    prompts = build_prompts(first.vocab_size, longest=min(first.max_tokens, second.max_tokens))
    checks = compare_models(first, second, prompts)
    tolerance = TOLERANCES[torch.float32] if arguments.tolerance is None else arguments.tolerance
    alike = all(comparison.within(tolerance) for comparison in checks.values())
    print(f"A  {first.description}\nB  {second.description}\n\n{to_table(checks)}\n")
    print(f"logits: {'equal' if alike else 'NOT equal'} within {tolerance:g} of the largest")
    alike &= compare_content(first, second, tolerance=arguments.tolerance or 0.0)
    print("equal" if alike else "NOT equal")
    return 0 if alike else 1


def compare_content(first: "LogitModel", second: "LogitModel", *, tolerance: float) -> bool:
    """Prints what settings and weights have in common, and returns whether they are equal where both are known."""
    from checkpoint_conversion.comparison import differing_settings, differing_weights

    if first.weights is None or second.weights is None:
        print("settings and weights: not compared; one of the folders has no layout that conversion reads")
        return True
    settings = differing_settings(first, second)
    print(f"settings: {'; '.join(settings) + ' in A and B' if settings else 'equal'}")
    weights, others = first.weights(), second.weights()
    if {name: tensor.shape for name, tensor in weights.items()} != {name: one.shape for name, one in others.items()}:
        print("weights: not compared; their shapes differ")
        return False
    differing = differing_weights(weights, others)
    if not differing:
        print(f"weights: all {len(weights)} tensors equal bit for bit")
        return not settings
    worst = max(differing, key=lambda name: differing[name])
    print(
        f"weights: {len(differing)} of {len(weights)} tensors differ; most of all {worst}, by {differing[worst]:.2g} "
        "of its largest value"
    )
    return not settings and differing[worst] <= tolerance


def load_side(folder: Path) -> "LogitModel":
    """The model of a folder in fp32, whichever kind it is.

    Raises:
        MissingInputError: It holds no model.
        CheckpointError, ConversionError: The model cannot be used.
    """
    if (folder / "config.json").is_file():
        from checkpoint_conversion.hf_model import load_as_read

        return load_as_read(folder)
    from checkpoint_conversion.comparison import checkpoint_model
    from checkpoint_conversion.megatron_io import read_checkpoint

    checkpoint = read_checkpoint(folder)
    return checkpoint_model(checkpoint, description=f"{checkpoint.folder} (Megatron)")


if __name__ == "__main__":
    run_command(main)
