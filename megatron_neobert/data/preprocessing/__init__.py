"""Raw input files to a corpus.

`run.py` has the settings, cuts the input files into chunks, tokenizes all chunks and joins them; `filters.py` applies
the user's filters. The package may import `data.inputs`, `data.tokenizer` and `data.corpus`.
"""
