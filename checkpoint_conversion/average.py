"""The command `neobert average`: the mean of the weights of a run's checkpoints, to continue from or to convert.

neobert average --load SAVE --last 5 --output DIR
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_neobert.checkpoint.folder import iteration_of, latest_checkpoint, list_checkpoints
from megatron_neobert.cli import option
from megatron_neobert.errors import ConversionError, MissingInputError
from megatron_neobert.runtime.atomic_files import build_folder, refuse_existing

if TYPE_CHECKING:  # --help answers without importing torch
    from checkpoint_conversion.checkpoint import MegatronCheckpoint


@dataclass(frozen=True, kw_only=True)
class AverageOptions:
    """The command line of `neobert average`."""

    load: Path = option(help="folder that training was given as --save", metavar="DIR")
    last: int = option(help="number of checkpoints", minimum=1)
    iteration: int | None = option(None, "the last of them; without it the newest")
    output: Path = option(help="folder to create", metavar="DIR")


def average(options: AverageOptions) -> None:
    """Average the weights of a run's newest checkpoints, or of those up to --iteration, into one checkpoint.

    It holds weights alone, in fp32, as a conversion from Hugging Face writes them: for training's --continue-from, or
    the --load of `neobert convert`. The command takes the memory of two models.
    """
    refuse_existing(options.output)  # before minutes of reading
    iterations = choose_iterations(options.load, options.last, newest=options.iteration)
    from checkpoint_conversion.checkpoint import write_checkpoint

    mean = read_mean(options.load, iterations)
    with build_folder(options.output) as temporary:
        write_checkpoint(temporary, mean.tensors, mean.settings.model, mean.tokenizer)
    numbers = ", ".join(map(str, iterations))
    print(f"wrote {options.output}: the mean of iterations {numbers}, for --continue-from or neobert convert")


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
