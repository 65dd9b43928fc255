"""From raw input files to the global batches of training; one folder per step, none imports training code."""
