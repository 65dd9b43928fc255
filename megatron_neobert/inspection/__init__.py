"""Views of runs: the batch of an iteration as text, a replay of its losses and gradients, and curves from logs.

The commands are `batch.py`, `replay.py` and `plot.py`; read `global_batch.py` first. May import everything except
`commands`.
"""
