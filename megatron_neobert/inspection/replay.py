"""The command `neobert replay`: what is in a global batch of a run, and where losses and gradient cease to be finite.

    neobert replay --load SAVE --iteration 812
    neobert replay --load SAVE --iteration 812 --checkpoint-iteration 812

One process does the work of all ranks of the run.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_neobert.checkpoint.folder import latest_checkpoint, verify_files
from megatron_neobert.cli import option
from megatron_neobert.config.schema import CheckpointConfig, ParallelConfig, Settings
from megatron_neobert.errors import ConfigError
from megatron_neobert.runtime.environment import world_size


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """The command line of `neobert replay`, beside the flags of `neobert train`."""

    load: Path = option(help="folder of the run, its --save", metavar="SAVE")
    iteration: int = option(help="whose batch; the first iteration is 1", metavar="K", minimum=1)
    checkpoint_iteration: int | None = option(None, "with the weights of iter_N; without it the newest before K")


def replay(options: ReplayOptions, flags: list[str]) -> None:
    """Compute losses and gradient of one iteration again; all other flags are those of a run, and replace its settings.

    Settings, weights and the place in the data come from the newest checkpoint before that iteration; the batches
    between are packed without training on them. Nothing is updated, nothing is written. --checkpoint-iteration takes
    the weights of another checkpoint: a run that ends because its last updates were skipped saves the very weights
    that these batches met.
    """
    from megatron_neobert.inspection.found_batch import checkpoint_before, refuse_later_iteration

    if world_size() > 1:
        raise ConfigError(f"neobert replay is one process; WORLD_SIZE is {world_size()}. Start it without torchrun.")
    weights = place = checkpoint_before(options.load, options.iteration)
    if options.checkpoint_iteration is not None:
        weights = latest_checkpoint(options.load, iteration=options.checkpoint_iteration)
    settings = settings_of(options.load, weights, flags)
    refuse_later_iteration(settings, options.iteration)
    for folder in {folder for folder in (weights, place) if folder is not None}:
        verify_files(folder)
    compute_batch(settings, options.iteration, weights=weights, place=place)


def settings_of(load: Path, weights: Path | None, flags: list[str]) -> Settings:
    """Return the settings of the run in the layout of one rank, with what the flags replace.

    Raises:
        ConfigError: Flags that a run would not take either.
    """
    from megatron_neobert.config.cli import read_record
    from megatron_neobert.inspection.found_batch import replace_by_flags, without_outputs

    saved = read_record((weights or latest_checkpoint(load)) / "settings.yaml")
    distributed_optimizer = saved.parallel.use_distributed_optimizer  # its checkpoints cannot be read without
    saved = replace(
        without_outputs(saved),
        checkpoint=CheckpointConfig(load=str(load)),
        parallel=ParallelConfig(use_distributed_optimizer=distributed_optimizer),
    )
    return replace_by_flags(saved, flags, world_size=1)


def compute_batch(settings: Settings, iteration: int, *, weights: Path | None, place: Path | None) -> None:
    """Run forward and backward on the batch of an iteration, and print what is found."""
    from megatron_neobert.model.kernels import check_hardware

    check_hardware(settings)  # before Megatron is imported: it imports any package that is called apex

    from megatron_neobert.checkpoint.load import load_from
    from megatron_neobert.runtime import distributed
    from megatron_neobert.training.setup import build_run, join
    from megatron_neobert.training.step import compute_gradients

    run = build_run(settings, *join(settings))
    if place is not None:
        load_from(run, place)
    state = run.state  # before it becomes that of other weights
    if weights is not None and weights != place:
        load_from(run, weights)
    stream = replace(run.training_stream, iteration=state.iteration, cursor=state.cursor).from_iteration(iteration)
    reports, grad_norm = compute_gradients(run, next(stream.steps()))
    sums = {number: report[:2].tolist() for number, report in enumerate(reports)}  # nats and masked tokens
    gradients = {name: parameter.main_grad for name, parameter in run.unwrapped_model.named_parameters()}
    used = "fresh weights" if weights is None else f"the weights of {weights}"
    print(f"batch {iteration} with {used} on {run.device.type}")
    if weights is None and iteration > 1:
        print(
            f"warning: there is no checkpoint from before batch {iteration}, so losses and gradient are those of "
            "fresh weights; --checkpoint-iteration N uses the weights of a checkpoint"
        )
    print_findings(stream, sums, float(grad_norm))
    for name, gradient in gradients.items():
        if not bool(gradient.isfinite().all()):
            print(f"gradient NOT FINITE: {name}")
    distributed.shut_down()


def print_findings(stream: Any, sums: dict[int, list[float]], grad_norm: float) -> None:
    """Print one line per micro-batch with its documents below, then the gradient."""
    stream, rows, _ = next(stream.global_batches())
    size = stream.settings.micro_batch_size
    for number, (nats, masked) in sums.items():
        part = rows.take(number * size, (number + 1) * size)
        finite = "finite" if math.isfinite(nats) else "NOT FINITE"
        documents = documents_of(stream, part)
        print(
            f"micro-batch {number} | loss {nats / max(masked, 1):.4f} nats | {finite} | {masked:.0f} masked tokens | "
            f"{part.segments.slots_n.sum()} tokens of {sum(map(len, documents.values()))} documents"
        )
        for corpus, numbers in documents.items():
            print(f"  {corpus}: {' '.join(map(str, numbers))}")
    nats, masked = (sum(column) for column in zip(*sums.values(), strict=True))
    print(f"loss {nats / max(masked, 1):.4f} nats | gradient norm {grad_norm:.3f}")


def documents_of(stream: Any, rows: Any) -> dict[str, list[int]]:
    """Return the numbers of the documents in some rows, by corpus."""
    found: dict[str, dict[int, None]] = {}
    segments = rows.segments
    for component, number in zip(segments.components_n.tolist(), segments.numbers_n.tolist(), strict=True):
        found.setdefault(str(stream.sources[component].corpus.prefix), {})[number] = None
    return {corpus: list(numbers) for corpus, numbers in found.items()}
