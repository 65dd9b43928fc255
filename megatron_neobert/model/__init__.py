"""NeoBERT on Megatron-Core: layers, kernels, initial weights and loss; also the plain reference, FLOPs and GPU peaks.

Imports `config`, `runtime`, `errors` and megatron.core. `reference` and `flops` import no megatron.core. Read
`reference.py` first, which is the model in plain PyTorch, then `neobert.py`.
"""
