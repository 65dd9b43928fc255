"""Loaders: build batches ahead of training in worker processes, and optionally copy them to the GPU with NVIDIA DALI.

One core reads far more tokens than a GPU trains on, so one worker keeps loading off the critical path; tests and small
runs use none. Rank batches arrive in the same order for any number of workers: worker i of n builds the rank batches of
iterations i, i + n, ..., and DataLoader takes from its workers in turn. Workers run ahead of training, so a checkpoint
stores the `cursor_after` of the last iteration that was trained.

`build_dali_loader` passes the rank batches of `build_loader` through a DALI pipeline, which adds no randomness. One
iteration of the pipeline has the tensors of one micro-batch, so a step can begin while its later micro-batches are
still being copied. Without a GPU the pipeline runs on the CPU, where it saves no time (measurements:
docs/performance.md).
"""

import gc
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import psutil
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from megatron_neobert.data.batches.batch import BatchStream, MicroBatch, RankBatches
from megatron_neobert.errors import ConfigError, NeoBERTError, WorkerError, short_reason

_PREFETCHED_MICRO_BATCHES = 2  # one in training, one being copied
_TENSORS = tuple(field.name for field in fields(MicroBatch) if field.type is torch.Tensor)


class _WorkerBatches(IterableDataset[RankBatches]):
    def __init__(self, stream: BatchStream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        """Yield this worker's batches. An error is yielded, not raised, because DataLoader would add a traceback."""
        worker = get_worker_info()
        assert worker is not None
        try:
            yield from self.stream.rank_batches(first=worker.id, every=worker.num_workers)
        except NeoBERTError as error:
            yield error


def _raise_errors(batches: Iterator[Any]) -> Iterator[RankBatches]:
    for batch in batches:
        if isinstance(batch, NeoBERTError):
            raise batch
        yield batch


@contextmanager
def named_worker_deaths() -> Iterator[None]:
    """Context manager: replace DataLoader's RuntimeError for a killed or crashed loader process with a WorkerError.

    DataLoader raises from a SIGCHLD handler, so the error can come at any line of the training loop.
    """
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):
            raise
        raise WorkerError(
            f"a process that loads data was killed or crashed ({short_reason(error)}). The system kills processes "
            "when memory runs out: look at dmesg, lower --num-workers, and start again with the same command."
        ) from error


def build_loader(stream: BatchStream, *, num_workers: int) -> Iterator[RankBatches]:
    """Start the workers, and return an endless iterator over the rank batches of `stream`, in order.

    Tensors are on the CPU, in pinned memory if CUDA is available. The workers end with this process or when the
    iterator is deleted. With num_workers 0, this process builds each rank batch when it is requested.
    """
    if not num_workers:
        batches = stream.rank_batches()
        return map(RankBatches.pin_memory, batches) if torch.cuda.is_available() else batches
    loader = DataLoader(
        _WorkerBatches(stream),
        batch_size=None,
        num_workers=num_workers,
        worker_init_fn=partial(_detach_worker, parent=os.getpid()),
        pin_memory=torch.cuda.is_available(),
    )
    # A worker that collected an unused pipeline of DALI would wait forever for the pipeline's threads, which are not
    # copied by a fork.
    gc.collect()
    return _raise_errors(iter(loader))


def _detach_worker(worker: int, *, parent: int) -> None:
    """Replace the network sockets that a forked worker inherited, ignore stop signals, and exit with the parent.

    Inherited listening sockets would outlive the parent. torchrun and Slurm send stop signals to every process of a
    job; the trainer finishes its step and saves, but a worker's death would interrupt it with a DataLoader error.
    """
    devnull = os.open(os.devnull, os.O_RDWR)
    for connection in psutil.Process().net_connections("inet"):
        # Not closed, because an inherited object may close the same number later.
        os.dup2(devnull, connection.fd)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()


def _exit_with_parent(parent: int) -> None:
    """Wait until the parent sends SIGTERM or ends (noticed within a second), then exit this process with status 0.

    DataLoader's watchdog does not suffice: a worker that is sending a batch when its parent is killed waits forever,
    because other workers keep the read end of the pipe open.
    """
    while os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, 1.0)
        if received and received.si_pid == parent:
            break
    os._exit(0)


# Batches travel from worker to trainer as bytes. torch's default puts every tensor into shared memory, which takes a
# file descriptor each (4 per micro-batch, often limited to 1,024 in all) and space in /dev/shm (64 MiB in a container).
def _reduce_micro_batch(batch: MicroBatch) -> tuple[Any, tuple[Any, ...]]:
    arrays = {name: getattr(batch, name).numpy() for name in _TENSORS}
    others = {name: value for name, value in vars(batch).items() if name not in arrays}
    return _rebuild_micro_batch, (arrays, others)


def _rebuild_micro_batch(arrays: dict[str, NDArray[Any]], others: dict[str, Any]) -> MicroBatch:
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return MicroBatch(**tensors, **others)


ForkingPickler.register(MicroBatch, _reduce_micro_batch)


# --- DALI


def build_dali_loader(stream: BatchStream, *, num_workers: int, device: torch.device) -> Iterator[RankBatches]:
    """Return an iterator over the same rank batches as `build_loader`, with their tensors on `device`.

    The device is the CPU or a GPU with an index. The tensors of rank batches stay valid for as long as the caller keeps
    them. Raise ConfigError if DALI is not installed.
    """
    # Imported here, so that the error comes before the first step.
    try:
        import nvidia.dali  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--dataloader-type dali needs the package nvidia-dali-cuda130. Install it with "
            "pip install 'megatron-neobert[dali]', or use --dataloader-type torch."
        ) from error
    # Worker processes are forked before DALI starts threads.
    return _copy_ahead(build_loader(stream, num_workers=num_workers), device)


def _copy_ahead(rank_batches: Iterator[RankBatches], device: torch.device) -> Iterator[RankBatches]:
    from nvidia.dali import Pipeline, fn

    # Rank batches whose tensors are in the pipeline. Their other fields wait here.
    in_flight: deque[RankBatches] = deque()

    def next_tensors() -> Generator[list[list[NDArray[Any]]]]:
        for batches in rank_batches:
            in_flight.append(batches)
            for batch in batches.micro_batches:
                # For DALI, every array is a batch of one sample. DALI would require a CUDA stream for torch tensors.
                yield [[getattr(batch, name).numpy()] for name in _TENSORS]

    def next_micro_batch() -> dict[str, Any]:
        # The tensors share memory with DALI's outputs.
        return {name: torch.from_dlpack(output[0]) for name, output in zip(_TENSORS, pipeline.run(), strict=True)}

    on_gpu = device.type == "cuda"
    pipeline = Pipeline(
        batch_size=1,
        num_threads=1,
        device_id=device.index if on_gpu else None,
        prefetch_queue_depth=_PREFETCHED_MICRO_BATCHES,
        exec_dynamic=True,  # memory of an output is reused only after the caller has released it
    )
    # The pipeline and its source are in a reference cycle. If DataLoader's iterator were collected with them, it would
    # wait five seconds for each worker, because Python closes its queues to the workers first.
    with closing(next_tensors()) as arrays:
        with pipeline:
            outputs = fn.external_source(arrays, num_outputs=len(_TENSORS), batch=True)
            pipeline.set_outputs(*(output.gpu() if on_gpu else output for output in outputs))
        while True:
            # The first run calls next_tensors ahead, which fills in_flight.
            first = next_micro_batch()
            batches = in_flight.popleft()
            tensors = [first, *(next_micro_batch() for _ in batches.micro_batches[1:])]
            copied = [replace(batch, **values) for batch, values in zip(batches.micro_batches, tensors, strict=True)]
            yield replace(batches, micro_batches=copied)
