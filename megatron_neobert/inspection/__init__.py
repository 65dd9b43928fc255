"""What a person looks at: the batch of an iteration as text or as a page, and the curves of runs."""
