"""The command `neobert replay`: what is in a global batch of a run, and where losses and gradient cease to be finite.

    neobert replay --load SAVE --iteration 812
    neobert replay --load SAVE --iteration 812 --checkpoint-iteration 812

One process does the work of all ranks of the run; under torchrun the ranks share it as in the settings.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_neobert.checkpoint.folder import latest_checkpoint, verify_files
from megatron_neobert.cli import option
from megatron_neobert.config.schema import CheckpointConfig, ParallelConfig, Settings
from megatron_neobert.runtime.environment import is_rank_zero, world_size


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

    weights = place = checkpoint_before(options.load, options.iteration)
    if options.checkpoint_iteration is not None:
        weights = latest_checkpoint(options.load, iteration=options.checkpoint_iteration)
    settings = settings_of(options.load, weights, flags)
    refuse_later_iteration(settings, options.iteration)
    if is_rank_zero():
        for folder in {folder for folder in (weights, place) if folder is not None}:
            verify_files(folder)
    compute_batch(settings, options.iteration, weights=weights, place=place)


def settings_of(load: Path, weights: Path | None, flags: list[str]) -> Settings:
    """Return the settings of the run, with what the flags replace; on one process, the layout is that of one rank.

    Raises:
        ConfigError: Flags that a run would not take either.
    """
    from megatron_neobert.config.cli import read_record
    from megatron_neobert.inspection.found_batch import replace_by_flags, without_outputs

    saved = read_record((weights or latest_checkpoint(load)) / "settings.yaml")
    saved = replace(without_outputs(saved), checkpoint=CheckpointConfig(load=str(load)))
    if world_size() == 1:
        distributed_optimizer = saved.parallel.use_distributed_optimizer  # its checkpoints cannot be read without
        saved = replace(saved, parallel=ParallelConfig(use_distributed_optimizer=distributed_optimizer))
    return replace_by_flags(saved, flags, world_size=world_size())


def compute_batch(settings: Settings, iteration: int, *, weights: Path | None, place: Path | None) -> None:
    """Run forward and backward on the batch of an iteration; rank 0 prints what is found. Collective: all ranks."""
    from megatron_neobert.model.kernels import check_hardware

    check_hardware(settings)  # before Megatron is imported: it imports any package that is called apex

    from megatron_neobert.runtime import distributed
    from megatron_neobert.training.setup import build_run, join
    from megatron_neobert.training.step import compute_gradients

    run = build_run(settings, *join(settings))
    stream = stream_at(run, iteration, weights=weights, place=place)
    reports, grad_norm = compute_gradients(run, next(stream.steps()))
    sums, not_finite = gather_findings(run, reports)
    if is_rank_zero():
        used = "fresh weights" if weights is None else f"the weights of {weights}"
        print(f"batch {iteration} with {used} on {world_size()} x {run.device.type}")
        if weights is None and iteration > 1:
            print(
                f"warning: there is no checkpoint from before batch {iteration}, so losses and gradient are those of "
                "fresh weights; --checkpoint-iteration N uses the weights of a checkpoint"
            )
        print_findings(stream, sums, not_finite, float(grad_norm))
    distributed.shut_down()


def stream_at(run: Any, iteration: int, *, weights: Path | None, place: Path | None) -> Any:
    """Load the weights and return this rank's batches from that of the iteration on. Collective: all ranks."""
    from megatron_neobert.checkpoint.load import load_from

    if place is not None:
        load_from(run, place)
    state = run.state
    if weights is not None and weights != place:
        load_from(run, weights)
    stream = replace(run.training_stream, iteration=state.iteration, cursor=state.cursor)
    return stream.from_iteration(iteration)


def gather_findings(run: Any, reports: list[Any]) -> tuple[dict[int, list[float]], list[str]]:
    """Gather what all ranks found.

    Returns:
        Per micro-batch of the global batch, its loss in nats and masked tokens; and the names of parameters whose
        gradient is not finite.

    Collective: all ranks.
    """
    import torch
    from megatron.core import parallel_state

    first, step = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    # Tensor-parallel ranks report the same, context-parallel ones each their share.
    counts = parallel_state.get_tensor_model_parallel_rank() == 0
    own_sums = {first + number * step: report[:2].tolist() for number, report in enumerate(reports) if counts}
    stages = parallel_state.get_pipeline_model_parallel_world_size()  # each counts its layers from 0
    stage = f"stage {parallel_state.get_pipeline_model_parallel_rank()}: " if stages > 1 else ""
    own_names = [
        f"{stage}{name}"
        for name, parameter in run.unwrapped_model.named_parameters()
        if not bool(parameter.main_grad.isfinite().all())
    ]
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, (own_sums, own_names))  # collective: all ranks
    sums: dict[int, list[float]] = {}
    for of_rank, _ in gathered:
        for number, values in of_rank.items():
            sums[number] = [a + b for a, b in zip(sums.get(number, [0.0, 0.0]), values, strict=True)]
    return dict(sorted(sums.items())), list(dict.fromkeys(name for _, names in gathered for name in names))


def print_findings(stream: Any, sums: dict[int, list[float]], not_finite: list[str], grad_norm: float) -> None:
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
    for name in not_finite:
        print(f"gradient NOT FINITE: {name}")


def documents_of(stream: Any, rows: Any) -> dict[str, list[int]]:
    """Return the numbers of the documents in some rows, by corpus."""
    found: dict[str, dict[int, None]] = {}
    segments = rows.segments
    for component, number in zip(segments.components_n.tolist(), segments.numbers_n.tolist(), strict=True):
        found.setdefault(str(stream.sources[component].corpus.prefix), {})[number] = None
    return {corpus: list(numbers) for corpus, numbers in found.items()}
