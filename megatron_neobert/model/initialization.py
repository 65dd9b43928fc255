"""Initial weights: uniform(-range, range), identical in every parallel layout.

Each rank draws every parameter at its full size, from a generator seeded by the run's seed and the parameter's name,
and keeps its shard. Padding rows of the vocabulary are zero.

Source: chandar-lab/NeoBERT@ed75b68 model/model.py `_init_weights`: uniform matrices and embeddings, zero bias, no
scaling by depth.
"""

import hashlib
import re
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import nn

# Sharding of each weight under tensor parallelism: the dimension, and the number of blocks that are sharded separately
# (gate and up projection). None: every rank has the whole weight.
_PARTITIONS: dict[str, tuple[int, int] | None] = {
    "word_embeddings.weight": (0, 1),
    "position_embeddings.weight": None,
    "linear_qkv.weight": (0, 1),  # rows are q, k, v within each head, so whole heads stay together
    "linear_proj.weight": (1, 1),
    "linear_fc1.weight": (0, 2),
    "linear_fc2.weight": (1, 1),
    "output_layer.weight": (0, 1),
    "output_layer.bias": (0, 1),
}


def initialize_weights(model: Any, *, seed: int | None, init_range: float, vocab_size: int) -> None:
    """Initialise every parameter of this rank's part of the model, and mark sharded parameters for Megatron.

    Norm weights become 1 and biases 0. Other weights are uniform in [-init_range, init_range).

    Args:
        seed: Seed of the run. If None, weights are zero instead of random; the caller loads a checkpoint afterwards.
        vocab_size: Number of tokens without padding. Padding rows of embedding and decoder become zero.
    """
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    layers = [str(layer.layer_number - 1) for layer in model.decoder.layers]
    for local_name, param in model.named_parameters():
        # The layer number in the whole model, from 0, instead of the number in this pipeline stage.
        name = re.sub(r"(?<=^decoder\.layers\.)\d+", lambda match: layers[int(match[0])], local_name)
        if "norm" in name:
            nn.init.ones_(param) if name.endswith("weight") else nn.init.zeros_(param)
            continue
        partition = _PARTITIONS[".".join(name.split(".")[-2:])]
        if name.endswith("linear_fc1.weight") and not model.config.gated_linear_unit:
            partition = (0, 1)
        shape = list(param.shape)
        if partition is not None:
            dim, blocks = partition
            # Megatron marks sharded parameters only if it initialises them. Without the mark, the gradient norm would
            # silently ignore the shards of all ranks but the first.
            if not hasattr(param, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(param, True, dim, blocks)
            shape[dim] *= tp_size
        if seed is None or name.endswith("bias"):
            nn.init.zeros_(param)
            continue
        weights = torch.zeros(shape)
        is_vocabulary = name.endswith(("word_embeddings.weight", "output_layer.weight"))
        rows = vocab_size if is_vocabulary else shape[0]
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
        weights[:rows].uniform_(-init_range, init_range, generator=generator)
        if partition is not None:
            weights = torch.cat([block.chunk(tp_size, dim)[tp_rank] for block in weights.chunk(blocks, dim)], dim)
        with torch.no_grad():
            param.copy_(weights)
