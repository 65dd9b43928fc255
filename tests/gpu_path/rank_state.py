"""Counts the memory of a rank, and what the rank and all others would write to a checkpoint."""

from collections.abc import Iterator

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range

from megatron_neobert.checkpoint.contents import OPTIMIZER_STATE, Box
from megatron_neobert.checkpoint.shards import LocalBox, Part, assign_to_files, entries_of, local_parts, parts_to_save
from megatron_neobert.planning.memory import RankMemory
from megatron_neobert.state import Run


def memory(run: Run, *, kept: int) -> dict[str, int]:
    """Return the bytes of a rank. `kept` is what autograd keeps of all micro-batches in flight."""
    flats = [
        flat for part in local_parts(run) for flat in (*part.moments.values(), *([part.main] if part.has_main else []))
    ]
    return {
        "weights": sum(buffer.param_data.nbytes for buffer in run.model.buffers),
        "gradients": sum(buffer.grad_data.nbytes for buffer in run.model.buffers),
        "optimizer": sum(flat.nbytes for flat in flats),
        "activations": kept,
    }


def planned_memory(plan: RankMemory) -> dict[str, int]:
    return {
        "weights": plan.weights,
        "gradients": plan.gradients,
        "optimizer": plan.optimizer,
        "activations": plan.activations + plan.head,
    }


def save_plan(run: Run) -> dict[str, int]:
    """Return the boxes and bytes that a rank writes, and the files of its pipeline stage, without writing them."""
    own = [box for part in parts_to_save(run) for box in part.boxes()]
    ranks = list(boxes_of_weights(run))
    group = run.model.buffers[0].data_parallel_group
    # Other ranks are right if this rank is, and if all ranks together have every element once.
    assert places(ranks[group.rank()]) == {place for place in places(own) if not place[0].startswith(OPTIMIZER_STATE)}
    elements = sum(box.data.numel() for boxes in ranks for box in boxes)
    assert elements == sum(parameter.numel() for parameter in run.model.parameters())
    # A tensor-parallel rank other than the first does not write norms, but a file for each box of a matrix.
    assert all(any(len(box.box.shape) == 2 for box in boxes) for boxes in ranks)
    files = sum(len(assign_to_files(boxes)) for boxes in ranks) * run.settings.parallel.tensor_model_parallel_size
    return {"boxes": len(own), "bytes": sum(box.data.nbytes for box in own), "files of the stage": files}


def places(boxes: list[LocalBox]) -> set[tuple[str, Box]]:
    return {(box.name, box.box) for box in boxes}


def boxes_of_weights(run: Run) -> Iterator[list[LocalBox]]:
    """Yield the boxes of weights that each data-parallel rank writes. Main weights and moments have the same boxes.

    A bucket of gradients is divided evenly between the ranks.
    """
    entries = entries_of(run.unwrapped_model)
    buckets = [(buffer, bucket) for buffer in run.model.buffers for bucket in buffer.buckets]
    for rank in range(run.model.buffers[0].data_parallel_group.size()):
        boxes: list[LocalBox] = []
        for buffer, bucket in buckets:
            size = bucket.grad_data.numel() // buffer.data_parallel_group.size()
            start = bucket.offset + rank * size
            ranges = DistributedOptimizer._build_model_gbuf_param_range_map(
                buffer.param_index_map, Range(start, start + size), bucket.offset
            )
            for parameter, range_map in ranges.items():
                part = range_map["param"]
                flat = parameter.detach().view(-1)[part.start : part.end]
                boxes += Part(entries[parameter], part.start, flat, flat, {}).boxes()
        yield boxes
