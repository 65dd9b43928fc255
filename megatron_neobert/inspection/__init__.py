"""Views of runs: the batch of an iteration as text, a replay of its losses and gradients, and curves from logs.

The commands are `batch.py`, `replay.py` and `plot.py`; `global_batch.py` rebuilds the batch of an iteration. May import
everything except `commands`.
"""
