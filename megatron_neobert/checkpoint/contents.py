"""Read and write the contents of a checkpoint: one safetensors file per rank, and train_state.json.

Tensors have the same names on all ranks, and each rank stores its shards of them. The header of a file has the offsets
of each shard within its tensor, so that any number of ranks in any layout can read any slice. The format is that of
torch.distributed.checkpoint's HuggingFaceStorageReader. Everything is checked before use, because files may come from
others.
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

# Header keys of torch.distributed.checkpoint for the offsets of shards.
# Source: torch/distributed/checkpoint/_hf_utils.py.
_SHARDING, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
_LARGEST_COUNT = 1 << 62  # leaves room for additions in an int64
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


def write_tensors(path: Path, shards: Mapping[str, Tensor], offsets: Mapping[str, Sequence[int]]) -> None:
    """Write one file of a checkpoint.

    Args:
        shards: Contiguous CPU tensors, by the name of the tensor that they belong to.
        offsets: Index in that tensor of the first element of each shard.

    Raises:
        OSError: The file cannot be written.
    """
    # A single metadata key, because safetensors writes several in random order.
    sharding = {name: {_OFFSETS: list(offsets[name])} for name in shards}
    try:
        save_file(dict(shards), path, metadata={_SHARDING: json.dumps(sharding)})
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error


class _Shard(NamedTuple):
    path: Path
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class StoredTensors:
    """Tensors in the files of a checkpoint. `shapes` and `dtypes` are by name, of whole tensors.

    Raises:
        CheckpointError: A file is damaged, or the shards of a tensor are incomplete.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._shards: dict[str, list[_Shard]] = {}
        self._files: dict[Path, Any] = {}
        for path in sorted(path for path in folder.glob("*.safetensors") if path.is_file() and not path.is_symlink()):
            try:
                self._list_shards(path)
            except (SafetensorError, ValueError, TypeError, KeyError, AttributeError) as error:
                raise CheckpointError(
                    f"{path}: cannot be read ({short_reason(error)}); use another checkpoint."
                ) from error
        for name, shards in self._shards.items():
            stops = [[start + size for start, size in zip(shard.offsets, shard.shape, strict=True)] for shard in shards]
            self.shapes[name] = tuple(map(max, zip(*stops, strict=True)))
            if sum(prod(shard.shape) for shard in shards) != prod(self.shapes[name]):
                raise CheckpointError(
                    f"{folder}: the shards of {name} do not add up to its shape {self.shapes[name]}; use another "
                    "checkpoint."
                )

    def _list_shards(self, path: Path) -> None:
        file = self._files[path] = safe_open(path, framework="pt")
        sharding = parse_json((file.metadata() or {})[_SHARDING])
        for name in file.keys():  # noqa: SIM118  not a dict
            stored = file.get_slice(name)
            offsets, shape = tuple(sharding[name][_OFFSETS]), tuple(stored.get_shape())
            if len(offsets) != len(shape) or not all(type(offset) is int and offset >= 0 for offset in offsets):
                raise ValueError(f"{name} of shape {shape} begins at {offsets!r:.80}")
            dtype = _DTYPES[stored.get_dtype()]
            if self.dtypes.setdefault(name, dtype) != dtype:
                raise ValueError(f"{name} is {dtype}, but {self.dtypes[name]} in another file")
            self._shards.setdefault(name, []).append(_Shard(path, offsets, shape))

    def read(self, name: str, into: Tensor, *, offsets: Sequence[int], is_padded: bool = False) -> None:
        """Copy a slice of a stored tensor into `into`, whose shape is the slice's size, and convert to its dtype.

        Args:
            offsets: Start of the slice in the stored tensor.
            is_padded: The slice may extend beyond the stored tensor and is zero there. The padded vocabulary size
                depends on the layout.

        Raises:
            CheckpointError: There is no such tensor or slice, or a file cannot be read.
        """
        if name not in self._shards or len(self.shapes[name]) != into.dim():
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
        for shard in self._shards[name]:
            overlap = [
                (max(start, shard_start), min(stop, shard_start + size))
                for start, stop, shard_start, size in zip(offsets, stops, shard.offsets, shard.shape, strict=True)
            ]
            if all(begin < end for begin, end in overlap):
                target, source = (
                    tuple(
                        slice(begin - start, end - start) for (begin, end), start in zip(overlap, starts, strict=True)
                    )
                    for starts in (offsets, shard.offsets)
                )
                try:
                    into[target] = self._files[shard.path].get_slice(name)[source].to(into)
                except SafetensorError as error:
                    raise CheckpointError(
                        f"{shard.path}: cannot be read ({short_reason(error)}); use another checkpoint."
                    ) from error

    def read_whole(self, name: str) -> Tensor:
        """Return a whole tensor in its stored dtype."""
        tensor = torch.zeros(self.shapes[name], dtype=self.dtypes[name])  # overlapping shards could leave gaps
        self.read(name, tensor, offsets=[0] * tensor.dim())
        return tensor


def write_train_state(folder: Path, state: TrainState, optimizer: dict[str, Any] | None = None) -> None:
    """Write train_state.json.

    Args:
        optimizer: Values of megatron.core's optimizer state that are not tensors. None for a checkpoint without
            optimizer state.
    """
    content = {"progress": asdict(state)} | ({} if optimizer is None else {"optimizer": optimizer})
    (folder / TRAIN_STATE).write_text(json.dumps(content, indent=1), encoding="utf-8")


class SavedState(NamedTuple):
    """Content of train_state.json."""

    state: TrainState
    optimizer: dict[str, Any] | None  # None in a checkpoint without optimizer state


def read_train_state(folder: Path) -> SavedState:
    """Read train_state.json and check every value.

    Raises:
        CheckpointError: The file is missing or not valid.
    """
    path = folder / TRAIN_STATE
    try:
        content = parse_json(read_text(path))
        state = msgspec.convert(content["progress"], TrainState)
        optimizer = msgspec.convert(content.get("optimizer"), dict[str, Any] | None)
        for name, count in (vars(state) | vars(state.cursor)).items():
            if isinstance(count, int) and not 0 <= count < _LARGEST_COUNT:
                raise ValueError(f"{name} is {count}, which is not a valid count")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing, so the checkpoint is incomplete; use another checkpoint.") from error
    except (msgspec.ValidationError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: not written by neobert ({short_reason(error)}); use another checkpoint."
        ) from error
    return SavedState(state, optimizer)
