"""A small model that is computed twice: by the local layers, and by Transformer Engine's over its stand-in."""

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing

from megatron_neobert.config.schema import ComputeConfig, ModelConfig, ParallelConfig, Settings
from megatron_neobert.model.neobert import NeoBERTModel

VOCAB = 203
LENGTHS = (5, 1, 18, 40, 0, 0)  # the last documents fill cu_seqlens up
TOKENS = sum(LENGTHS)
MASKED = 3  # every third token
# Parameters of the local norms, as Transformer Engine's fused layers call them.
NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
CASES: dict[str, dict[str, Any]] = {
    "neobert": {},
    "layer_norm": {"normalization": "LayerNorm"},
    "gelu": {"swiglu": False},
    "learned_positions": {"position_embedding_type": "learned_absolute"},
}


def settings_of(case: str, *, impl: str, **parallel: Any) -> Settings:
    return Settings(
        model=ModelConfig(
            num_layers=2, hidden_size=64, num_attention_heads=4, max_position_embeddings=64, **CASES[case]
        ),
        compute=ComputeConfig(transformer_impl=impl),
        parallel=ParallelConfig(**parallel),
    )


def build(case: str, *, impl: str, **parallel: Any) -> NeoBERTModel:
    return NeoBERTModel(settings_of(case, impl=impl, **parallel), vocab_size=VOCAB)


def make_row() -> tuple[torch.Tensor, torch.Tensor]:
    tokens_t = torch.randint(5, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(0))
    return tokens_t, torch.tensor([0, *LENGTHS]).cumsum(0).int()


def compute(model: NeoBERTModel) -> dict[str, torch.Tensor]:
    """Losses at the masked positions, and the gradient of their sum, under Transformer Engine's names."""
    tokens_t, cu_seqlens_n = make_row()
    positions_m = torch.arange(0, TOKENS, MASKED)
    losses_m, _ = model(tokens_t, cu_seqlens_n, 64, positions_m, tokens_t[positions_m])
    losses_m.sum().backward()
    gradients = {canonical(name): parameter.grad for name, parameter in model.named_parameters()}
    return {"losses": losses_m.detach(), **gradients}


def canonical(name: str) -> str:
    for local, engine in NORMS.items():
        name = name.replace(local, engine)
    return name


def fill(model: NeoBERTModel, value: float) -> None:
    """Makes every parameter another than its initial one, by a rule that needs no random numbers."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(value).add_(value / 16)


def weights(model: NeoBERTModel) -> dict[str, torch.Tensor]:
    return {canonical(name): parameter.detach() for name, parameter in model.named_parameters()}


def _sharded(model: NeoBERTModel) -> dict[str, Any]:
    return {name: entry for name, entry in model.sharded_state_dict().items() if not name.endswith("_extra_state")}


def save(model: NeoBERTModel, folder: Path) -> None:
    folder.mkdir()
    dist_checkpointing.save(_sharded(model), str(folder))


def load(model: NeoBERTModel, folder: Path) -> None:
    state = dist_checkpointing.load(_sharded(model), str(folder))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and all(name.endswith("_extra_state") for name in missing), f"{missing=} {unexpected=}"
