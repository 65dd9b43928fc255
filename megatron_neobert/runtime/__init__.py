"""Processes of a run: launching, the store, process groups, signals, patches of Megatron, files written atomically."""
