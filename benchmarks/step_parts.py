"""What benchmark_step.py measures of a step besides its time: where the time goes, memory, and peaks of processors.

The clock is switched from part to part by hooks, in the forward pass when a module is entered and left, in the backward
pass when the gradient of its output and of its input is complete. On a GPU it stamps events into the stream, so
nothing waits; on a CPU it counts the process's CPU seconds.
"""

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_neobert.model.gpus import find_gpu

PARTS = ("embedding", "attention", "feed-forward", "head and loss", "optimizer", "rest")


def find_peak_tflops(device: torch.device, *, bf16: bool) -> float | None:
    """The processor's peak, if it is a GPU that is known and computes in bfloat16."""
    if device.type != "cuda" or not bf16:
        return None
    gpu = find_gpu(torch.cuda.get_device_name(device))
    return None if gpu is None else gpu.bf16_tflops


# ---- parts


class Clock:
    """A time line of the parts of a step."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.stamps: list[tuple[str, Any]] = []

    def switch(self, part: str) -> None:
        """From now on, time goes to `part`."""
        stamp: Any = time.process_time()
        if self.on_gpu:
            stamp = torch.cuda.Event(enable_timing=True)
            stamp.record()
        self.stamps.append((part, stamp))

    def shares(self) -> dict[str, float]:
        """Each part's share of the time between the first switch and the last."""
        if self.on_gpu:
            torch.cuda.synchronize()
        seconds = dict.fromkeys(PARTS, 0.0)
        for (part, start), (_, end) in zip(self.stamps, self.stamps[1:], strict=False):
            seconds[part] += start.elapsed_time(end) if self.on_gpu else end - start
        total = sum(seconds.values())
        return {part: value / total for part, value in seconds.items()}


def measure_parts(run: Any, step: Callable[[], object]) -> dict[str, float]:
    """Shares of one training step of `run`, which has the whole model on one rank."""
    clock = Clock(run.device)
    (model,) = run.unwrapped_models
    spans = [("embedding", model.embedding, model.embedding), ("head and loss", model.output_layer, model)]
    for layer in model.decoder.layers:
        # The norm before each part belongs to it: Transformer Engine fuses them.
        spans.append(("attention", layer.input_layernorm, layer.self_attention))
        spans.append(("feed-forward", layer.pre_mlp_layernorm, layer.mlp))
    handles = [handle for span in spans for handle in _watch(clock, *span)]
    # Token ids have no gradient that would tell when the embedding's backward pass is over; its weight has.
    weight = model.embedding.word_embeddings.weight
    handles.append(weight.register_post_accumulate_grad_hook(lambda _: clock.switch("rest")))
    handles.append(model.register_forward_pre_hook(lambda *_: clock.switch("rest")))

    optimizer = run.optimizer
    first, last = optimizer.prepare_grads, optimizer.step_with_ready_grads

    def timed_first() -> Any:
        clock.switch("optimizer")
        return first()

    def timed_last() -> Any:
        result = last()
        clock.switch("rest")
        return result

    optimizer.prepare_grads, optimizer.step_with_ready_grads = timed_first, timed_last
    clock.switch("rest")
    step()
    clock.switch("rest")
    optimizer.prepare_grads, optimizer.step_with_ready_grads = first, last
    for handle in handles:
        handle.remove()
    return clock.shares()


def _watch(clock: Clock, part: str, first: torch.nn.Module, last: torch.nn.Module) -> tuple[Any, Any]:
    """Has the clock run for `part` from the input of `first` to the output of `last`, forward and backward."""

    def enter(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        for tensor in _with_gradient(inputs):
            tensor.register_hook(lambda _: clock.switch("rest"))
        clock.switch(part)

    def leave(module: torch.nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
        for tensor in _with_gradient(outputs if isinstance(outputs, tuple) else (outputs,)):
            tensor.register_hook(lambda _: clock.switch(part))
        clock.switch("rest")

    return first.register_forward_pre_hook(enter), last.register_forward_hook(leave)


def _with_gradient(values: tuple[Any, ...]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]


# ---- memory


class Memory:
    """Bytes that each of several models holds and needs, which take turns: torch's tensors on a GPU; on a CPU, by how
    much the process grows (resident set, Linux)."""

    def __init__(self, *, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.held_by: dict[str, int] = {}
        self.peak_bytes = 0  # most during the last watch, of the model that was watched

    @contextmanager
    def watch(self, side: str) -> Iterator[None]:
        """What is allocated meanwhile belongs to `side`."""
        before, own = self._held(), self.held_by.get(side, 0)
        self._reset_peak()
        yield
        self.peak_bytes = own + self._peak() - before
        self.held_by[side] = own + self._held() - before

    def _held(self) -> int:
        if self.on_gpu:
            return torch.cuda.memory_allocated()
        ctypes.CDLL(None).malloc_trim(0)  # gives the system what was freed but kept for later
        return _own_status("VmRSS")

    def _reset_peak(self) -> None:
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # VmHWM starts anew

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.on_gpu else _own_status("VmHWM")


def _own_status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
