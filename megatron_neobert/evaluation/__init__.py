"""Evaluations of encoders in Hugging Face folders, with one ledger of finished work and one report."""
