"""Settings of a run: their schema, rules between them, phases, files and flags."""
