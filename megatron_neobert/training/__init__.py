"""The training loop: setup, training step, optimizer, skipped updates, logs, hang detection.

Imports `config`, `data`, `model`, `runtime`, `checkpoint` and `state`. Read `loop.py` first, then `step.py`.
"""
