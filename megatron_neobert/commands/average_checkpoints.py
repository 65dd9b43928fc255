"""Average the weights of a run's checkpoints into one to continue from, or to convert.

    neobert average --load SAVE --last 5 --output DIR

writes the mean of the newest five; --iteration N takes those up to N. What is written holds weights alone, in fp32, as
a conversion from Hugging Face writes them: for training's --continue-from, or neobert convert's --load. The command
takes the memory of two models.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_neobert.checkpoint.folder import iteration_of, latest_checkpoint, list_checkpoints
from megatron_neobert.errors import CommandParser, ConversionError, MissingInputError, positive
from megatron_neobert.runtime.atomic_files import build_folder, refuse_existing

if TYPE_CHECKING:  # --help answers without importing torch
    from checkpoint_conversion.checkpoint import MegatronCheckpoint


def main() -> None:
    arguments = parse_arguments()
    refuse_existing(arguments.output)  # before minutes of reading
    iterations = choose_iterations(arguments.load, arguments.last, newest=arguments.iteration)
    from checkpoint_conversion.checkpoint import write_checkpoint

    mean = read_mean(arguments.load, iterations)
    with build_folder(arguments.output) as temporary:
        write_checkpoint(temporary, mean.tensors, mean.settings.model, mean.tokenizer, declared=mean.declared)
    numbers = ", ".join(map(str, iterations))
    print(f"wrote {arguments.output}: the mean of iterations {numbers}, for --continue-from or neobert convert")


def parse_arguments() -> argparse.Namespace:
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add("--load", required=True, type=Path, metavar="DIR", help="folder that training was given as --save")
    add("--last", required=True, type=positive, metavar="N", help="number of checkpoints")
    add("--iteration", type=int, metavar="N", help="the last of them (default: the newest)")
    add("--output", required=True, type=Path, metavar="DIR", help="folder to create")
    return parser.parse_args()


def choose_iterations(save: Path, count: int, *, newest: int | None) -> list[int]:
    """Return the iterations of `count` checkpoints, the newest first.

    Raises:
        MissingInputError: The folder holds no checkpoint of iteration `newest`, or fewer than `count` up to it.
    """
    last = iteration_of(latest_checkpoint(save, iteration=newest))
    iterations = [number for number in map(iteration_of, list_checkpoints(save)) if number <= last]
    if len(iterations) < count:
        raise MissingInputError(
            f"{save} holds {len(iterations)} checkpoints up to iteration {last}, and {count} are to be averaged; "
            "average fewer, or train with a smaller --save-interval."
        )
    return iterations[:count]


def read_mean(save: Path, iterations: Sequence[int]) -> "MegatronCheckpoint":
    """Return the first iteration's checkpoint with the mean of the weights of all iterations.

    Raises:
        CheckpointError: A checkpoint is damaged or incomplete.
        ConversionError: The checkpoints are of different models, or their layers are not NeoBERT's.
    """
    from checkpoint_conversion.checkpoint import read_checkpoint

    mean = read_checkpoint(save, iteration=iterations[0])
    for iteration in iterations[1:]:
        older = read_checkpoint(save, iteration=iteration)
        if older.settings.model != mean.settings.model or older.shape != mean.shape:
            raise ConversionError(f"{older.folder} and {mean.folder} are of different models; their mean is none.")
        for name, tensor in mean.tensors.items():
            tensor.add_(older.tensors[name])
    for tensor in mean.tensors.values():
        tensor.div_(len(iterations))
    return mean
