"""Random weights that make every part of a NeoBERT matter.

Freshly initialised weights are a poor test: logits of 0.05 hide errors, attention is almost uniform whatever the
rotary convention, and norms of one and biases of zero do nothing. These are larger and no two alike.
"""

import torch

from megatron_neobert.model.reference import ReferenceConfig, ReferenceNeoBERT


def build_loud_reference(config: ReferenceConfig, *, seed: int = 0) -> ReferenceNeoBERT:
    """A reference model whose matrices keep the variance of what they multiply; logits reach several units."""
    torch.manual_seed(seed)
    model = ReferenceNeoBERT(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        elif parameter.dim() == 1:
            parameter.data.normal_(std=0.5)
        else:
            spread = 1.0 if name == "model.encoder.weight" else parameter.shape[1] ** -0.5
            parameter.data.normal_(std=spread)
        if name.endswith("qkv.weight"):
            parameter.data.mul_(2.0)  # attention that prefers some tokens clearly
    return model
