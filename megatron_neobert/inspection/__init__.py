"""Views for people: the batch of an iteration as text, and the curves of runs."""
