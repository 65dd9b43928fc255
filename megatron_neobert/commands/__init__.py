"""One module for each first word of a command: `neobert evaluate glue` runs `evaluate_glue` in evaluate.py.

A module has the options of its commands, unless a library function takes them as its settings, and what the commands
print. The computation is in the package of its subject. Commands may import every other package, and no module imports
them except `__main__.py`, which lists all commands.
"""
