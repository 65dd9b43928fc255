"""Writes the tensors of a checkpoint in threads of the training processes, with one outcome for all ranks.

The plan (which rank writes which part of which tensor, and where it lies) is megatron.core's, and so are the files. The
writing is done here, for two reasons. megatron.core 0.16.1 forks processes that write; one that dies leaves its rank
waiting for ever. And where one rank alone meets an error (rank 0 writes two files that the others do not), the others
wait for it in a collective. Here every rank writes as far as it can, and then all of them hear how all of them fared.
"""

import inspect
import io
import queue
import socket
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)

from megatron_neobert.environment import is_rank_zero
from megatron_neobert.training.checkpoint_files import Fingerprint, fingerprint_of

_WRITERS = 2  # threads, and files, per rank: as megatron.core's default

# The planner wants a queue for the results of forked writers, and would start a process to hold it (2.5 s).
filesystem_async._results_queue = queue.Queue()


@dataclass
class Part:
    """What one rank has written: its places in the table of contents, its files, and what went wrong."""

    places: list[Any] = field(default_factory=list)
    files: dict[str, Fingerprint] = field(default_factory=dict)
    problem: str | None = None


class TensorWriter:
    """This rank's part of one checkpoint, on its way to disk.

    Args:
        state: Megatron's sharded state of the run.
        folder: Where to; exists.

    Collective: all ranks.
    """

    def __init__(self, state: Mapping[str, Any], folder: Path) -> None:
        self.folder = folder
        sharded, common = save_preprocess(state)
        grouped, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
        self._storage = FileSystemWriterAsync(folder, thread_count=_WRITERS)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        (_, self._table, _), *_ = save_state_dict_async_plan(  # collective: all ranks
            mcore_to_pyt_state_dict(grouped, False), self._storage, None, 0, planner=planner
        )
        if is_rank_zero():
            del self._table.all_local_plans  # what megatron.core's own cache would need
        buffer = io.BytesIO()
        torch.save(common, buffer)
        self._common = buffer.getvalue()
        self._buckets = self._storage.write_buckets or []
        self._written: list[Future[tuple[list[Any], Fingerprint]]] = []

    def tensors_not_finite(self) -> list[str]:
        """Names of those in this rank's part."""
        return sorted(
            item.index.fqn
            for _, _, (_, tensors) in self._buckets
            for item, tensor in tensors
            if tensor.is_floating_point() and not tensor.isfinite().all()
        )

    def start(self, *, copy: bool) -> None:
        """Begins to write and returns at once.

        Args:
            copy: Write from a copy, so that the state may change from now on.
        """
        self._buckets = [_on_host(bucket, copy=copy) for bucket in self._buckets]
        threads = ThreadPoolExecutor(_WRITERS, thread_name_prefix="checkpoint")
        self._written = [threads.submit(_write, self._storage, bucket) for bucket in self._buckets]
        threads.shutdown(wait=False)

    @property
    def is_busy(self) -> bool:
        """Whether this rank is still writing."""
        return not all(written.done() for written in self._written)

    def wait(self) -> Part:
        """Waits until this rank's files are on disk, or cannot be."""
        part = Part()
        for (_, name, _), written in zip(self._buckets, self._written, strict=True):
            try:
                places, part.files[name] = written.result()
                part.places += places
            except Exception as error:  # whatever it is, the other ranks have to hear of it
                part.problem = describe_problem(error)
        self._buckets = []
        return part

    def write_tables(self, parts: list[Part]) -> None:
        """Writes what the files of all ranks together mean; on rank 0 alone."""
        (self.folder / COMMON_STATE_FNAME).write_bytes(self._common)
        self._storage.finish(self._table, [part.places for part in parts])
        save_config(CheckpointingConfig("torch_dist", 1), str(self.folder))


def describe_problem(error: BaseException) -> str:
    """An error as the other ranks should hear of it.

    Where a write fails, torch's writer complains that it could not end its file; the cause lies below that.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    text = str(cause) if cause is not None else f"{type(error).__name__}: {error}"
    return f"rank {torch.distributed.get_rank()} on {socket.gethostname()}: {text}"


def first_problem(problem: str | None) -> str | None:
    """That of the lowest rank that has one, the same on all ranks. Collective: all ranks."""
    problems: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(problems, problem)
    return next((text for text in problems if text is not None), None)


def _on_host(bucket: Any, *, copy: bool) -> Any:
    path, name, (objects, tensors) = bucket
    return path, name, (objects, [(item, tensor.to("cpu", copy=copy)) for item, tensor in tensors])


def _write(storage: FileSystemWriterAsync, bucket: Any) -> tuple[list[Any], Fingerprint]:
    """One file, written and synced by megatron.core's function for a process of its own, and what it has to be."""
    results: queue.Queue[tuple[int, Any]] = queue.Queue()
    unfinished: queue.Queue[int] = queue.Queue()
    unfinished.put(0)
    # Unwrapped: it switches garbage collection off, which is meant for a forked process.
    write = inspect.unwrap(FileSystemWriterAsync.write_preloaded_data)
    write([storage.transforms], 0, bucket, results, unfinished, use_fsync=True)
    _, outcome = results.get()
    if isinstance(outcome, Exception):
        raise outcome
    assert isinstance(outcome, list), f"{type(outcome)=}"
    return outcome, fingerprint_of(Path(bucket[0]))
