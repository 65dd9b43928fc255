"""Which weight is which: one table per published layout, read in both directions.

The internal side is the Megatron model, one tensor per layer under the names that its checkpoints use (those of
Transformer Engine, whatever classes trained it). The published sides are NeoBERT's own names and Hugging Face's
EuroBERT, which computes the same function. Only three things differ beyond names: the padding of the vocabulary,
fused matrices, and the rotary convention (NeoBERT pairs adjacent channels; Megatron and EuroBERT pair the halves of
a head). Nothing here touches a disk.

Source: tests/parity/test_huggingface_parity.py shows that the functions are equal, and not equal under the other
rotary convention.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_neobert.errors import ConversionError

LAYERS_PREFIX = "decoder.layers."  # of the names that a checkpoint gives its layers
_LISTED_NAMES = 4  # names that a message spells out before it counts the rest


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


@dataclass(frozen=True)
class Row:
    """One internal tensor and the published ones that it fills. `{i}` stands for every layer number."""

    internal: str
    internal_shape: str
    rule: Rule
    published: tuple[str, ...]
    published_shape: str  # of each of them
    zero_biases: tuple[str, ...] = ()  # published biases, one value per row, that NeoBERT does not have

    def for_layer(self, layer: int) -> "Row":
        def numbered(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(name.replace("{i}", str(layer)) for name in names)

        (internal,) = numbered((self.internal,))
        published, zero_biases = numbered(self.published), numbered(self.zero_biases)
        return Row(internal, self.internal_shape, self.rule, published, self.published_shape, zero_biases)


_ATTENTION = "decoder.layers.{i}.self_attention."
_MLP = "decoder.layers.{i}.mlp."
_NEOBERT_LAYER = "model.transformer_encoder.{i}."
_EUROBERT_LAYER = "model.layers.{i}."
_EUROBERT_HEADS = tuple(f"{_EUROBERT_LAYER}self_attn.{letter}_proj.weight" for letter in "qkv")
_EUROBERT_FC1 = tuple(f"{_EUROBERT_LAYER}mlp.{name}_proj.weight" for name in ("gate", "up"))
_EUROBERT_BIASES = tuple(f"{_EUROBERT_LAYER}mlp.{name}_proj.bias" for name in ("gate", "up"))
_EUROBERT_BIAS = (f"{_EUROBERT_LAYER}mlp.down_proj.bias",)

# fmt: off
NEOBERT = (
    Row("embedding.word_embeddings.weight", "V h", STRIP_PADDING, ("model.encoder.weight",), "v h"),
    Row(f"{_ATTENTION}linear_qkv.layer_norm_weight", "h", COPY, (f"{_NEOBERT_LAYER}attention_norm.weight",), "h"),
    Row(f"{_ATTENTION}linear_qkv.weight", "3h h", PAIR_ADJACENT, (f"{_NEOBERT_LAYER}qkv.weight",), "3h h"),
    Row(f"{_ATTENTION}linear_proj.weight", "h h", COPY, (f"{_NEOBERT_LAYER}wo.weight",), "h h"),
    Row(f"{_MLP}linear_fc1.layer_norm_weight", "h", COPY, (f"{_NEOBERT_LAYER}ffn_norm.weight",), "h"),
    Row(f"{_MLP}linear_fc1.weight", "2f h", COPY, (f"{_NEOBERT_LAYER}ffn.w12.weight",), "2f h"),
    Row(f"{_MLP}linear_fc2.weight", "h f", COPY, (f"{_NEOBERT_LAYER}ffn.w3.weight",), "h f"),
    Row("decoder.final_layernorm.weight", "h", COPY, ("model.layer_norm.weight",), "h"),
    Row("output_layer.weight", "V h", STRIP_PADDING, ("decoder.weight",), "v h"),
    Row("output_layer.bias", "V", STRIP_PADDING, ("decoder.bias",), "v"),
)

# EuroBERT's decoder has a bias only together with biases in its feed-forward layers; those are zeros.
EUROBERT = (
    Row("embedding.word_embeddings.weight", "V h", STRIP_PADDING, ("model.embed_tokens.weight",), "v h"),
    Row(f"{_ATTENTION}linear_qkv.layer_norm_weight", "h", COPY, (f"{_EUROBERT_LAYER}input_layernorm.weight",), "h"),
    Row(f"{_ATTENTION}linear_qkv.weight", "3h h", SPLIT_HEADS, _EUROBERT_HEADS, "h h"),
    Row(f"{_ATTENTION}linear_proj.weight", "h h", COPY, (f"{_EUROBERT_LAYER}self_attn.o_proj.weight",), "h h"),
    Row(f"{_MLP}linear_fc1.layer_norm_weight", "h", COPY, (f"{_EUROBERT_LAYER}post_attention_layernorm.weight",), "h"),
    Row(f"{_MLP}linear_fc1.weight", "2f h", SPLIT_HALVES, _EUROBERT_FC1, "f h", _EUROBERT_BIASES),
    Row(f"{_MLP}linear_fc2.weight", "h f", COPY, (f"{_EUROBERT_LAYER}mlp.down_proj.weight",), "h f", _EUROBERT_BIAS),
    Row("decoder.final_layernorm.weight", "h", COPY, ("model.norm.weight",), "h"),
    Row("output_layer.weight", "V h", STRIP_PADDING, ("lm_head.weight",), "v h"),
    Row("output_layer.bias", "V", STRIP_PADDING, ("lm_head.bias",), "v"),
)
# fmt: on

Table = tuple[Row, ...]


def to_published(internal: Mapping[str, Tensor], shape: ModelShape, table: Table) -> dict[str, Tensor]:
    """The weights of a Megatron model under the names of a published layout, dtypes kept.

    Raises:
        ConversionError: A tensor is missing, unknown, of another shape or not finite, or the rows that pad the
            vocabulary are not zero.
    """
    rows = expand_table(table, shape.num_layers)
    _check_tensors(internal, {row.internal: shape.resolve(row.internal_shape) for row in rows})
    published: dict[str, Tensor] = {}
    for row in rows:
        source = internal[row.internal]
        if row.rule is STRIP_PADDING:
            _check_padding(row.internal, source, shape)
        parts = row.rule.publish(source, shape)
        published |= {name: part.contiguous() for name, part in zip(row.published, parts, strict=True)}
        published |= {name: source.new_zeros(len(parts[0])) for name in row.zero_biases}
    _check_tensors(published, _published_shapes(rows, shape))
    return published


def to_internal(published: Mapping[str, Tensor], shape: ModelShape, table: Table) -> dict[str, Tensor]:
    """The way back of `to_published`; rows that pad the vocabulary are zeros.

    Raises:
        ConversionError: As there, or a bias that NeoBERT does not have is not zero.
    """
    rows = expand_table(table, shape.num_layers)
    _check_tensors(published, _published_shapes(rows, shape))
    internal: dict[str, Tensor] = {}
    for row in rows:
        for name in row.zero_biases:
            _check_no_bias(name, published[name])
        internal[row.internal] = row.rule.restore([published[name] for name in row.published], shape)
    _check_tensors(internal, {row.internal: shape.resolve(row.internal_shape) for row in rows})
    return internal


def expand_table(table: Table, num_layers: int) -> list[Row]:
    """The rows of every layer, and those that belong to none."""
    expanded: list[Row] = []
    for row in table:
        expanded += [row.for_layer(layer) for layer in range(num_layers)] if "{i}" in row.internal else [row]
    return expanded


def unstack_layers(stacked: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One tensor per layer out of a checkpoint, which stores the layers of a kind as one tensor, layer first."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in stacked.items():
        if name.startswith(LAYERS_PREFIX):
            kind = name.removeprefix(LAYERS_PREFIX)
            tensors |= {f"{LAYERS_PREFIX}{i}.{kind}": layer for i, layer in enumerate(tensor.unbind(0))}
        else:
            tensors[name] = tensor
    return tensors


def _published_shapes(rows: list[Row], shape: ModelShape) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for row in rows:
        resolved = shape.resolve(row.published_shape)
        shapes |= dict.fromkeys(row.published, resolved) | dict.fromkeys(row.zero_biases, resolved[:1])
    return shapes


def _check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    if missing := [name for name in expected if name not in tensors]:
        raise ConversionError(f"{_count(missing)} missing; a NeoBERT of this shape has {len(expected)} tensors.")
    if unknown := [name for name in tensors if name not in expected]:
        raise ConversionError(f"{_count(unknown)} not part of a NeoBERT of this shape; check its number of layers.")
    for name, wanted in expected.items():
        if tuple(tensors[name].shape) != wanted:
            raise ConversionError(f"{name} has shape {tuple(tensors[name].shape)}; the settings give it {wanted}.")
    if bad := [name for name in expected if not tensors[name].isfinite().all()]:
        first = tensors[bad[0]]
        others = f", and so have {', '.join(bad[1:_LISTED_NAMES])}" * (len(bad) > 1)
        more = f" and {len(bad) - _LISTED_NAMES} more" * (len(bad) > _LISTED_NAMES)
        raise ConversionError(
            f"{bad[0]} has {int((~first.isfinite()).sum())} of {first.numel()} values that are NaN or infinite"
            f"{others}{more}; convert an earlier iteration, from before the loss diverged."
        )


def _check_padding(name: str, tensor: Tensor, shape: ModelShape) -> None:
    if tensor[shape.vocab_size :].any():
        raise ConversionError(
            f"{name} is not zero in its rows {shape.vocab_size} to {len(tensor) - 1}, which only pad the vocabulary; "
            f"a tokenizer of {shape.vocab_size} tokens does not belong to this checkpoint."
        )


def _check_no_bias(name: str, bias: Tensor) -> None:
    if bias.any():
        raise ConversionError(
            f"{name} has {int(bias.count_nonzero())} values other than zero; NeoBERT has no such bias to hold them."
        )


def _count(names: list[str]) -> str:
    listed = ", ".join(names[:_LISTED_NAMES]) + (
        f" and {len(names) - _LISTED_NAMES} more" * (len(names) > _LISTED_NAMES)
    )
    return f"{listed} {'is' if len(names) == 1 else 'are'}"
