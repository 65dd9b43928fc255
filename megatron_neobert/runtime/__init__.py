"""Processes and files: launcher environment, store, process groups, signals, Megatron patches, jobs, atomic files.

Imports only `errors`, `text`, `cli` and `config`. Preprocessing uses `atomic_files`, `jobs` and `executors`, which do
not import torch. For training, read `distributed.py` first; for preprocessing, `jobs.py`.
"""
