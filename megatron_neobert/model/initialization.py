"""Initial weights: uniform(-range, range), the same full tensor for every parallel layout.

Each parameter is drawn at its full size from a generator seeded by the run's seed and the parameter's name, and then
cut down to this rank's shard. Padded vocabulary rows are zero: they never win a softmax and get no gradient.

Source: chandar-lab/NeoBERT@ed75b68 model/model.py `_init_weights`: uniform for every matrix and embedding, zero bias,
no scaling by depth.
"""

import hashlib

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn

# How tensor parallelism cuts each weight: dimension, and the number of blocks (gate and up projection) cut separately.
_PARTITIONS = {
    "word_embeddings.weight": (0, 1),
    "linear_qkv.weight": (0, 1),  # rows are q, k, v within each head, so whole heads stay together
    "linear_proj.weight": (1, 1),
    "linear_fc1.weight": (0, 2),
    "linear_fc2.weight": (1, 1),
    "output_layer.weight": (0, 1),
    "output_layer.bias": (0, 1),
}


def initialize_weights(model: nn.Module, *, seed: int, init_range: float, vocab_size: int) -> None:
    """Fills every parameter of `model`, on any rank, from `seed`.

    Also marks which parameters are sharded. Megatron leaves that out when it does not initialise itself, and then
    drops the shards of all ranks but the first from the gradient norm, without a word.

    Args:
        vocab_size: Number of real tokens; embedding and decoder rows from there on become zero.
    """
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    for name, param in model.named_parameters():
        partition = next((cut for suffix, cut in _PARTITIONS.items() if name.endswith(suffix)), None)
        if partition is None:
            assert "norm" in name, f"{name}: no rule how this parameter is initialised and sharded"
            nn.init.ones_(param)
            continue
        dim, blocks = partition
        if not hasattr(param, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(param, True, dim, blocks)
        shape = list(param.shape)
        shape[dim] *= tp_size
        full = _draw(name, shape, seed=seed, init_range=init_range, vocab_size=vocab_size)
        with torch.no_grad():
            param.copy_(_shard(full, dim, blocks, tp_rank, tp_size))


def _draw(name: str, shape: list[int], *, seed: int, init_range: float, vocab_size: int) -> Tensor:
    full = torch.zeros(shape)
    if name.endswith("bias"):
        return full
    is_vocabulary = name.endswith(("word_embeddings.weight", "output_layer.weight"))
    rows = vocab_size if is_vocabulary else shape[0]
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    full[:rows].uniform_(-init_range, init_range, generator=generator)
    return full


def _shard(full: Tensor, dim: int, blocks: int, tp_rank: int, tp_size: int) -> Tensor:
    return torch.cat([block.chunk(tp_size, dim)[tp_rank] for block in full.chunk(blocks, dim)], dim)
