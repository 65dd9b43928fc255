"""Settings of a training run: schema, rules, phases, YAML files, flags, and `--data-path`.

Imports the standard library and PyYAML only, so that `--help` and a refused start take milliseconds. Start with
`schema.py`, which declares every setting; `cli.py` reads settings, and `rules.py` checks them against each other.
"""
