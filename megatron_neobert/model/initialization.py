"""Initial weights: uniform(-range, range), the same full tensor for every parallel layout.

Each parameter is drawn at its full size from a generator seeded by the run's seed and the parameter's name, and then
cut down to this rank's shard. Padded vocabulary rows are zero: they never win a softmax and get no gradient.

Source: chandar-lab/NeoBERT@ed75b68 model/model.py `_init_weights`: uniform for every matrix and embedding, zero bias,
no scaling by depth.
"""

import hashlib
import re
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn

# How tensor parallelism cuts each weight: dimension, and the number of blocks (gate and up projection) cut separately;
# None: every rank has it whole.
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


def initialize_weights(model: Any, *, seed: int, init_range: float, vocab_size: int) -> None:
    """Fill every parameter of `model`, on any rank, from `seed`; padded rows of embedding and decoder become zero.

    Also mark which parameters are sharded. Megatron leaves that out when it does not initialise itself, and then
    drops the shards of all ranks but the first from the gradient norm, without a word.
    """
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    for local_name, param in model.named_parameters():
        name = name_in_whole_model(model, local_name)
        if "norm" in name:
            nn.init.ones_(param) if name.endswith("weight") else nn.init.zeros_(param)
            continue
        partition = _partition_of(name, gated=model.config.gated_linear_unit)
        shape = list(param.shape)
        if partition is not None:
            dim, blocks = partition
            if not hasattr(param, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(param, True, dim, blocks)
            shape[dim] *= tp_size
        own = full = _draw(name, shape, seed=seed, init_range=init_range, vocab_size=vocab_size)
        if partition is not None:
            own = torch.cat([block.chunk(tp_size, dim)[tp_rank] for block in full.chunk(blocks, dim)], dim)
        with torch.no_grad():
            param.copy_(own)


def name_in_whole_model(model: Any, name: str) -> str:
    """A pipeline stage counts its layers from 0; here they have their numbers in the whole model."""
    found = re.match(r"decoder\.layers\.(\d+)\.", name)
    if found is None:
        return name
    layer = model.decoder.layers[int(found[1])].layer_number - 1
    return f"decoder.layers.{layer}.{name[found.end() :]}"


def _partition_of(name: str, *, gated: bool) -> tuple[int, int] | None:
    for suffix, partition in _PARTITIONS.items():
        if name.endswith(suffix):
            return (0, 1) if suffix == "linear_fc1.weight" and not gated else partition
    raise AssertionError(f"{name}: no rule how this parameter is initialised and sharded")


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
