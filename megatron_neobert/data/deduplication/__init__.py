"""Shared parts of the searches through finished corpora: MinHash (minhash.py), and jobs and drop lists (search.py).

The searches are the commands find-duplicates and find-overlaps. The package reads corpora with
`megatron_neobert.data.corpus` and imports neither preprocessing nor training.
"""
