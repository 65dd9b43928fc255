"""Processes and files: launcher environment, store, process groups, signals, Megatron patches, jobs, atomic files.

Imports `errors`, `text`, `cli` and `config` only. `atomic_files`, `jobs` and `environment` also serve commands without
torch. Read `distributed.py` first for training, `jobs.py` first for preprocessing.
"""
