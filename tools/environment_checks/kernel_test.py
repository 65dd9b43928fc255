"""Computes on every device for real, in child processes: each alone, then all together over NCCL (or gloo on CPU)."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from environment_checks.collect import HERE, start_python, wait_for
from environment_checks.facts import OK, PROBLEM, Facts, Finding

SOURCE = (HERE / "kernel_child.py").read_text(encoding="utf-8")


def try_devices(facts: Facts) -> list[Finding]:
    """On all GPUs that torch reaches."""
    if not facts.torch.gpus:
        return [Finding(PROBLEM, "--gpu-test", "there is no GPU to test", "see above, or leave the flag out")]
    count = len(facts.torch.gpus)
    found = [finding for index in range(count) for finding in compute_on(f"cuda:{index}")]
    return found + sum_over(count, backend="nccl")


def compute_on(device: str) -> list[Finding]:
    """The results of one device; if its process dies, why."""
    output, end = wait_for(start_python(SOURCE, "compute", device))
    return results_of(output, end, device)


def sum_over(ranks: int, *, backend: str) -> list[Finding]:
    """One process per rank; rank 0's answer, or the first that failed."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        children = [
            start_python(SOURCE, "collective", backend, str(rank), str(ranks), meeting) for rank in range(ranks)
        ]
        ended = [wait_for(child) for child in children]
    output, end = next((one for one in ended if one[1]), ended[0])
    return results_of(output, end, "all")


def results_of(output: str, end: str, device: str) -> list[Finding]:
    answers = [json.loads(line[1:]) for line in output.splitlines() if line.startswith("@[")]
    found = [
        Finding(
            OK if well else PROBLEM,
            f"{device}: {name}",
            words,
            "" if well else "see nvidia-smi -q and the driver's log",
        )
        for name, well, words in answers
    ]
    if end:
        found.append(Finding(PROBLEM, device, f"its process failed: {end}", "see nvidia-smi -q and the driver's log"))
    return found
