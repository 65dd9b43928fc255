"""A training loop without training: a rank that sets marks, and in iteration 3 rank 1 fails as argv says."""

import os
import signal
import sys
import time

import torch

from megatron_neobert.config.schema import ParallelConfig
from megatron_neobert.training import hang_detector
from megatron_neobert.training.hang_detector import HangDetector


def fail(how: str) -> None:
    if how == "sleep":
        time.sleep(300)
    if how == "raise":
        raise ValueError("planted")
    if how in ("stop", "kill"):
        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)


def main() -> None:
    place, how, minutes, iterations = sys.argv[1:]
    # Faster than in a run.
    hang_detector._TICK_SECONDS, hang_detector._SILENCE_SECONDS, hang_detector._FAREWELL_SECONDS = 0.2, 2.0, 1.0
    torch.distributed.init_process_group("gloo")
    with HangDetector(ParallelConfig(distributed_timeout_minutes=float(minutes))) as detector:
        for iteration in range(1, int(iterations) + 1):
            fails = os.environ["RANK"] == "1" and iteration == 3
            detector.mark("waiting for data", iteration)
            if how == "slow":
                time.sleep(0.5)
            if how == "print":
                hang_detector._ANSWER_SECONDS = 0.5
                while True:
                    print("x" * 1000)
            if fails and place == "data":
                fail(how)
            detector.mark("training", iteration)
            detector.tick()
            while fails and max(beat.iteration for beat in detector._read() if beat.rank == 1) < 3:
                time.sleep(0.05)
            if fails and place == "training":
                fail(how)
            detector.tick()
            torch.distributed.all_reduce(torch.ones(1))
    torch.distributed.destroy_process_group()
    print("finished")
