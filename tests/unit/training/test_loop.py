"""Garbage collections of Python during training."""

import gc

from megatron_neobert.training.loop import collecting_together

STEPS = 25
CYCLES = 2_000  # per step; Python collects after 700 new objects


def test_garbage_is_collected_after_every_tenth_step_only_and_what_the_first_step_left_is_exempt():
    collected: list[int] = []

    def note(phase, details):
        if phase == "start":
            collected.append(step)

    gc.callbacks.append(note)
    try:
        with collecting_together() as collect:
            for step in range(STEPS):
                if step == 0:
                    collected.clear()  # the first step may collect, and its collection is the next
                else:
                    assert not gc.isenabled() and gc.get_freeze_count() > 0
                    for _ in range(CYCLES):
                        cycle: list = []
                        cycle.append(cycle)
                collect()
        assert collected[:3] == [0, 10, 20]
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled() and gc.get_freeze_count() == 0
    gc.freeze()  # as conftest.py does
