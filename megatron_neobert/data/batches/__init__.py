"""Global batch k as a function of corpus, seed and batch settings: order, packing, masking and loaders."""
