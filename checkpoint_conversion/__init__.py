"""Conversion of checkpoints to Hugging Face folders or ONNX graphs and back; every result is compared with its source.

May import config, data, model, checkpoint, huggingface and runtime.
Read mapping.py first (names and shapes), then export.py and compare.py (the comparison).
"""
