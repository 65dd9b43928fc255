"""Reads the tensors of a torch_dist checkpoint without running code that somebody put into it.

`.metadata`, its table of contents, is a pickle, and torch reads it with `pickle.load`: whoever writes that file decides
what the reader's process executes. Here only the records that a real table consists of can be created, and what they
say is checked before anything is read by it: tensors only, in files of the folder, at places inside these files, each
as large as its data. Tensor data itself is read by torch with weights_only=True.

Costs about a second per 2 MB of the table, because the unpickler is the one written in Python.
"""

import json
import math
import os
import pickle
import re
from collections import OrderedDict
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future
from torch.serialization import _get_layout

from megatron_neobert.errors import CheckpointError

_PythonUnpickler: Any = pickle._Unpickler  # typeshed takes it for the one in C
_TRUST = "if you trust whoever wrote it, add --trust-checkpoint"
OPTIMIZER_PREFIX = "optimizer."  # of the names that the optimizer's tensors have
_LONGEST_REASON = 200  # characters; the text of an error can hold whatever the file holds


def _join_parts(*parts: str) -> str:
    """Stands for pathlib.PosixPath, the folder that the checkpoint was written to."""
    return "/".join(parts)


_RECORDS = (
    _MEM_FORMAT_ENCODING,
    _StorageInfo,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
_DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
# Exact names, each with its object: nothing is looked up or imported because a file says so.
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(record.__module__, record.__name__): record for record in _RECORDS},
    **{("torch", name): getattr(torch, name) for name in _DTYPES},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("pathlib", "PosixPath"): _join_parts,
}


class SafeReader(FileSystemReader):
    """torch's reader, with the table of contents read as described above, once."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._table: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The table of contents of the checkpoint; what was checked is what is used afterwards.

        Raises:
            CheckpointError: The file is missing or damaged, wants to create anything but plain records, or describes
                what this checkpoint does not hold.
        """
        if self._table is None:
            table = _read_table(Path(self.path) / ".metadata")
            _check_table(table, Path(self.path))
            table.storage_meta = StorageMeta(load_id=self.load_id)
            self._table = table
        return self._table

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what the plan asks for.

        Raises:
            CheckpointError: Stored data is not the tensor that the table describes, or holds other objects.
        """
        try:
            return super().read_data(plan, planner)
        except (OSError, CheckpointError):
            raise
        except Exception as error:  # damaged or hostile data makes torch.load raise almost anything
            raise CheckpointError(
                f"{self.path}: a tensor in its *.distcp files cannot be read ({reason_of(error)}); use another "
                "checkpoint."
            ) from error


def reason_of(error: BaseException) -> str:
    """What an unpickler says, in a few words on one line."""
    if asked := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return f"it asks for {asked[1]}, which no tensor needs"
    text = " ".join(str(error).split())
    readable = "".join(character if character.isprintable() else "?" for character in text)
    return readable[:_LONGEST_REASON] or type(error).__name__


def _read_table(path: Path) -> Metadata:
    try:
        with path.open("rb") as stream:
            table = _RecordsUnpickler(stream).load()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing, so the checkpoint is incomplete; use another one.") from error
    except OSError:
        raise
    except Exception as error:  # a damaged byte makes an unpickler raise almost anything
        raise CheckpointError(
            f"{path}: not the table of contents of a checkpoint ({reason_of(error)}); use another one."
        ) from error
    if not isinstance(table, Metadata):
        raise CheckpointError(f"{path}: holds a {type(table).__name__}, not a table of contents; use another one.")
    return table


class _RecordsUnpickler(_PythonUnpickler):
    """Creates the records of the table above and refuses everything else.

    The one written in C has no place for the second rule, by which a file cannot change the classes and functions
    that this process goes on using.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no table of contents needs; {_TRUST}")
        return _ALLOWED[(module, name)]

    def load_build(self) -> None:
        target = self.stack[-2]
        if type(target) not in _RECORDS or isinstance(target, Enum):
            raise pickle.UnpicklingError(f"it changes a {type(target).__name__}, which no table of contents does")
        super().load_build()

    dispatch: ClassVar[dict[int, Any]] = {**_PythonUnpickler.dispatch, pickle.BUILD[0]: load_build}


def _check_table(table: Metadata, folder: Path) -> None:
    """Refuses a table whose entries are not tensors that lie, whole, in files of the folder."""
    try:
        sizes = _file_sizes({info.relative_path for info in table.storage_data.values()}, folder)
        for index, info in table.storage_data.items():
            _check_place(index.fqn, info, sizes[info.relative_path])
        lengths = {(index.fqn, index.offset): info.length for index, info in table.storage_data.items()}
        for name, entry in table.state_dict_metadata.items():
            _check_entry(name, entry, lengths)
    except ValueError as error:
        raise CheckpointError(f"{folder / '.metadata'}: {reason_of(error)}; use another checkpoint.") from error
    except (AttributeError, KeyError, RecursionError, TypeError) as error:
        raise CheckpointError(
            f"{folder / '.metadata'}: its records are damaged ({reason_of(error)}); use another checkpoint."
        ) from error


def _file_sizes(names: set[str], folder: Path) -> dict[str, int]:
    """Bytes of every file that the table refers to; none may lie elsewhere."""
    manifest = folder / "MANIFEST.json"
    listed = json.loads(manifest.read_bytes())["files"] if manifest.is_file() else names
    for name in names:
        path = folder / name
        if path.name != name or not name.isprintable():
            raise ValueError(f"it refers to {name!r:.80}, which is no name of a file in the folder")
        if path.is_symlink() or not path.is_file():
            raise ValueError(f"it refers to {name}, which is missing or no plain file")
        if name not in listed:
            raise ValueError(f"it refers to {name}, which {manifest.name} does not list")
    return {name: (folder / name).stat().st_size for name in names}


def _check_place(name: str, info: _StorageInfo, file_bytes: int) -> None:
    _check_counts(info.offset, info.length)
    if info.offset + info.length > file_bytes:
        raise ValueError(
            f"{name!r:.80} ends at byte {info.offset + info.length} of {info.relative_path}, which has {file_bytes}"
        )
    if info.transform_descriptors:
        raise ValueError(f"{name!r:.80} is stored through a transformation, which is never done here")


def _check_entry(name: str, entry: object, lengths: dict[tuple[str, Any], int]) -> None:
    if not isinstance(entry, TensorStorageMetadata):
        raise ValueError(f"{name!r:.80} is a stored object, which torch would unpickle; {_TRUST}")
    value_bytes, held = entry.properties.dtype.itemsize, 0
    for chunk in entry.chunks:
        _check_counts(*chunk.offsets, *chunk.sizes)
        ends = [first + count for first, count in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > size for end, size in zip(ends, entry.size, strict=True)):
            raise ValueError(
                f"{name!r:.80} has a part that ends at {ends!r:.80}, outside its {tuple(entry.size)!r:.80}"
            )
        count, stored_bytes = math.prod(chunk.sizes), lengths[name, chunk.offsets]
        if count * value_bytes > stored_bytes:
            raise ValueError(f"{name!r:.80} has a part of {count} values, too many for the {stored_bytes} bytes stored")
        held += count
    if held != math.prod(entry.size):
        raise ValueError(f"{name!r:.80} has {math.prod(entry.size)} values, but its parts hold {held}")


def _check_counts(*counts: int) -> None:
    if any(type(count) is not int or count < 0 for count in counts):
        raise ValueError(f"{counts!r:.80} are not all counts")
