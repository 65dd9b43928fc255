"""Raw input files to a corpus.

Read `run.py` first: it has the settings, cuts the input files into chunks, tokenizes all chunks and joins them.
`chunks.py` tokenizes one chunk, and `filters.py` applies the user's filters. The package may import `data.inputs`,
`data.tokenizer` and `data.corpus`.
"""
