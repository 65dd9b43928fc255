"""Contents of a checkpoint: one safetensors file per rank, in the layout of torch.distributed.checkpoint, and JSON.

Every tensor has one name in the whole model, and each rank stores the part that it holds. The header of its file has
the offsets of each part, so that another number of ranks or another layout finds what it needs; torch's
HuggingFaceStorageReader reads the same files. Everything is checked before it is used: a stranger may have written it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_neobert.checkpoint.folder import TRAIN_STATE
from megatron_neobert.errors import CheckpointError, short_reason
from megatron_neobert.runtime.atomic_files import read_text
from megatron_neobert.state import TrainState
from megatron_neobert.text import parse_json

OPTIMIZER_PREFIX = "optimizer."
# torch.distributed.checkpoint's names for where the parts begin, torch/distributed/checkpoint/_hf_utils.py.
_SHARDING, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
_LARGEST_COUNT = 1 << 62  # of an int64, with room to add to
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


def write_tensors(path: Path, parts: Mapping[str, Tensor], offsets: Mapping[str, Sequence[int]]) -> None:
    """Write one file of contiguous CPU tensors; each is a part that begins at `offsets` of its whole tensor."""
    places = {name: {_OFFSETS: list(offsets[name])} for name in parts}
    try:
        save_file(dict(parts), path, metadata={_SHARDING: json.dumps(places)})  # of several keys the order is random
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error


class _Part(NamedTuple):
    path: Path
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class StoredTensors:
    """The tensors in the files of a checkpoint, by name; `shapes` are those of whole tensors.

    Raises:
        CheckpointError: A file is damaged, or the parts of a tensor are not all there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._parts: dict[str, list[_Part]] = {}
        self._files: dict[Path, Any] = {}
        for path in sorted(path for path in folder.glob("*.safetensors") if path.is_file() and not path.is_symlink()):
            try:
                self._list_parts(path)
            except (SafetensorError, ValueError, TypeError, KeyError, AttributeError) as error:
                raise CheckpointError(
                    f"{path}: cannot be read ({short_reason(error)}); use another checkpoint."
                ) from error
        for name, parts in self._parts.items():
            ends = [[start + size for start, size in zip(part.offsets, part.shape, strict=True)] for part in parts]
            self.shapes[name] = tuple(map(max, zip(*ends, strict=True)))
            if sum(prod(part.shape) for part in parts) != prod(self.shapes[name]):
                raise CheckpointError(
                    f"{folder}: the parts of {name} do not add up to its shape {self.shapes[name]}; use another "
                    "checkpoint."
                )

    def _list_parts(self, path: Path) -> None:
        file = self._files[path] = safe_open(path, framework="pt")
        places = parse_json((file.metadata() or {})[_SHARDING])
        for name in file.keys():  # noqa: SIM118  not a dict
            stored = file.get_slice(name)
            offsets, shape = tuple(places[name][_OFFSETS]), tuple(stored.get_shape())
            if len(offsets) != len(shape) or not all(type(offset) is int and offset >= 0 for offset in offsets):
                raise ValueError(f"{name} of shape {shape} begins at {offsets!r:.80}")
            dtype = _DTYPES[stored.get_dtype()]
            if self.dtypes.setdefault(name, dtype) != dtype:
                raise ValueError(f"{name} is {dtype} here and {self.dtypes[name]} in another file")
            self._parts.setdefault(name, []).append(_Part(path, offsets, shape))

    def read(self, name: str, into: Tensor, *, offsets: Sequence[int], is_padded: bool = False) -> None:
        """Fill a tensor with the part of a stored one that begins at `offsets`, in the dtype of the former.

        Args:
            is_padded: The part may reach beyond the stored tensor, and is zero there: layouts pad the vocabulary.

        Raises:
            CheckpointError: There is no such tensor or part, or its file cannot be read.
        """
        if name not in self._parts or len(self.shapes[name]) != into.dim():
            raise CheckpointError(f"{self.folder} holds no {name} of {into.dim()} dimensions; it is of another model.")
        stops = [start + size for start, size in zip(offsets, into.shape, strict=True)]
        if is_padded:
            into.zero_()
        elif any(stop > size for stop, size in zip(stops, self.shapes[name], strict=True)):
            raise CheckpointError(
                f"{self.folder}: {name} has shape {self.shapes[name]}, but up to {tuple(stops)} is needed; it is of "
                "another model."
            )
        for part in self._parts[name]:
            own_stops = [start + size for start, size in zip(part.offsets, part.shape, strict=True)]
            common = [
                (max(start, own_start), min(stop, own_stop))
                for start, own_start, stop, own_stop in zip(offsets, part.offsets, stops, own_stops, strict=True)
            ]
            if all(begin < end for begin, end in common):
                here, there = (
                    tuple(slice(begin - first, end - first) for (begin, end), first in zip(common, firsts, strict=True))
                    for firsts in (offsets, part.offsets)
                )
                try:
                    into[here] = self._files[part.path].get_slice(name)[there].to(into)
                except SafetensorError as error:
                    raise CheckpointError(f"{part.path}: cannot be read ({short_reason(error)}).") from error

    def read_whole(self, name: str) -> Tensor:
        """A whole tensor in the dtype that it is stored in."""
        tensor = torch.zeros(self.shapes[name], dtype=self.dtypes[name])  # hostile parts can leave gaps
        self.read(name, tensor, offsets=[0] * tensor.dim())
        return tensor


def write_train_state(folder: Path, state: TrainState, optimizer: dict[str, Any] | None = None) -> None:
    """Write train_state.json, with the plain values of megatron.core's optimizer state unless it has weights alone."""
    content = {"progress": asdict(state)} | ({} if optimizer is None else {"optimizer": optimizer})
    (folder / TRAIN_STATE).write_text(json.dumps(content, indent=1), encoding="utf-8")


class SavedState(NamedTuple):
    """Content of train_state.json."""

    state: TrainState
    optimizer: dict[str, Any] | None  # None: a conversion writes weights alone


def read_train_state(folder: Path) -> SavedState:
    """Read train_state.json and check each value, or raise CheckpointError."""
    path = folder / TRAIN_STATE
    try:
        content = parse_json(read_text(path))
        state = msgspec.convert(content["progress"], TrainState)
        optimizer = msgspec.convert(content.get("optimizer"), dict[str, Any] | None)
        for name, count in (vars(state) | vars(state.cursor)).items():
            if isinstance(count, int) and not 0 <= count < _LARGEST_COUNT:
                raise ValueError(f"{name} is {count}, no count")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing, so the checkpoint is incomplete; use another one.") from error
    except (msgspec.ValidationError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: not of a run of this program ({short_reason(error)}); use another checkpoint."
        ) from error
    return SavedState(state, optimizer)
