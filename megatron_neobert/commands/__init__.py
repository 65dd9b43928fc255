"""Commands that belong to no other package: `preprocess`, `sample-corpus`, `check environment` and `check parity`.

They may import every other package, and no module imports them except `__main__.py`, which lists all commands.
"""
