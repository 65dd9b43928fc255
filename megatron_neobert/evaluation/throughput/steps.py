"""One timed step: seconds that the device needed, and bytes that the step needed at most.

On a GPU the memory is that of PyTorch's tensors; on a CPU it is by how much the process grew (resident set, Linux).
"""

import ctypes
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

# What other libraries say on a GPU, and PyTorch on a CPU, when memory is at its end.
_NO_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory")


@dataclass(frozen=True)
class Step:
    """Of one model, weights not included in the bytes."""

    seconds: float
    grown_bytes: int


def time_step(step: Callable[[], None], device: torch.device) -> Step:
    """Runs the step once, from an idle device to an idle device."""
    before = _start_memory(device)
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    return Step(seconds, max(0, _peak_memory(device) - before))


def has_memory_for(work: Callable[[], None], device: torch.device) -> bool:
    """Does the work and returns True, or False if memory was at its end, which is free again then.

    Any other error is raised.
    """
    try:
        work()
        return True
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in _NO_MEMORY):
            raise
    # Not in the handler: while the error lives, its traceback holds the tensors.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return False


def _start_memory(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    ctypes.CDLL(None).malloc_trim(0)  # gives the system what was freed but kept for later
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # VmHWM starts anew
    return _own_status("VmRSS")


def _peak_memory(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _own_status("VmHWM")


def _own_status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
