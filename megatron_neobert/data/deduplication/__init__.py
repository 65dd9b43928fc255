"""Near-duplicates of finished corpora, found by MinHash and written as a drop list.

minhash.py has the method, without input or output; run.py finds the clusters. The package reads corpora with
`megatron_neobert.data.corpus` and imports neither preprocessing nor training. Read minhash.py first.
"""
