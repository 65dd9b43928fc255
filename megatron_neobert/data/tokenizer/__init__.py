"""Tokenizers: loading and checking files, fast back ends, and training of a vocabulary.

Read `tokenizer.py` first: `Tokenizer` is the interface. `files.py` and `sentencepiece_files.py` read files,
`fast_backends.py` encodes with nanotoken, and `train.py` is `neobert train-tokenizer`. Only `train.py`
imports other packages of `megatron_neobert.data`.
"""
