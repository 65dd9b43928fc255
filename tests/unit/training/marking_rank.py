"""A rank that calls the hang detector like a training loop. In iteration 3, rank 1 fails in the way given in argv."""

import os
import signal
import sys
import time

import torch

from megatron_neobert.config.schema import ParallelConfig
from megatron_neobert.training import hang_detector, heartbeats
from megatron_neobert.training.hang_detector import HangDetector


def fail(how: str) -> None:
    if how == "sleep":
        time.sleep(300)
    if how == "raise":
        raise ValueError("planted")
    if how == "raise and stay":
        raise ValueError("planted\x1b]0;owned\x07")
    if how in ("stop", "kill"):
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)


def keep_connections(detector: HangDetector) -> None:
    """Keep the process alive until rank 0 has ended, so that rank 0 does not lose a connection."""
    until = time.monotonic() + 60
    while not any(beat.ended for beat in detector.heartbeats.read() if beat.rank == 0):
        if time.monotonic() > until:
            print("rank 0 has not ended")
            return
        time.sleep(0.1)


def run(detector: HangDetector, activity: str, how: str, iterations: int) -> None:
    with detector:
        for iteration in range(1, iterations + 1):
            fails = os.environ["RANK"] == "1" and iteration == 3
            detector.mark("waiting for data", iteration)
            if how == "slow":
                time.sleep(0.5)
            if how == "print":
                hang_detector.ANSWER_SECONDS = heartbeats.ANSWER_SECONDS = 0.5
                while True:
                    print("x" * 1000)
            if fails and activity == "data":
                fail(how)
            detector.mark("training", iteration)
            detector.tick()
            while fails and not any(
                beat.rank == 1 and "iteration 3" in beat.position for beat in detector.heartbeats.read()
            ):
                time.sleep(0.05)
            if fails and activity == "training":
                fail(how)
            detector.tick()
            torch.distributed.all_reduce(torch.ones(1))


def main() -> None:
    activity, how, minutes, iterations = sys.argv[1:]
    # Shorter than in a run, so that tests are faster.
    hang_detector._TICK_SECONDS, heartbeats.SILENCE_SECONDS, hang_detector._FAREWELL_SECONDS = 0.2, 2.0, 1.0
    os.environ["TORCH_FR_BUFFER_SIZE"] = "16"  # as in a run
    heartbeats._SILENT_CALLS = 40
    torch.distributed.init_process_group("gloo")
    detector = HangDetector(ParallelConfig(distributed_timeout_minutes=float(minutes)))
    try:
        run(detector, activity, how, int(iterations))
    except ValueError:
        if how == "raise and stay":
            keep_connections(detector)
        raise
    torch.distributed.destroy_process_group()
    print("finished")
