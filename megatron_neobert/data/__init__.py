"""Data path from raw input files to global batches: one folder per step, none of which imports training code."""
