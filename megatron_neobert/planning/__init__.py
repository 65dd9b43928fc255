"""The plan of a run that --dry-run prints: data, memory, network, time and disk, computed without torch or a GPU.

May import `checkpoint`, `data`, `model` and `config`. Read `plan.py` first; `memory.py` computes the memory of a rank,
`network.py` its communication, and `scaling.py` formats time and price by number of GPUs.
"""
