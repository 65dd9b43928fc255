"""Near-duplicates of finished corpora by MinHash, as a drop list."""
