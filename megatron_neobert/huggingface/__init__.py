"""The NeoBERT model for transformers, and checks of Hugging Face folders.

modeling_neobert.py is copied into exported folders, so it imports torch and transformers only. The other two files are
not exported: checks.py inspects a folder without transformers, and auto_classes.py registers the model. Read checks.py
first.
"""
