"""Checkpoints of a run: files and folders, contents, saving, loading, and checks before a start.

folder.py and start.py need no torch; contents.py needs torch; save.py and load.py need megatron.core and a process
group. Nothing outside of training is imported. Read folder.py first, then save.py and load.py.
"""
