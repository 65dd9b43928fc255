"""Read and write the tensors of a checkpoint: the safetensors files of each rank.

Tensors have the same names on all ranks, and each rank stores boxes of them. The header of a file has the offsets of
each box within its tensor, so that any number of ranks in any layout can read any slice. HuggingFaceStorageReader of
torch.distributed.checkpoint can read the files, because each has at most one box of a tensor. Everything is checked
before use, because files may come from others.
"""

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_neobert.errors import CheckpointError, short_reason
from megatron_neobert.text import parse_json

# Header keys of torch.distributed.checkpoint for the offsets of boxes. The shape of the whole tensor is added.
# Source: torch/distributed/checkpoint/_hf_utils.py.
_SHARDING, _OFFSETS, _SHAPE = "DCP_SHARDING_INFO", "saved_offsets", "shape"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}

# Prefixes of the names of weights in the optimizer's state.
OPTIMIZER_STATE = "optimizer.state."
MAIN_WEIGHTS = "optimizer.state.param."


class Box(NamedTuple):
    """A rectangular slice of a tensor."""

    offsets: tuple[int, ...]  # index of its first element in the tensor
    shape: tuple[int, ...]
    whole: tuple[int, ...]  # shape of the tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor], boxes: Mapping[str, Box] | None = None) -> None:
    """Write contiguous CPU tensors as one safetensors file of a checkpoint. Raise OSError if this is impossible.

    `boxes` maps each name to the tensor's box in the whole tensor; None if all tensors are whole.
    """
    if boxes is None:
        boxes = {name: Box((0,) * tensor.dim(), *[tuple(tensor.shape)] * 2) for name, tensor in tensors.items()}
    # A single metadata key, because safetensors writes several in random order.
    sharding = {name: {_OFFSETS: boxes[name].offsets, _SHAPE: boxes[name].whole} for name in tensors}
    try:
        save_file(dict(tensors), path, metadata={_SHARDING: json.dumps(sharding)})
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error


class StoredTensors:
    """Tensors in the files of a checkpoint. `shapes` and `dtypes` map names to whole tensors' shapes and dtypes.

    The constructor reads the headers of all files; values are read later. A pickled copy, for another rank, contains
    the headers' content. Raise CheckpointError if a file is damaged, or if the boxes of a tensor do not make up the
    whole tensor.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._boxes: dict[str, list[tuple[str, Box]]] = {}  # with the name of the file
        self._files: dict[str, Any] = {}
        for path in sorted(path for path in folder.glob("*.safetensors") if path.is_file() and not path.is_symlink()):
            try:
                self._list_boxes(path)
            except (SafetensorError, ValueError, TypeError, KeyError, AttributeError) as error:
                raise CheckpointError(
                    f"{path}: cannot be read ({short_reason(error)}); use another checkpoint."
                ) from error
        for name, stored in self._boxes.items():
            boxes = [box for _, box in stored]
            self.shapes[name] = boxes[0].whole
            if not _make_up(boxes, self.shapes[name]):
                raise CheckpointError(
                    f"{folder}: the shards of {name} do not add up to its shape {self.shapes[name]}; use another "
                    "checkpoint."
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_files": {}}

    def _list_boxes(self, path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            sharding = parse_json((file.metadata() or {})[_SHARDING])
            for name in file.keys():  # noqa: SIM118  not a dict
                stored = file.get_slice(name)
                offsets, whole = (tuple(sharding[name][key]) for key in (_OFFSETS, _SHAPE))
                shape = tuple(stored.get_shape())
                is_valid = all(type(number) is int and number >= 0 for number in (*offsets, *whole))
                if not is_valid or not len(offsets) == len(shape) == len(whole):
                    raise ValueError(f"{name} of shape {shape} begins at {offsets!r:.80} of {whole!r:.80}")
                box = Box(offsets, shape, whole)
                dtype = _DTYPES[stored.get_dtype()]
                if self.dtypes.setdefault(name, dtype) != dtype:
                    raise ValueError(f"{name} is {dtype}, but {self.dtypes[name]} in another file")
                boxes = self._boxes.setdefault(name, [])
                if boxes and boxes[0][1].whole != whole:
                    raise ValueError(f"{name} is of {whole!r:.80}, but of {boxes[0][1].whole!r:.80} in another file")
                boxes.append((path.name, box))

    def main_name(self, name: str) -> str:
        """Return the name under which a weight's fp32 main weights are stored, or `name` if there are none."""
        main = MAIN_WEIGHTS + name
        return main if main in self.shapes and self.shapes[main] == self.shapes.get(name) else name

    def read(self, name: str, into: Tensor, *, offsets: Sequence[int], is_padded: bool = False) -> None:
        """Copy a slice of a stored tensor into `into`, which has the slice's shape and sets the dtype.

        Args:
            offsets: Start of the slice in the stored tensor.
            is_padded: Fill with zeros where the slice extends beyond the stored tensor, because the padded vocabulary
                size depends on the layout.

        Raises:
            CheckpointError: The tensor or the slice does not exist, or a file cannot be read.
        """
        if name not in self._boxes or len(self.shapes[name]) != into.dim():
            raise CheckpointError(
                f"{self.folder} has no {name} of {into.dim()} dimensions; use a checkpoint of this model."
            )
        stops = [start + size for start, size in zip(offsets, into.shape, strict=True)]
        if is_padded:
            into.zero_()
        elif any(stop > size for stop, size in zip(stops, self.shapes[name], strict=True)):
            raise CheckpointError(
                f"{self.folder}: {name} has shape {self.shapes[name]}, but this model needs {tuple(stops)}; use a "
                "checkpoint of this model."
            )
        for file, box in self._boxes[name]:
            begins = np.maximum(offsets, box.offsets)
            ends = np.minimum(stops, np.add(box.offsets, box.shape))
            if (begins < ends).all():
                target, source = (
                    tuple(map(slice, (begins - start).tolist(), (ends - start).tolist()))
                    for start in (offsets, box.offsets)
                )
                try:
                    if file not in self._files:
                        self._files[file] = safe_open(self.folder / file, framework="pt")
                    into[target] = self._files[file].get_slice(name)[source].to(into)
                except SafetensorError as error:
                    raise CheckpointError(
                        f"{self.folder / file}: cannot be read ({short_reason(error)}); use another checkpoint."
                    ) from error

    def read_whole(self, name: str) -> Tensor:
        """Return a whole tensor in its stored dtype."""
        tensor = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        self.read(name, tensor, offsets=[0] * tensor.dim())
        return tensor


def _make_up(boxes: Sequence[Box], whole: Sequence[int]) -> bool:
    """Return True if every element of a tensor of shape `whole` is in exactly one box."""
    # As Python numbers, because a product of hostile shapes does not fit into an int64.
    if sum(prod(box.shape) for box in boxes) != prod(whole):
        return False
    starts = np.array([box.offsets for box in boxes])
    stops = starts + np.array([box.shape for box in boxes])
    if (stops > np.array(whole)).any():
        return False
    # Boxes inside of the tensor, none of which overlap, and with as many elements: row by row against the later ones.
    return not any(
        ((starts[number] < stops[number + 1 :]) & (starts[number + 1 :] < stops[number])).all(axis=1).any()
        for number in range(len(boxes))
    )
