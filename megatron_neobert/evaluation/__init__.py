"""Evaluations of encoders in Hugging Face folders: GLUE, NER, classification, MTEB, pseudo-perplexity, throughput.

Each evaluation stores finished work (in a ledger, MTEB in mteb's cache) and writes one JSON record per model, which
`report.py` renders.
The package imports neither Megatron nor the training code; of `data`, it imports the readers of input files only.
Read `ledger.py` first, then `models.py`, then `throughput.py`, the shortest evaluation.
"""
