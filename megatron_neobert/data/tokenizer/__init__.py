"""Tokenizers: loading and checking files, fast back ends, and training of a vocabulary.

Read `tokenizer.py` first: `Tokenizer` is the interface. `files.py` and `sentencepiece_files.py` read files, and
`fast_backends.py` encodes with nanotoken. The package imports no other package of `megatron_neobert.data`.
"""
