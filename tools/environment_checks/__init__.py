"""What tools/check_environment.py knows: how to look at a machine, and what is known to go wrong on one.

Everything here runs where nothing works yet: standard library only, also on a Python that is too old for the project,
and whatever may crash on import is imported in a child process.
"""
