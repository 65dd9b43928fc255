"""Time that a rank computes in a step, which names the slowest rank of a run."""

import time
from typing import Any

import torch


class StepClock:
    """Measures from the request for a batch until this rank has its gradients: loading, forward and backward.

    Waiting for other replicas is not included, because gradients are reduced afterwards. Waiting for ranks of the same
    replica (tensor, pipeline and context parallelism) is included, so all ranks of a slow replica are slow.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._started = self._stopped = self._now()

    def start(self) -> None:
        """Start the time of a step."""
        self._started = self._now()

    def stop(self) -> None:
        """End the time of the step."""
        self._stopped = self._now()

    def microseconds(self) -> int:
        """Return the time of the last step. On a GPU, the device must have finished the step."""
        if self._on_gpu:
            return round(1e3 * self._started.elapsed_time(self._stopped))
        return round(1e6 * (self._stopped - self._started))

    def _now(self) -> Any:
        """Return the time in seconds, or on a GPU an event, so that the host does not wait for the device."""
        if not self._on_gpu:
            return time.perf_counter()
        # External: also recorded whenever a CUDA graph is launched that it was captured in.
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record()
        return event
