"""Views of runs: the global batch of an iteration, and curves from logs. May import everything except `commands`."""
