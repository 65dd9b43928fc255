"""The command `neobert average`: average the weights of a run's checkpoints.

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
    load: Path = option(help="folder given to training as --save", metavar="DIR")
    last: int = option(help="number of checkpoints to average", minimum=1)
    iteration: int | None = option(None, "newest checkpoint to average (default: the newest of the run)")
    output: Path = option(help="folder to create", metavar="DIR")


def average(options: AverageOptions) -> None:
    """Average the weights of a run's newest --last checkpoints, up to --iteration, and write a new checkpoint.

    The new checkpoint has fp32 weights and no optimizer state, as after a conversion from Hugging Face. Use it for
    --continue-from, or as --load of `neobert convert`. The command needs the memory of two models.
    """
    refuse_existing(options.output)  # before minutes of reading
    newest = iteration_of(latest_checkpoint(options.load, iteration=options.iteration))
    iterations = [number for number in map(iteration_of, list_checkpoints(options.load)) if number <= newest]
    if len(iterations) < options.last:
        raise MissingInputError(
            f"{options.load} has {len(iterations)} checkpoints up to iteration {newest}, fewer than --last "
            f"{options.last}. Average fewer, or train with a smaller --save-interval."
        )
    from checkpoint_conversion.checkpoint import read_checkpoint, write_checkpoint

    iterations = iterations[: options.last]
    mean = read_checkpoint(options.load, iteration=newest)
    for iteration in iterations[1:]:
        older = read_checkpoint(options.load, iteration=iteration)
        if older.settings.model != mean.settings.model or older.shape != mean.shape:
            raise ConversionError(
                f"{older.folder} and {mean.folder} are checkpoints of different models. Average checkpoints of one run."
            )
        if older.tokenizer.fingerprint != mean.tokenizer.fingerprint:
            raise ConversionError(
                f"{older.folder} and {mean.folder} have different tokenizers. Average checkpoints of one run."
            )
        for name, tensor in mean.tensors.items():
            tensor.add_(older.tensors[name])
    for name, tensor in mean.tensors.items():
        tensor.div_(options.last)
        if not tensor.isfinite().all():
            raise ConversionError(
                f"{name}: the mean of the checkpoints in {options.load} is not finite. Average other checkpoints."
            )
    with build_folder(options.output) as temporary:
        read = mean.train_state.read_corpora  # of the newest checkpoint, which has read what the others have
        write_checkpoint(temporary, mean.tensors, mean.settings.model, mean.tokenizer, read_corpora=read)
    numbers = ", ".join(map(str, iterations))
    print(f"wrote {options.output}: the mean of iterations {numbers}, for --continue-from or neobert convert")
