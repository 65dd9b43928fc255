"""Batches: order, packing and masking of documents, and the loaders that build batches ahead of training.

Global batch k is a function of corpus, seed and batch settings. Imports `config`, `data.corpus` and `data.tokenizer`.
Read `batch.py` first, then `windows.py` and `packing.py`.
"""
