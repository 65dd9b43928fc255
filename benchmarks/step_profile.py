"""What happens within one training step: where the host waits for the GPU, and what the device computes."""

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_WAITED = "called a synchronizing CUDA operation"  # what torch warns of


def find_waits(step: Callable[[], Any]) -> dict[str, int]:
    """Where a step waits for the GPU, by line of Python, and how often; calls named synchronize are not among them."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines = (f"{Path(one.filename).name}:{one.lineno}" for one in caught if _WAITED in str(one.message))
    return dict(Counter(lines))


def profile_step(step: Callable[[], Any], *, on_gpu: bool, rows: int = 30) -> list[dict[str, Any]]:
    """The operations that take longest in a step, those that start no other counted alone.

    Returns:
        Name, calls, milliseconds of the GPU (of the CPU without one) and percent of all, the longest first; on a GPU
        also the calls of CUDA's own functions that wait for it.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as found:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    events = found.key_averages()

    def microseconds(event: Any) -> float:
        return float(event.self_device_time_total if on_gpu else event.self_cpu_time_total)

    total = sum(map(microseconds, events)) or 1.0
    longest = sorted(events, key=microseconds, reverse=True)[:rows]
    waiting = [event for event in events if on_gpu and event.key.startswith("cuda") and "ynchronize" in event.key]
    return [
        {
            "operation": event.key[:100],
            "calls": event.count,
            "ms": microseconds(event) / 1e3,
            "% of all": 100 * microseconds(event) / total,
        }
        for event in dict.fromkeys([*longest, *waiting])
    ]
