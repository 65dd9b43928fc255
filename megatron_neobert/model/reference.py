"""NeoBERT in plain PyTorch, as documentation and as the reference for tests.

The Megatron model and all exports are compared with this model. Names, shapes and conventions (rotary pairs are
adjacent channels) equal the published checkpoint's. The model has no parallelism and computes the logits of every
token. Training does not use it.

Shapes: `b` batch, `s` sequence, `t` tokens of packed documents, `h` hidden, `n` heads, `d` head width, `v` vocabulary.

Source: arXiv 2502.19587 section 3; chandar-lab/NeoBERT@ed75b68 model/model.py, model/rotary.py,
    conf/model/neobert.yaml.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED_LABEL = -100


@dataclass(frozen=True)
class ReferenceConfig:
    """Shape of a NeoBERT model. The defaults give the published model with 245,136,954 parameters."""

    num_layers: int = 28
    hidden_size: int = 768
    num_attention_heads: int = 12
    ffn_hidden_size: int = 2048  # width of each half of SwiGLU; two thirds of the published config's 3072
    vocab_size: int = 30_522
    rotary_base: float = 10_000.0
    norm_epsilon: float = 1e-5
    init_method_range: float = 0.02

    @property
    def head_width(self) -> int:
        return self.hidden_size // self.num_attention_heads


class Rotation(NamedTuple):
    """Cosine and sine of the rotary angles, fp32, [b or 1, 1, s, d/2]. Each pair of adjacent channels has one angle."""

    cosine: Tensor
    sine: Tensor


class MaskedLoss(NamedTuple):
    """Summed loss of the masked tokens, and their number."""

    total: Tensor  # nats
    tokens: int


class FeedForward(nn.Module):
    """SwiGLU. `w12` is the gate projection followed by the up projection."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        self.w12 = nn.Linear(config.hidden_size, 2 * config.ffn_hidden_size, bias=False)
        self.w3 = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_bsh: Tensor) -> Tensor:
        gate, up = self.w12(hidden_bsh).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * up)


class EncoderBlock(nn.Module):
    """A pre-norm transformer block: attention, then feed-forward, each with RMSNorm and a residual connection."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        # Output channels are ordered by head, and within a head by query, key, value.
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.ffn = FeedForward(config)

    def forward(self, hidden_bsh: Tensor, rotation: Rotation, mask: Tensor | None) -> Tensor:
        heads_bnsd = self.qkv(self.attention_norm(hidden_bsh)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        query, key, value = heads_bnsd.chunk(3, dim=-1)
        context_bnsd = F.scaled_dot_product_attention(
            rotate_pairs(query, rotation), rotate_pairs(key, rotation), value, attn_mask=mask
        )
        hidden_bsh = hidden_bsh + self.wo(context_bnsd.transpose(1, 2).flatten(2))
        return hidden_bsh + self.ffn(self.ffn_norm(hidden_bsh))


class Encoder(nn.Module):
    """Embedding, blocks and final norm. In the published checkpoint, the embedding is named `encoder`."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = nn.Embedding(config.vocab_size, config.hidden_size)
        self.transformer_encoder = nn.ModuleList(EncoderBlock(config) for _ in range(config.num_layers))
        self.layer_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)

    def forward(self, tokens_bs: Tensor, positions_bs: Tensor, mask: Tensor | None) -> Tensor:
        hidden_bsh = self.encoder(tokens_bs)
        rotation = build_rotation(positions_bs, self.config)
        for block in self.transformer_encoder:
            hidden_bsh = block(hidden_bsh, rotation, mask)
        return self.layer_norm(hidden_bsh)


class ReferenceNeoBERT(nn.Module):
    """NeoBERT with its masked-language-model head: a linear layer with a bias, not tied to the embedding."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        self.model = Encoder(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        # Uniform matrices and zero biases; norms keep their initial ones.
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.uniform_(module.weight, -config.init_method_range, config.init_method_range)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens_bs: Tensor, attention_mask_bs: Tensor | None = None) -> Tensor:
        """Return logits, [b, s, v]. The mask is 0 at padding; logits at padding have no meaning."""
        positions_bs = torch.arange(tokens_bs.shape[1], device=tokens_bs.device)[None]
        mask = None if attention_mask_bs is None else attention_mask_bs.bool()[:, None, None, :]
        return self.decoder(self.model(tokens_bs, positions_bs, mask))

    def forward_packed(self, tokens_t: Tensor, cu_seqlens_n: Tensor, *, is_causal: bool = False) -> Tensor:
        """Return logits, [t, v], for documents packed end to end. Attention and positions are per document.

        Args:
            cu_seqlens_n: Start of each document, and t at the end.
            is_causal: If True, a token attends only to itself and to the tokens before it.
        """
        lengths = cu_seqlens_n.diff()
        document_t = torch.repeat_interleave(torch.arange(len(lengths), device=tokens_t.device), lengths)
        positions_t = torch.arange(len(tokens_t), device=tokens_t.device) - cu_seqlens_n[document_t]
        mask_tt = document_t[:, None] == document_t[None, :]
        mask_tt = mask_tt.tril() if is_causal else mask_tt
        return self.decoder(self.model(tokens_t[None], positions_t[None], mask_tt[None, None]))[0]


def build_rotation(positions_bs: Tensor, config: ReferenceConfig) -> Rotation:
    """Return the rotation at every position. Channel pair i rotates by base^(-2i/d) per token."""
    channels = torch.arange(0, config.head_width, 2, device=positions_bs.device, dtype=torch.float32)
    angles = positions_bs[:, None, :, None] * config.rotary_base ** (-channels / config.head_width)
    return Rotation(angles.cos(), angles.sin())


def rotate_pairs(heads_bnsd: Tensor, rotation: Rotation) -> Tensor:
    """Rotate channels (0, 1), (2, 3), ... of every head, in fp32. The result has the dtype of the input."""
    even, odd = heads_bnsd.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = (even * rotation.cosine - odd * rotation.sine, even * rotation.sine + odd * rotation.cosine)
    return torch.stack(rotated, dim=-1).flatten(-2).to(heads_bnsd.dtype)


def mlm_loss(logits_bsv: Tensor, labels_bs: Tensor) -> MaskedLoss:
    """Return the fp32 cross-entropy, summed over the masked tokens. Labels of other tokens must be IGNORED_LABEL."""
    total = F.cross_entropy(
        logits_bsv.float().flatten(0, -2), labels_bs.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    return MaskedLoss(total, int((labels_bs != IGNORED_LABEL).sum()))
