"""Command: do two models compute the same logits?

Each side is a folder that training saved to, or a Hugging Face folder of a masked language model. Both run in fp32 on
the same fixed prompts, padded and, where B's architecture can, packed into one row, each against A's padded rows. Exit
code 0: equal within the tolerance; 1: not.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_neobert.errors import ConversionError, MissingInputError, run_command

if TYPE_CHECKING:  # --help answers without importing torch
    from checkpoint_conversion.comparison import LogitModel


def main() -> int:
    """Compares, prints a table, and returns 0 or 1."""
    parser = argparse.ArgumentParser(prog="verify.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("first", type=Path, metavar="A", help="folder of checkpoints, or Hugging Face folder")
    parser.add_argument("second", type=Path, metavar="B", help="the same")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest difference over largest logit that still counts as equal (default 1e-4, as after a conversion; "
        "weights rounded to bfloat16 on one side differ by 0.015)",
    )
    parser.add_argument(
        "--trust-checkpoint",
        action="store_true",
        help="let a checkpoint's pickled table of contents run code; only for files from people you trust",
    )
    arguments = parser.parse_args()

    import torch

    from checkpoint_conversion.comparison import TOLERANCES, build_prompts, compare_models, to_table
    from megatron_neobert.training.safe_reading import refuse_unsafe_environment

    trust = arguments.trust_checkpoint
    refuse_unsafe_environment(trust)
    first, second = (load_side(folder, trust=trust) for folder in (arguments.first, arguments.second))
    if first.vocab_size != second.vocab_size:
        raise ConversionError(
            f"{first.description} predicts {first.vocab_size} tokens and {second.description} {second.vocab_size}; "
            "only models of one vocabulary can be compared."
        )
    prompts = build_prompts(first.vocab_size, longest=min(first.max_tokens, second.max_tokens))
    checks = compare_models(first, second, prompts)
    tolerance = TOLERANCES[torch.float32] if arguments.tolerance is None else arguments.tolerance
    equal = all(comparison.within(tolerance) for comparison in checks.values())
    print(f"A  {first.description}\nB  {second.description}\n\n{to_table(checks)}\n")
    print(f"{'equal' if equal else 'NOT equal'} within {tolerance:g} of the largest logit")
    return 0 if equal else 1


def load_side(folder: Path, *, trust: bool = False) -> "LogitModel":
    """The model of a folder in fp32, whichever kind it is; `trust` lets a table of contents be unpickled.

    Raises:
        MissingInputError: No such folder, or one that holds no model.
        CheckpointError, ConversionError: The model cannot be used.
    """
    if not folder.is_dir():
        raise MissingInputError(f"{folder}: no such folder.")
    if (folder / "config.json").is_file():
        from checkpoint_conversion.huggingface_model import is_readable, load_as_read, load_logit_model

        return load_as_read(folder) if is_readable(folder) else load_logit_model(folder)
    import torch

    from checkpoint_conversion.megatron_reader import read_checkpoint
    from checkpoint_conversion.verification import reference_model

    checkpoint = read_checkpoint(folder, trust=trust)
    return reference_model(
        checkpoint.build_reference(torch.float32),
        max_tokens=checkpoint.settings.model.max_position_embeddings,
        description=f"{checkpoint.folder} (Megatron)",
    )


if __name__ == "__main__":
    run_command(main)
