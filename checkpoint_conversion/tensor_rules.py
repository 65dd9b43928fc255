"""How one tensor of the Megatron model becomes the published ones, and how they become it again.

Only three things ever differ beyond names: the padding of the vocabulary, fused matrices, and the rotary convention
(NeoBERT pairs adjacent channels of a head; Megatron, EuroBERT and Llama pair its halves). Every rule is exact in both
directions: values are moved, never computed. A rule may give views; mapping.py copies those before they are written.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_neobert.config.schema import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes that decide every tensor's shape."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    vocab_size: int
    padded_vocab_size: int  # rows that Megatron allocates, a multiple of 128 x tensor-parallel ranks

    def resolve(self, letters: str) -> tuple[int, ...]:
        """The sizes behind the letters of a table: `"3h h"` is (3 hidden, hidden)."""
        hidden, width = self.hidden_size, self.ffn_hidden_size
        sizes = {"h": hidden, "3h": 3 * hidden, "f": width, "2f": 2 * width}
        sizes |= {"v": self.vocab_size, "V": self.padded_vocab_size}
        return tuple(sizes[letter] for letter in letters.split())


def shape_of(model: ModelConfig, *, vocab_size: int, padded_vocab_size: int | None = None) -> ModelShape:
    """The sizes that settings give a model of `vocab_size` tokens; without `padded_vocab_size` nothing pads these."""
    return ModelShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        ffn_hidden_size=model.ffn_width,
        vocab_size=vocab_size,
        padded_vocab_size=vocab_size if padded_vocab_size is None else padded_vocab_size,
    )


class Rule(NamedTuple):
    """How one internal tensor becomes one or more published ones, and how they become it again."""

    publish: Callable[[Tensor, ModelShape], list[Tensor]]
    restore: Callable[[list[Tensor], ModelShape], Tensor]


def _pair_adjacent(qkv: Tensor, shape: ModelShape) -> list[Tensor]:
    """Channels j and j + d/2 of every query and key head become channels 2j and 2j + 1; values stay."""
    heads = qkv.reshape(shape.num_attention_heads, 3, 2, -1, shape.hidden_size)
    query_key = heads[:, :2].transpose(2, 3).reshape(heads[:, :2].shape)
    return [torch.cat((query_key, heads[:, 2:]), dim=1).view_as(qkv)]


def _pair_halves(parts: list[Tensor], shape: ModelShape) -> Tensor:
    """The way back of `_pair_adjacent`."""
    heads = parts[0].reshape(shape.num_attention_heads, 3, -1, 2, shape.hidden_size)
    query_key = heads[:, :2].transpose(2, 3).flatten(2, 3)
    return torch.cat((query_key, heads[:, 2:].flatten(2, 3)), dim=1).view_as(parts[0])


def _split_heads(qkv: Tensor, shape: ModelShape) -> list[Tensor]:
    """Rows that stand as q, k, v within each head become one matrix each."""
    heads = qkv.reshape(shape.num_attention_heads, 3, -1, shape.hidden_size)
    return [part.reshape(shape.hidden_size, shape.hidden_size) for part in heads.unbind(1)]


def _join_heads(parts: list[Tensor], shape: ModelShape) -> Tensor:
    heads = [part.reshape(shape.num_attention_heads, -1, shape.hidden_size) for part in parts]
    return torch.stack(heads, dim=1).reshape(-1, shape.hidden_size)


def _pad_vocabulary(parts: list[Tensor], shape: ModelShape) -> Tensor:
    padding = parts[0].new_zeros(shape.padded_vocab_size - shape.vocab_size, *parts[0].shape[1:])
    return torch.cat((parts[0], padding))


COPY = Rule(lambda tensor, shape: [tensor], lambda parts, shape: parts[0])
STRIP_PADDING = Rule(lambda tensor, shape: [tensor[: shape.vocab_size]], _pad_vocabulary)
SPLIT_HALVES = Rule(lambda tensor, shape: list(tensor.chunk(2)), lambda parts, shape: torch.cat(parts))
SPLIT_HEADS = Rule(_split_heads, _join_heads)
PAIR_ADJACENT = Rule(_pair_adjacent, _pair_halves)
