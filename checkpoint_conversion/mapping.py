"""Names and shapes of weights: one table per published layout, read in both directions.

Internal weights are the tensors of training checkpoints. They have Transformer Engine's names, whichever classes
trained the model, and each layer has its own tensors. Published weights have NeoBERT's names, or the names of Hugging
Face's EuroBERT, which computes the same function.

Apart from names, three things differ: the padding of the vocabulary, fused matrices, and the rotary convention. NeoBERT
pairs adjacent channels of a head; Megatron and EuroBERT pair channel j with channel j + d/2. Every rule moves values
and computes none, so it is exact in both directions. This module neither reads nor writes files.

Source: tests/parity/test_check_parity.py shows that the functions are equal, and that they differ under the wrong
rotary convention.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_neobert.config.schema import ModelConfig
from megatron_neobert.errors import ConversionError
from megatron_neobert.huggingface.checks import quote_names

# Suffixes of the gate's and the value's half of SwiGLU's first matrix in a checkpoint.
# Source: megatron.core transformer/mlp.py `apply_swiglu_sharded_factory`.
_GATE, _VALUE = "_w", "_v"


# --- sizes and rules


@dataclass(frozen=True)
class ModelShape:
    """Model settings and vocabulary sizes, which determine the shape of every tensor."""

    model: ModelConfig
    vocab_size: int
    padded_vocab_size: int  # rows that Megatron allocates: a multiple of 128 x tensor-parallel ranks

    def resolve(self, letters: str) -> tuple[int, ...]:
        """Convert a shape to numbers: `"3h h"` becomes (3 x hidden, hidden). Sizes: h, 3h, f, 2f, v, V."""
        hidden, width = self.model.hidden_size, self.model.ffn_width
        sizes = {"h": hidden, "3h": 3 * hidden, "f": width, "2f": 2 * width}
        sizes |= {"v": self.vocab_size, "V": self.padded_vocab_size}
        return tuple(sizes[letter] for letter in letters.split())


class Rule(NamedTuple):
    """Conversion of one internal tensor to one or more published tensors, and its inverse."""

    publish: Callable[[Tensor, ModelShape], list[Tensor]]
    restore: Callable[[list[Tensor], ModelShape], Tensor]


def pair_adjacent(qkv: Tensor, shape: ModelShape) -> list[Tensor]:
    """Move channels j and j + d/2 of every query and key head to channels 2j and 2j + 1; values stay in place."""
    heads = qkv.reshape(shape.model.num_attention_heads, 3, 2, -1, shape.model.hidden_size)
    query_key = heads[:, :2].transpose(2, 3).reshape(heads[:, :2].shape)
    return [torch.cat((query_key, heads[:, 2:]), dim=1).view_as(qkv)]


def pair_halves(published: list[Tensor], shape: ModelShape) -> Tensor:
    """Reverse `pair_adjacent`."""
    heads = published[0].reshape(shape.model.num_attention_heads, 3, -1, 2, shape.model.hidden_size)
    query_key = heads[:, :2].transpose(2, 3).flatten(2, 3)
    return torch.cat((query_key, heads[:, 2:].flatten(2, 3)), dim=1).view_as(published[0])


def split_heads(qkv: Tensor, shape: ModelShape) -> list[Tensor]:
    """Split a fused matrix, with rows q, k, v within each head, into query, key and value matrices."""
    heads = qkv.reshape(shape.model.num_attention_heads, 3, -1, shape.model.hidden_size)
    return [matrix.reshape(shape.model.hidden_size, shape.model.hidden_size) for matrix in heads.unbind(1)]


def join_heads(published: list[Tensor], shape: ModelShape) -> Tensor:
    """Reverse `split_heads`."""
    heads = [matrix.reshape(shape.model.num_attention_heads, -1, shape.model.hidden_size) for matrix in published]
    return torch.stack(heads, dim=1).reshape(-1, shape.model.hidden_size)


def pad_vocabulary(published: list[Tensor], shape: ModelShape) -> Tensor:
    """Pad the published tensor with zero rows to the padded vocabulary size."""
    padding = published[0].new_zeros(shape.padded_vocab_size - shape.vocab_size, *published[0].shape[1:])
    return torch.cat((published[0], padding))


COPY = Rule(lambda tensor, shape: [tensor], lambda published, shape: published[0])
STRIP_PADDING = Rule(lambda tensor, shape: [tensor[: shape.vocab_size]], pad_vocabulary)
SPLIT_HALVES = Rule(lambda tensor, shape: list(tensor.chunk(2)), lambda published, shape: torch.cat(published))
SPLIT_HEADS = Rule(split_heads, join_heads)
PAIR_ADJACENT = Rule(pair_adjacent, pair_halves)


# --- tables


@dataclass(frozen=True)
class Entry:
    """One internal tensor and the published tensors that hold its values; `{i}` in a name stands for the layer."""

    internal: str
    internal_shape: str  # letters of ModelShape.resolve
    rule: Rule
    published: tuple[str, ...]
    published_shape: str  # shape of each published tensor
    has_zero_biases: bool = False

    @property
    def zero_biases(self) -> tuple[str, ...]:
        """Names of published biases that NeoBERT lacks. Each is a vector with one zero per row of its weight matrix."""
        return tuple(name.replace("weight", "bias") for name in self.published if self.has_zero_biases)


Table = tuple[Entry, ...]

_ATTENTION = "decoder.layers.{i}.self_attention."
_MLP = "decoder.layers.{i}.mlp."
_NEOBERT_LAYER = "model.transformer_encoder.{i}."
_EURO_LAYER = "model.layers.{i}."
_QKV = tuple(f"{_EURO_LAYER}self_attn.{letter}_proj.weight" for letter in "qkv")
_GATE_UP = tuple(f"{_EURO_LAYER}mlp.{name}_proj.weight" for name in ("gate", "up"))


# fmt: off
NEOBERT: Table = (
    Entry("embedding.word_embeddings.weight", "V h", STRIP_PADDING, ("model.encoder.weight",), "v h"),
    Entry(f"{_ATTENTION}linear_qkv.layer_norm_weight", "h", COPY, (f"{_NEOBERT_LAYER}attention_norm.weight",), "h"),
    Entry(f"{_ATTENTION}linear_qkv.weight", "3h h", PAIR_ADJACENT, (f"{_NEOBERT_LAYER}qkv.weight",), "3h h"),
    Entry(f"{_ATTENTION}linear_proj.weight", "h h", COPY, (f"{_NEOBERT_LAYER}wo.weight",), "h h"),
    Entry(f"{_MLP}linear_fc1.layer_norm_weight", "h", COPY, (f"{_NEOBERT_LAYER}ffn_norm.weight",), "h"),
    Entry(f"{_MLP}linear_fc1.weight", "2f h", COPY, (f"{_NEOBERT_LAYER}ffn.w12.weight",), "2f h"),
    Entry(f"{_MLP}linear_fc2.weight", "h f", COPY, (f"{_NEOBERT_LAYER}ffn.w3.weight",), "h f"),
    Entry("decoder.final_layernorm.weight", "h", COPY, ("model.layer_norm.weight",), "h"),
    Entry("output_layer.weight", "V h", STRIP_PADDING, ("decoder.weight",), "v h"),
    Entry("output_layer.bias", "V", STRIP_PADDING, ("decoder.bias",), "v"),
)

# EuroBERT's feed-forward layers have biases, of which only zeros can be converted.
EUROBERT: Table = (
    Entry("embedding.word_embeddings.weight", "V h", STRIP_PADDING, ("model.embed_tokens.weight",), "v h"),
    Entry(f"{_ATTENTION}linear_qkv.layer_norm_weight", "h", COPY, (f"{_EURO_LAYER}input_layernorm.weight",), "h"),
    Entry(f"{_ATTENTION}linear_qkv.weight", "3h h", SPLIT_HEADS, _QKV, "h h"),
    Entry(f"{_ATTENTION}linear_proj.weight", "h h", COPY, (f"{_EURO_LAYER}self_attn.o_proj.weight",), "h h"),
    Entry(f"{_MLP}linear_fc1.layer_norm_weight", "h", COPY, (f"{_EURO_LAYER}post_attention_layernorm.weight",), "h"),
    Entry(f"{_MLP}linear_fc1.weight", "2f h", SPLIT_HALVES, _GATE_UP, "f h", True),
    Entry(f"{_MLP}linear_fc2.weight", "h f", COPY, (f"{_EURO_LAYER}mlp.down_proj.weight",), "h f", True),
    Entry("decoder.final_layernorm.weight", "h", COPY, ("model.norm.weight",), "h"),
    Entry("output_layer.weight", "V h", STRIP_PADDING, ("lm_head.weight",), "v h"),
    Entry("output_layer.bias", "V", STRIP_PADDING, ("lm_head.bias",), "v"),
)
# fmt: on

TABLES = {"eurobert": EUROBERT, "neobert": NEOBERT}


# --- conversion


def to_published(internal: Mapping[str, Tensor], shape: ModelShape, table: Table) -> dict[str, Tensor]:
    """Return a Megatron model's weights under a layout's names, with the same dtypes. Unchanged tensors are not copied.

    Raises ConversionError if `check_tensors` refuses the weights, or if rows that pad the vocabulary are not zero.
    """
    entries = expand_table(table, shape.model.num_layers)
    check_tensors(internal, {entry.internal: shape.resolve(entry.internal_shape) for entry in entries})
    published: dict[str, Tensor] = {}
    for entry in entries:
        tensor = internal[entry.internal]
        if entry.rule is STRIP_PADDING and tensor[shape.vocab_size :].any():
            raise ConversionError(
                f"{entry.internal} is not zero in rows {shape.vocab_size} to {len(tensor) - 1}, which pad the "
                f"vocabulary of {shape.vocab_size} tokens. Use the tokenizer of this checkpoint."
            )
        matrices = entry.rule.publish(tensor, shape)
        for name, matrix in zip(entry.published, matrices, strict=True):
            # safetensors refuses to write tensors that share memory, such as views of one tensor.
            is_view = matrix.untyped_storage().nbytes() != matrix.nbytes
            published[name] = matrix.clone(memory_format=torch.contiguous_format) if is_view else matrix.contiguous()
        published |= {name: tensor.new_zeros(len(matrices[0])) for name in entry.zero_biases}
    return published


def to_internal(published: Mapping[str, Tensor], shape: ModelShape, table: Table) -> dict[str, Tensor]:
    """Reverse `to_published`: return weights under Megatron's names. The rows that pad the vocabulary are zeros.

    Raises ConversionError if `check_tensors` refuses the weights, or if a bias that NeoBERT does not have is not zero.
    """
    entries = expand_table(table, shape.model.num_layers)
    check_tensors(published, published_shapes(table, shape))
    internal: dict[str, Tensor] = {}
    for entry in entries:
        for name in entry.zero_biases:
            if nonzero := int(published[name].count_nonzero()):
                raise ConversionError(
                    f"{name} has {nonzero} nonzero values, but NeoBERT has no such bias. Set it to 0."
                )
        internal[entry.internal] = entry.rule.restore([published[name] for name in entry.published], shape)
    return internal


def published_shapes(table: Table, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return {published name: shape} for every tensor of a layout. `table` is the layout's table."""
    shapes: dict[str, tuple[int, ...]] = {}
    for entry in expand_table(table, shape.model.num_layers):
        resolved = shape.resolve(entry.published_shape)
        shapes |= dict.fromkeys(entry.published, resolved) | dict.fromkeys(entry.zero_biases, resolved[:1])
    return shapes


def expand_table(table: Table, num_layers: int) -> list[Entry]:
    """Return the entries of a table. An entry whose names contain `{i}` is repeated for every layer."""
    expanded: list[Entry] = []
    for entry in table:
        for layer in range(num_layers) if "{i}" in entry.internal else [0]:
            internal, *published = (name.replace("{i}", str(layer)) for name in (entry.internal, *entry.published))
            expanded.append(replace(entry, internal=internal, published=tuple(published)))
    return expanded


def join_halves(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join the two halves of each SwiGLU matrix in a checkpoint, first the gate, then the value. Return all tensors."""
    tensors = {name: tensor for name, tensor in stored.items() if not name.endswith((_GATE, _VALUE))}
    for name, gate in stored.items():
        joined = name.removesuffix(_GATE)
        if joined != name and joined + _VALUE in stored:
            tensors[joined] = torch.cat([gate, stored[joined + _VALUE]])
    return tensors


def split_halves(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return internal tensors with each SwiGLU matrix split into gate and value, as a checkpoint stores them."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("mlp.linear_fc1.weight"):
            gate, value = tensor.chunk(2)
            stored |= {name + _GATE: gate.contiguous(), name + _VALUE: value.contiguous()}
        else:
            stored[name] = tensor
    return stored


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ConversionError unless the tensors have exactly the names and shapes in `expected`, and finite values."""
    if missing := [name for name in expected if name not in tensors]:
        raise ConversionError(
            f"missing: {quote_names(missing)}; a NeoBERT of this shape has {len(expected)} tensors. Use complete "
            "weights, with a masked-language-model head."
        )
    if unknown := [name for name in tensors if name not in expected]:
        raise ConversionError(
            f"not part of a NeoBERT of this shape: {quote_names(unknown)}; check its number of layers."
        )
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise ConversionError(
                f"{name} has shape {tuple(tensors[name].shape)}, but the settings give it {shape}. Use settings and "
                "weights of one model."
            )
    # A finite sum has finite terms, and costs a tenth of a check of every value.
    if bad := [name for name in expected if not (tensors[name].sum().isfinite() or tensors[name].isfinite().all())]:
        raise ConversionError(
            f"values of {quote_names(bad)} are NaN or infinite; use weights from before the loss diverged."
        )
