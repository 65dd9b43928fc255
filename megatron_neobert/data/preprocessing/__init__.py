"""Raw input files to a corpus.

Read `run.py` first: it tokenizes all chunks and joins them. `plan.py` has the settings and cuts the input files into
chunks, `chunks.py` tokenizes one chunk, and `filters.py` applies the user's filters. `add_attributes.py` calls a
function with the documents of a finished corpus. The package may import `data.inputs`, `data.tokenizer` and
`data.corpus`.
"""
