"""NeoBERT on Megatron-Core, its plain reference, and what follows from its shape: weights, kernels, FLOPs."""
