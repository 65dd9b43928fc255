"""The boxes of stored tensors that each rank holds in its memory, to save and to load them.

With the distributed optimizer, a rank has the optimizer state of one range of each flattened parameter. A range of a
matrix is at most three boxes: part of a row, whole rows, part of a row. Each rank saves and loads its own boxes, so
nothing is gathered. Names and offsets refer to whole tensors, as megatron.core describes them (ShardedTensor), so
they do not depend on the layout of the ranks.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_neobert.checkpoint.contents import MAIN_WEIGHTS, OPTIMIZER_STATE, Box
from megatron_neobert.state import Run

# Every tensor of a rank has its own name: the two halves of SwiGLU's first matrix have one each.
_STATE_FORMAT = {"singleton_local_shards": True}


class LocalBox(NamedTuple):
    """A box of a stored tensor, and the view of this rank's memory that contains the box's values."""

    name: str
    box: Box
    data: Tensor
    is_padded: bool  # the tensor may be stored with fewer rows: the padded vocabulary size depends on the layout


@dataclass(frozen=True)
class Part:
    """A range of a flattened parameter, from element `start`, with its optimizer state on this rank."""

    entry: ShardedTensor | ShardedTensorFactory  # this rank's whole parameter
    start: int
    weight: Tensor
    main: Tensor  # fp32 weights; the same memory as `weight` if that is fp32
    moments: dict[str, Tensor]  # by their name in the optimizer

    @property
    def has_main(self) -> bool:
        """True if the main weights are stored separately from `weight`."""
        return self.main.dtype != self.weight.dtype

    def boxes(self) -> Iterator[LocalBox]:
        """Yield boxes that cover the weights, the main weights (if stored separately) and the moments."""
        flats = {"": self.weight}
        if self.has_main:
            flats[MAIN_WEIGHTS] = self.main
        flats |= {f"{OPTIMIZER_STATE}{name}.": moment for name, moment in self.moments.items()}
        for prefix, flat in flats.items():
            yield from self.boxes_of(flat, prefix)

    def boxes_of(self, flat: Tensor, prefix: str) -> Iterator[LocalBox]:
        """Yield the boxes of `flat`, one value per element of this part. `prefix` is put before the boxes' names."""
        entry = self.entry
        for piece in entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]:
            assert piece.data.is_contiguous() and not piece.prepend_axis_num, piece
            # Element of the piece with which `flat` begins; negative if `flat` begins before the piece.
            first = self.start - (piece.data.storage_offset() - entry.data.storage_offset())
            begin, end = max(first, 0), min(first + flat.numel(), piece.data.numel())
            for offsets, shape in split_range(piece.local_shape, begin, end):
                size = prod(shape)
                data = flat[begin - first : begin - first + size].view(shape)
                begin += size
                offsets = tuple(map(sum, zip(offsets, piece.global_offset, strict=True)))
                box = Box(offsets, shape, tuple(piece.global_shape))
                yield LocalBox(prefix + piece.key, box, data, piece.allow_shape_mismatch)


def split_range(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split the elements from `start` to `stop` of a flattened tensor into boxes; yield each box's (offsets, shape).

    Boxes are in row-major order. A matrix needs at most three boxes. An empty range yields nothing.
    """
    shape = 1, *shape
    sizes = [prod(shape[axis + 1 :]) for axis in range(len(shape))]  # elements per index of the axis
    while start < stop:
        # The outermost axis that has a whole index at `start`, and as many of its indices as are in the range.
        axis = next(axis for axis, size in enumerate(sizes) if start % size == 0 and start + size <= stop)
        offsets = [start // size % extent for size, extent in zip(sizes, shape, strict=True)]
        count = min((stop - start) // sizes[axis], shape[axis] - offsets[axis])
        box = (*[1] * axis, count, *shape[axis + 1 :])
        yield tuple(offsets[1:]), box[1:]
        start += count * sizes[axis]


def local_parts(run: Run) -> list[Part]:
    """Return the parts of parameters whose optimizer state is on this rank. Allocates the state if it is missing.

    Without the distributed optimizer, the parts are this rank's whole parameters.
    """
    model = run.unwrapped_model
    # megatron.core's description of each parameter of this rank: name, offsets, and shape of the whole.
    entries = {
        entry.data: entry
        for name, entry in model.sharded_state_dict(metadata=_STATE_FORMAT).items()
        if not name.endswith("_extra_state")  # pickles of Transformer Engine, for FP8 scaling
    }
    assert entries.keys() == set(model.parameters()), "the state of the model is its parameters"
    parts = []
    for optimizer in run.optimizer.chained_optimizers:
        optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
        for parameter, main, start in _main_weights(optimizer, model):
            weight = parameter.detach().view(-1)[start : start + main.numel()]
            state = optimizer.optimizer.state[main]
            moments = {name: value.detach().view(-1) for name, value in state.items() if name != "step"}
            parts.append(Part(entries[parameter], start, weight, main.detach().view(-1), moments))
    return parts


def _main_weights(optimizer: Any, model: Any) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield (parameter, this rank's main weights, the main weights' first index in the flattened parameter)."""
    if isinstance(optimizer, DistributedOptimizer):
        for parameter, (group, number) in optimizer.model_param_group_index_map.items():
            main = optimizer.optimizer.param_groups[group]["params"][number]
            yield parameter, main, optimizer._get_model_param_range_map(parameter)["param"].start
        return
    # Megatron sets `main_param` for parameters that are not in fp32.
    parameters = {getattr(parameter, "main_param", parameter): parameter for parameter in model.parameters()}
    for group in optimizer.optimizer.param_groups:
        for main in group["params"]:
            yield parameters[main], main, 0


def parts_to_save(run: Run) -> list[Part]:
    """Return the parts that this rank writes. All ranks together write every element once, in about equal shares."""
    # Without tensors that a lower tensor-parallel rank or pipeline stage has, too; the last number is the data-parallel
    # rank.
    parts = [part for part in local_parts(run) if not any(part.entry.replica_id[:2])]
    if run.settings.use_distributed_optimizer:
        return parts
    # All data-parallel ranks have the same parts, so each writes a share of their elements.
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    total = sum(part.main.numel() for part in parts)
    begin, end = (total * number // group.size() for number in (group.rank(), group.rank() + 1))
    shares, before = [], 0
    for part in parts:
        size = part.main.numel()
        first, last = max(begin - before, 0), min(end - before, size)
        if first < last:
            moments = {name: moment[first:last] for name, moment in part.moments.items()}
            weight, main = part.weight[first:last], part.main[first:last]
            shares.append(Part(part.entry, part.start + first, weight, main, moments))
        before += size
    return shares


def assign_to_files(boxes: Iterable[LocalBox]) -> list[dict[str, LocalBox]]:
    """Assign a rank's boxes to files, and return a dictionary name -> box for each file.

    A file contains at most one box of each tensor. The first file contains the largest boxes, up to two further files
    contain parts of rows.
    """
    files: list[dict[str, LocalBox]] = []
    for box in sorted(boxes, key=lambda box: -box.data.numel()):
        file = next((file for file in files if box.name not in file), None)
        if file is None:
            files.append(file := {})
        file[box.name] = box
    return files
