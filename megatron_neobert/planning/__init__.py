"""The plan of a run that --dry-run prints: data, memory, network, time and disk, computed without torch or a GPU.

May import `checkpoint`, `data`, `model` and `config`. Read `plan.py` first, which formats the plan. `forecast.py`
computes the figures of a phase, `memory.py` the memory of a rank, and `network.py` its communication. In all modules,
`vocab_size` is the number of tokens without padding, and `stage` is a pipeline stage, counted from 0.
"""
