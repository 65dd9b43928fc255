"""The loader's steps through an NVIDIA DALI pipeline, which copies them to the GPU ahead of training.

What a batch holds is decided in `data/batches/stream.py`; DALI adds no randomness. One iteration of the
pipeline carries the tensors of one micro-batch, so that a step's first micro-batches are on the GPU while the later
ones are on their way; what is no tensor waits here for its turn. Without a GPU the pipeline runs on the CPU, where it
saves nothing: numbers in docs/performance.md.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from numpy.typing import NDArray

from megatron_neobert.data.batches.loader import Stream, build_loader
from megatron_neobert.data.batches.stream import PackedBatch, StepBatches
from megatron_neobert.errors import ConfigError

_PREFETCHED_MICRO_BATCHES = 2  # one in training, one being copied
_TENSORS = tuple(field.name for field in fields(PackedBatch) if field.type is torch.Tensor)


class DaliLoader:
    """The steps of `build_loader`, bit for bit, from the stream's cursor on, their tensors on `device`.

    Without an end: leave the loop after the last step. A step may be kept for as long as one likes.

    Args:
        device: The CPU, or a GPU by its number.

    Raises:
        ConfigError: DALI is not installed.
    """

    def __init__(self, stream: Stream, *, num_workers: int, device: torch.device) -> None:
        try:  # here, so that it is missed before the first step
            import nvidia.dali  # noqa: F401
        except ModuleNotFoundError as error:
            raise ConfigError(
                "--dataloader-type dali needs the package nvidia-dali-cuda130; install it with "
                "pip install 'megatron-neobert[dali]', or use --dataloader-type torch"
            ) from error
        self.stream = stream
        self.num_workers = num_workers
        self.device = device

    def __iter__(self) -> Iterator[StepBatches]:
        # The worker processes are forked by iter(), before DALI has threads of its own.
        return _copy_ahead(iter(build_loader(self.stream, num_workers=self.num_workers)), self.device)


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
