"""Checkpoints of a run: folders, contents, saving, loading, checks before a start."""
