"""Reads the table of contents of a torch_dist checkpoint without running code that somebody put into it.

`.metadata` is a pickle, and torch reads it with `pickle.load`: whoever writes that file decides what the reader's
process executes. Here only the records that a real table of contents
consists of can be created.

Tensors themselves are read by torch with weights_only=True. Stored objects (`BytesStorageMetadata`) are not: a reader
of foreign checkpoints must not ask for them.
"""

import pickle
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from megatron_neobert.errors import CheckpointError

_DCP = "torch.distributed.checkpoint"
# Exact pairs: a rule like "anything below torch.distributed.checkpoint" would let in `os.system` through the modules
# that these import.
_ALLOWED = {
    *(
        (f"{_DCP}.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    *((f"{_DCP}.planner", name) for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    *(("torch", name) for name in ("float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool")),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),  # the folder that the checkpoint was written to
    ("builtins", "set"),
}


class SafeReader(FileSystemReader):
    """torch's reader, with the table of contents read as described above."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The table of contents of the checkpoint.

        Raises:
            CheckpointError: The file is missing, damaged, or wants to create anything but plain records.
        """
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as stream:
                metadata = _RecordsUnpickler(stream).load()
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: missing, so the checkpoint is incomplete; use another one.") from error
        except OSError:
            raise
        except Exception as error:  # a damaged byte makes pickle raise almost anything
            raise CheckpointError(
                f"{path}: not the table of contents of a checkpoint ({error}); use another one."
            ) from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(
                f"{path}: holds a {type(metadata).__name__}, not a table of contents; use another one."
            )
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _RecordsUnpickler(pickle.Unpickler):
    """Creates the records of the table above and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no table of contents needs")
        return super().find_class(module, name)
