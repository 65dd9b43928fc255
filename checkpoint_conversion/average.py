"""The command `neobert average`: the mean of the weights of a run's checkpoints, to continue from or to convert.

neobert average --load SAVE --last 5 --output DIR
"""

from dataclasses import dataclass
from pathlib import Path

from megatron_neobert.checkpoint.folder import iteration_of, latest_checkpoint, list_checkpoints
from megatron_neobert.cli import option
from megatron_neobert.errors import ConversionError, MissingInputError
from megatron_neobert.runtime.atomic_files import build_folder, refuse_existing


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

    Raises:
        MissingInputError: The folder holds too few checkpoints.
        CheckpointError: A checkpoint is damaged or incomplete.
        ConversionError: The checkpoints are of different models, or their layers are not NeoBERT's.
    """
    refuse_existing(options.output)  # before minutes of reading
    save, last = options.load, iteration_of(latest_checkpoint(options.load, iteration=options.iteration))
    iterations = [number for number in map(iteration_of, list_checkpoints(save)) if number <= last]
    if len(iterations) < options.last:
        raise MissingInputError(
            f"{save} holds {len(iterations)} checkpoints up to iteration {last}, and {options.last} are to be "
            "averaged; average fewer, or train with a smaller --save-interval."
        )
    from checkpoint_conversion.checkpoint import read_checkpoint, write_checkpoint

    newest, *others = iterations[: options.last]
    mean = read_checkpoint(save, iteration=newest)
    for iteration in others:
        older = read_checkpoint(save, iteration=iteration)
        if older.settings.model != mean.settings.model or older.shape != mean.shape:
            raise ConversionError(f"{older.folder} and {mean.folder} are of different models; their mean is none.")
        for name, tensor in mean.tensors.items():
            tensor.add_(older.tensors[name])
    for tensor in mean.tensors.values():
        tensor.div_(options.last)
    with build_folder(options.output) as temporary:
        write_checkpoint(temporary, mean.tensors, mean.settings.model, mean.tokenizer)
    numbers = ", ".join(map(str, [newest, *others]))
    print(f"wrote {options.output}: the mean of iterations {numbers}, for --continue-from or neobert convert")
