"""Benchmarks behind the figures on speed and memory in the documentation, with other tools for comparison.

Each `benchmark_*.py` and `speedrun.py` is a command; `shared.py` has the code that they share.
"""
