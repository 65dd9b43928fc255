"""The command `neobert replay`: compute the losses and the gradient of one global batch of a run again.

    neobert replay --load SAVE --iteration 812
    neobert replay --load SAVE --iteration 812 --checkpoint-iteration 812

Prints the documents of each micro-batch, and which losses and gradients are not finite. One process does the work of
all ranks of the run.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_neobert.checkpoint.folder import latest_checkpoint, verify_files
from megatron_neobert.cli import option
from megatron_neobert.config.schema import Settings
from megatron_neobert.errors import ConfigError
from megatron_neobert.runtime.environment import world_size


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Options of `neobert replay`, besides the flags of `neobert train`."""

    load: Path = option(help="folder of the run (its --save)", metavar="SAVE")
    iteration: int = option(help="iteration of the batch; the first is 1", metavar="K", minimum=1)
    checkpoint_iteration: int | None = option(None, "checkpoint with the weights; default: the newest before K")


def replay(options: ReplayOptions, flags: list[str]) -> None:
    """Compute losses and gradient of one iteration again; flags of `neobert train` replace the settings of the run.

    Weights and data position come from the newest checkpoint before that iteration. If all checkpoints are later, the
    initial weights and the start of the data are used. The batches in between are packed, but not trained on. The
    results are printed. Weights are not updated and no file is written.

    --checkpoint-iteration takes the weights of another checkpoint. A run that ends because its last updates were
    skipped saves the weights with which the skipped batches were computed; use this checkpoint.
    """
    from megatron_neobert.inspection.global_batch import open_iteration

    if world_size() > 1:
        raise ConfigError(f"neobert replay runs in one process, but WORLD_SIZE is {world_size()}. Start it alone.")
    settings, position = open_iteration(options.load, options.iteration, flags)
    weights = position
    if options.checkpoint_iteration is not None:
        weights = latest_checkpoint(options.load, iteration=options.checkpoint_iteration)
    for folder in {folder for folder in (weights, position) if folder is not None}:
        verify_files(folder)
    compute_batch(settings, options.iteration, weights=weights, position=position)


def compute_batch(settings: Settings, iteration: int, *, weights: Path | None, position: Path | None) -> None:
    """Run forward and backward on the batch of an iteration, and print losses and gradient norm. Weights do not change.

    Args:
        weights: Checkpoint with the weights; None leaves the initial weights.
        position: Checkpoint before the iteration, for the position in the data; None starts at the first iteration.
    """
    from megatron_neobert.model.kernels import check_hardware

    check_hardware(settings)  # before Megatron is imported: it imports any package that is called apex

    from megatron_neobert.checkpoint.load import load_from
    from megatron_neobert.runtime import distributed
    from megatron_neobert.training.setup import build_run, join
    from megatron_neobert.training.step import compute_gradients

    run = build_run(settings, *join(settings), draws_weights=position is None and weights is None)
    if position is not None:
        load_from(run, position)
    # Loading other weights replaces run.state, but must not change the position.
    state = run.state
    if weights is not None and weights != position:
        load_from(run, weights)
    stream = replace(run.training_stream, iteration=state.iteration, cursor=state.cursor)
    batch = stream.global_batch(iteration)
    reports, grad_norm = compute_gradients(run, batch.for_rank(stream.rank))
    losses = [report[:2].tolist() for report in reports]  # nats and masked tokens of each micro-batch
    used = "fresh weights" if weights is None else f"the weights of {weights}"
    print(f"batch {iteration} with {used} on {run.device.type}")
    if weights is None and iteration > 1:
        print(
            f"warning: no checkpoint is before batch {iteration}, so losses and gradient are those of fresh weights; "
            "--checkpoint-iteration N uses the weights of a checkpoint"
        )
    size = batch.phase.settings.training.micro_batch_size
    for number, (nats, masked) in enumerate(losses):
        segments = batch.packed.take(number * size, (number + 1) * size).segments
        finite = "finite" if math.isfinite(nats) else "NOT FINITE"
        # Numbers of the documents by corpus, each document once.
        documents: dict[str, dict[int, None]] = defaultdict(dict)
        for component, document in zip(segments.components_n.tolist(), segments.numbers_n.tolist(), strict=True):
            documents[str(batch.phase.sources[component].corpus.prefix)][document] = None
        print(
            f"micro-batch {number} | loss {nats / max(masked, 1):.4f} nats | {finite} | {masked:.0f} masked tokens | "
            f"{segments.packed_lengths_n.sum()} tokens of {sum(map(len, documents.values()))} documents"
        )
        for corpus, numbers in documents.items():
            print(f"  {corpus}: {' '.join(map(str, numbers))}")
    nats, masked = (sum(column) for column in zip(*losses, strict=True))
    print(f"loss {nats / max(masked, 1):.4f} nats | gradient norm {float(grad_norm):.3f}")
    for name, parameter in run.unwrapped_model.named_parameters():
        if not bool(parameter.main_grad.isfinite().all()):
            print(f"gradient NOT FINITE: {name}")
    distributed.shut_down()
