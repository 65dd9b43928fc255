"""The plan of a run that --dry-run prints: data, memory, time and disk, computed without torch or a GPU.

May import `checkpoint`, `data`, `model` and `config`. Read `plan.py` first; `memory.py` computes the memory of a rank.
"""
