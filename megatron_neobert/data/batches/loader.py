"""Builds batches ahead of training, in worker processes.

One core reads far more tokens than a GPU trains on, so one worker is enough to keep batches off the critical path, and
none is right for tests and small runs. For any number, steps arrive in the same order: worker i of n builds steps
i, i + n, ... and DataLoader asks its workers in turn. Workers run ahead; what a checkpoint stores is therefore the
`cursor_after` of the last step that was trained on.

`build_dali_loader` passes the same steps through an NVIDIA DALI pipeline, which copies them to the GPU ahead. What
a batch holds is decided in `data/batches/stream.py`; DALI adds no randomness. One iteration of the pipeline carries the
tensors of one micro-batch, so that a step's first micro-batches are on the GPU while the later ones are on their way;
what is no tensor waits here for its turn. Without a GPU the pipeline runs on the CPU, where it saves nothing: numbers
in docs/performance.md.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from megatron_neobert.data.batches.stream import PackedBatch, StepBatches
from megatron_neobert.errors import ConfigError, NeoBERTError, WorkerError, short_reason

_PREFETCHED_MICRO_BATCHES = 2  # one in training, one being copied
_TENSORS = tuple(field.name for field in fields(PackedBatch) if field.type is torch.Tensor)


class Stream(Protocol):
    """Source of steps: a BatchStream, or all phases of a run."""

    def steps(self, *, first: int = 0, every: int = 1) -> Iterator[StepBatches]:
        """Steps first, first + every, ..."""


class _Steps(IterableDataset[StepBatches]):
    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        """Yield a worker's steps, then its error as a value, since DataLoader would raise the error as a traceback."""
        worker = get_worker_info()
        if worker is None:
            yield from self.stream.steps()
            return
        try:
            yield from self.stream.steps(first=worker.id, every=worker.num_workers)
        except NeoBERTError as error:
            yield error


def _checked(steps: Iterator[Any]) -> Iterator[StepBatches]:
    for step in steps:
        if isinstance(step, NeoBERTError):
            raise step
        yield step


@contextmanager
def named_worker_deaths() -> Iterator[None]:
    """Raise WorkerError in place of DataLoader's RuntimeError when a loader process is killed inside the block.

    DataLoader reports the death from a handler of SIGCHLD, so the error can come from any line of the training loop.
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


def build_loader(stream: Stream, *, num_workers: int) -> Iterator[StepBatches]:
    """Start the workers, and return the steps of `stream`, pinned for asynchronous copies where CUDA is present.

    Without an end: leave the loop after the last step. A NeoBERTError of a worker is raised when its step is due. For
    killed workers see `named_worker_deaths`.
    """
    loader = DataLoader(
        _Steps(stream),
        batch_size=None,
        num_workers=num_workers,
        worker_init_fn=partial(_leave_the_run_alone, parent=os.getpid()) if num_workers else None,
        pin_memory=torch.cuda.is_available(),
    )
    return _checked(iter(loader))


def _leave_the_run_alone(worker: int, *, parent: int) -> None:
    """Detach a forked worker: close inherited sockets, ignore stop signals, exit with the parent.

    A forked worker inherits the parent's sockets, those that listen too: they would outlive the parent, and strangers'
    connections would wait in them unseen.

    torchrun and Slurm send their stop signals to every process of a job. The trainer answers by finishing its step and
    saving; a worker that died of the same signal would make DataLoader raise in the middle of that.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for connection in psutil.Process().net_connections("inet"):
        os.dup2(nothing, connection.fd)  # not closed: an object of the parent's may close the number later
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    """Ends this process at its parent's signal, or within a second of its parent's end.

    DataLoader's own watch does not suffice: a worker that is sending a batch when its parent is killed waits for ever,
    because its siblings hold the other end of the pipe open.
    """
    while os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, 1.0)
        if received and received.si_pid == parent:
            break
    os._exit(0)


# Batches travel from worker to trainer as bytes. torch's default puts every tensor into shared memory, which takes a
# file descriptor each (4 per micro-batch, often limited to 1,024 in all) and room in /dev/shm (64 MiB in a container).
def _reduce_packed_batch(batch: PackedBatch) -> tuple[Any, tuple[Any]]:
    def to_array(value: Any) -> Any:
        return value.numpy() if isinstance(value, torch.Tensor) else value

    return _rebuild_packed_batch, ({name: to_array(value) for name, value in vars(batch).items()},)


def _rebuild_packed_batch(values: dict[str, Any]) -> PackedBatch:
    def to_tensor(value: Any) -> Any:
        return torch.from_numpy(value) if isinstance(value, np.ndarray) else value

    return PackedBatch(**{name: to_tensor(value) for name, value in values.items()})


ForkingPickler.register(PackedBatch, _reduce_packed_batch)


# --- DALI


def build_dali_loader(stream: Stream, *, num_workers: int, device: torch.device) -> Iterator[StepBatches]:
    """Return the steps of `build_loader`, bit for bit, their tensors on `device`: the CPU, or a GPU by its number.

    Without an end: leave the loop after the last step. A step may be kept for as long as one likes.

    Raises:
        ConfigError: DALI is not installed.
    """
    try:  # here, so that it is missed before the first step
        import nvidia.dali  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--dataloader-type dali needs the package nvidia-dali-cuda130; install it with "
            "pip install 'megatron-neobert[dali]', or use --dataloader-type torch"
        ) from error
    # The worker processes are forked before DALI has threads of its own.
    return _copy_ahead(build_loader(stream, num_workers=num_workers), device)


def _copy_ahead(steps: Iterator[StepBatches], device: torch.device) -> Iterator[StepBatches]:
    in_flight: deque[StepBatches] = deque()

    def next_tensors() -> Iterator[list[list[NDArray[Any]]]]:
        for step in steps:
            in_flight.append(step)
            for batch in step.micro_batches:
                # Each a batch of one sample. Arrays: DALI asks for a CUDA stream wherever it is given a torch tensor.
                yield [[getattr(batch, name).numpy()] for name in _TENSORS]

    pipeline = _build_pipeline(next_tensors(), device)
    while True:
        first = _run(pipeline)  # calls next_tensors ahead, and with it fills in_flight
        step = in_flight.popleft()
        tensors = [first, *(_run(pipeline) for _ in step.micro_batches[1:])]
        batches = [replace(batch, **values) for batch, values in zip(step.micro_batches, tensors, strict=True)]
        yield replace(step, micro_batches=batches)


def _build_pipeline(source: Iterator[list[list[NDArray[Any]]]], device: torch.device) -> Any:
    from nvidia.dali import Pipeline, fn

    on_gpu = device.type == "cuda"
    pipeline = Pipeline(
        batch_size=1,
        num_threads=1,
        device_id=device.index if on_gpu else None,
        prefetch_queue_depth=_PREFETCHED_MICRO_BATCHES,
        exec_dynamic=True,  # its outputs are the caller's: their memory is used again only when he has let go of it
    )
    with pipeline:
        outputs = fn.external_source(source, num_outputs=len(_TENSORS), batch=True)
        pipeline.set_outputs(*(output.gpu() if on_gpu else output for output in outputs))
    return pipeline


def _run(pipeline: Any) -> dict[str, Any]:
    """The tensors of the next micro-batch by name, without a copy of what DALI has written."""
    outputs = pipeline.run()
    return {name: torch.from_dlpack(output[0]) for name, output in zip(_TENSORS, outputs, strict=True)}
