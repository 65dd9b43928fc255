"""Raw input files to a corpus.

Read `run.py` first: it tokenizes all chunks and joins them. `plan.py` has the settings and cuts the input files into
chunks, `chunks.py` tokenizes one chunk, and `filters.py` applies the user's filters. The package may import
`data.inputs`, `data.tokenizer` and `data.corpus`.
"""
