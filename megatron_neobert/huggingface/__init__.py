"""The NeoBERT model for transformers, and checks of Hugging Face folders.

modeling_neobert.py is copied into exported folders, so it imports torch and transformers only. The other files are
not exported: checks.py inspects a folder without transformers, auto_classes.py registers the model, and hub.py finds
the folder of a model of the Hub. Read checks.py first.
"""
