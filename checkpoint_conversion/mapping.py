"""Names and shapes of weights: one table per published format, read in both directions.

The internal side is the Megatron model, one tensor per layer under the names that its checkpoints use (those of
Transformer Engine, from any classes that trained it). The published sides are NeoBERT's own names, and those of Hugging
Face's EuroBERT and of a Llama that looks both ways, which compute the same function.

Only three things ever differ beyond names: the padding of the vocabulary, fused matrices, and the rotary convention
(NeoBERT pairs adjacent channels of a head; Megatron, EuroBERT and Llama pair its halves). Every rule is exact in both
directions: values are moved, never computed. Nothing here touches a disk.

Source: tests/parity/test_published_models.py shows that the functions are equal, and not equal under the other
rotary convention.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_neobert.config.schema import ModelConfig
from megatron_neobert.errors import ConversionError
from megatron_neobert.text import listed

_HALVES = ("_w", "_v")  # what megatron.core adds to the name, mlp.py: apply_swiglu_sharded_factory
HEAD_FOLDER = "mlm_head"  # below a folder whose layout has no place for a masked-language-model head
HEAD_NAMES = ("decoder.weight", "decoder.bias")  # of the tensors in it
LAYERS_PREFIX = "decoder.layers."  # of the names that a checkpoint gives its layers


# --- sizes and rules


@dataclass(frozen=True)
class ModelShape:
    """A model and its vocabulary, which decide every tensor's shape."""

    model: ModelConfig
    vocab_size: int
    padded_vocab_size: int  # rows that Megatron allocates, a multiple of 128 x tensor-parallel ranks

    def resolve(self, letters: str) -> tuple[int, ...]:
        """Return the sizes behind the letters of a table: `"3h h"` is (3 hidden, hidden)."""
        hidden, width = self.model.hidden_size, self.model.ffn_width
        sizes = {"h": hidden, "3h": 3 * hidden, "f": width, "2f": 2 * width}
        sizes |= {"v": self.vocab_size, "V": self.padded_vocab_size}
        return tuple(sizes[letter] for letter in letters.split())


class Rule(NamedTuple):
    """Two functions: one internal tensor to one or more published ones, and back."""

    publish: Callable[[Tensor, ModelShape], list[Tensor]]
    restore: Callable[[list[Tensor], ModelShape], Tensor]


def pair_adjacent(qkv: Tensor, shape: ModelShape) -> list[Tensor]:
    """Move channels j and j + d/2 of every query and key head to channels 2j and 2j + 1; values stay."""
    heads = qkv.reshape(shape.model.num_attention_heads, 3, 2, -1, shape.model.hidden_size)
    query_key = heads[:, :2].transpose(2, 3).reshape(heads[:, :2].shape)
    return [torch.cat((query_key, heads[:, 2:]), dim=1).view_as(qkv)]


def pair_halves(parts: list[Tensor], shape: ModelShape) -> Tensor:
    """Reverse `pair_adjacent`."""
    heads = parts[0].reshape(shape.model.num_attention_heads, 3, -1, 2, shape.model.hidden_size)
    query_key = heads[:, :2].transpose(2, 3).flatten(2, 3)
    return torch.cat((query_key, heads[:, 2:].flatten(2, 3)), dim=1).view_as(parts[0])


def split_heads(qkv: Tensor, shape: ModelShape) -> list[Tensor]:
    """Split rows that are q, k, v within each head into one matrix each."""
    heads = qkv.reshape(shape.model.num_attention_heads, 3, -1, shape.model.hidden_size)
    return [part.reshape(shape.model.hidden_size, shape.model.hidden_size) for part in heads.unbind(1)]


def join_heads(parts: list[Tensor], shape: ModelShape) -> Tensor:
    heads = [part.reshape(shape.model.num_attention_heads, -1, shape.model.hidden_size) for part in parts]
    return torch.stack(heads, dim=1).reshape(-1, shape.model.hidden_size)


def pad_vocabulary(parts: list[Tensor], shape: ModelShape) -> Tensor:
    padding = parts[0].new_zeros(shape.padded_vocab_size - shape.vocab_size, *parts[0].shape[1:])
    return torch.cat((parts[0], padding))


COPY = Rule(lambda tensor, shape: [tensor], lambda parts, shape: parts[0])
STRIP_PADDING = Rule(lambda tensor, shape: [tensor[: shape.vocab_size]], pad_vocabulary)
SPLIT_HALVES = Rule(lambda tensor, shape: list(tensor.chunk(2)), lambda parts, shape: torch.cat(parts))
SPLIT_HEADS = Rule(split_heads, join_heads)
PAIR_ADJACENT = Rule(pair_adjacent, pair_halves)


# --- tables


@dataclass(frozen=True)
class Entry:
    """One internal tensor and the published ones that it fills. `{i}` stands for every layer number."""

    internal: str
    internal_shape: str
    rule: Rule
    published: tuple[str, ...]
    published_shape: str  # of each of them
    zero_biases: tuple[str, ...] = ()  # published biases, one value per row, that NeoBERT does not have

    def for_layer(self, layer: int) -> "Entry":
        names = (self.published, self.zero_biases)
        published, zero_biases = (tuple(name.replace("{i}", str(layer)) for name in group) for group in names)
        internal = self.internal.replace("{i}", str(layer))
        return replace(self, internal=internal, published=published, zero_biases=zero_biases)


Table = tuple[Entry, ...]

_ATTENTION = "decoder.layers.{i}.self_attention."
_MLP = "decoder.layers.{i}.mlp."


# fmt: off
def neobert_table() -> Table:
    layer = "model.transformer_encoder.{i}."
    return (
        Entry("embedding.word_embeddings.weight", "V h", STRIP_PADDING, ("model.encoder.weight",), "v h"),
        Entry(f"{_ATTENTION}linear_qkv.layer_norm_weight", "h", COPY, (f"{layer}attention_norm.weight",), "h"),
        Entry(f"{_ATTENTION}linear_qkv.weight", "3h h", PAIR_ADJACENT, (f"{layer}qkv.weight",), "3h h"),
        Entry(f"{_ATTENTION}linear_proj.weight", "h h", COPY, (f"{layer}wo.weight",), "h h"),
        Entry(f"{_MLP}linear_fc1.layer_norm_weight", "h", COPY, (f"{layer}ffn_norm.weight",), "h"),
        Entry(f"{_MLP}linear_fc1.weight", "2f h", COPY, (f"{layer}ffn.w12.weight",), "2f h"),
        Entry(f"{_MLP}linear_fc2.weight", "h f", COPY, (f"{layer}ffn.w3.weight",), "h f"),
        Entry("decoder.final_layernorm.weight", "h", COPY, ("model.layer_norm.weight",), "h"),
        Entry("output_layer.weight", "V h", STRIP_PADDING, ("decoder.weight",), "v h"),
        Entry("output_layer.bias", "V", STRIP_PADDING, ("decoder.bias",), "v"),
    )


def llama_like_table(prefix: str, head: str, *, has_biases: bool) -> Table:
    """Return the names that Llama gave its parts and EuroBERT kept.

    EuroBERT's decoder has a bias only together with biases in its feed-forward layers; those are zeros.
    """
    layer = prefix + "layers.{i}."
    heads = tuple(f"{layer}self_attn.{letter}_proj.weight" for letter in "qkv")
    inner = tuple(f"{layer}mlp.{name}_proj.weight" for name in ("gate", "up"))
    inner_biases = tuple(f"{layer}mlp.{name}_proj.bias" for name in ("gate", "up")) if has_biases else ()
    outer_biases = (f"{layer}mlp.down_proj.bias",) if has_biases else ()
    return (
        Entry("embedding.word_embeddings.weight", "V h", STRIP_PADDING, (f"{prefix}embed_tokens.weight",), "v h"),
        Entry(f"{_ATTENTION}linear_qkv.layer_norm_weight", "h", COPY, (f"{layer}input_layernorm.weight",), "h"),
        Entry(f"{_ATTENTION}linear_qkv.weight", "3h h", SPLIT_HEADS, heads, "h h"),
        Entry(f"{_ATTENTION}linear_proj.weight", "h h", COPY, (f"{layer}self_attn.o_proj.weight",), "h h"),
        Entry(f"{_MLP}linear_fc1.layer_norm_weight", "h", COPY, (f"{layer}post_attention_layernorm.weight",), "h"),
        Entry(f"{_MLP}linear_fc1.weight", "2f h", SPLIT_HALVES, inner, "f h", inner_biases),
        Entry(f"{_MLP}linear_fc2.weight", "h f", COPY, (f"{layer}mlp.down_proj.weight",), "h f", outer_biases),
        Entry("decoder.final_layernorm.weight", "h", COPY, (f"{prefix}norm.weight",), "h"),
        Entry("output_layer.weight", "V h", STRIP_PADDING, (f"{head}.weight",), "v h"),
        Entry("output_layer.bias", "V", STRIP_PADDING, (f"{head}.bias",), "v"),
    )


NEOBERT = neobert_table()
EUROBERT = llama_like_table("model.", "lm_head", has_biases=True)
LLAMA = llama_like_table("", "decoder", has_biases=False)  # the class has no head; ours lies beside it
# fmt: on

TABLES = {"eurobert": EUROBERT, "neobert": NEOBERT, "llama": LLAMA}


# --- conversion


def to_published(internal: Mapping[str, Tensor], shape: ModelShape, table: Table) -> dict[str, Tensor]:
    """Return the weights of a Megatron model under the names of a published layout, dtypes kept.

    Raises:
        ConversionError: A tensor is missing, unknown, of another shape or not finite, or the rows that pad the
            vocabulary are not zero.
    """
    entries = expand_table(table, shape.model.num_layers)
    check_tensors(internal, {entry.internal: shape.resolve(entry.internal_shape) for entry in entries})
    published: dict[str, Tensor] = {}
    for entry in entries:
        source = internal[entry.internal]
        if entry.rule is STRIP_PADDING and source[shape.vocab_size :].any():
            raise ConversionError(
                f"{entry.internal} is not zero in its rows {shape.vocab_size} to {len(source) - 1}, which only pad the "
                f"vocabulary; a tokenizer of {shape.vocab_size} tokens does not belong to this checkpoint."
            )
        parts = entry.rule.publish(source, shape)
        for name, part in zip(entry.published, parts, strict=True):
            # Writers of safetensors refuse tensors that share memory, as views of one tensor do.
            is_view = part.untyped_storage().nbytes() != part.nbytes
            published[name] = part.clone(memory_format=torch.contiguous_format) if is_view else part.contiguous()
        published |= {name: source.new_zeros(len(parts[0])) for name in entry.zero_biases}
    check_tensors(published, published_shapes(table, shape))
    return published


def to_internal(published: Mapping[str, Tensor], shape: ModelShape, table: Table) -> dict[str, Tensor]:
    """Reverse `to_published`; rows that pad the vocabulary are zeros.

    Raises:
        ConversionError: As there, or a bias that NeoBERT does not have is not zero.
    """
    entries = expand_table(table, shape.model.num_layers)
    check_tensors(published, published_shapes(table, shape), remedy="fetch the weights again, or use others")
    internal: dict[str, Tensor] = {}
    for entry in entries:
        for name in entry.zero_biases:
            if nonzero := int(published[name].count_nonzero()):
                raise ConversionError(
                    f"{name} has {nonzero} values other than zero; NeoBERT has no such bias to hold them."
                )
        internal[entry.internal] = entry.rule.restore([published[name] for name in entry.published], shape)
    check_tensors(internal, {entry.internal: shape.resolve(entry.internal_shape) for entry in entries})
    return internal


def published_shapes(table: Table, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the name and the shape of every tensor of a folder in this layout."""
    shapes: dict[str, tuple[int, ...]] = {}
    for entry in expand_table(table, shape.model.num_layers):
        resolved = shape.resolve(entry.published_shape)
        shapes |= dict.fromkeys(entry.published, resolved) | dict.fromkeys(entry.zero_biases, resolved[:1])
    return shapes


def expand_table(table: Table, num_layers: int) -> list[Entry]:
    """Return the rows of the table with one row per layer instead of `{i}`."""
    expanded: list[Entry] = []
    for entry in table:
        expanded += [entry.for_layer(layer) for layer in range(num_layers)] if "{i}" in entry.internal else [entry]
    return expanded


def without_padding(internal: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Return internal weights as views without the rows that pad the vocabulary."""
    padded = {entry.internal for entry in NEOBERT if entry.rule is STRIP_PADDING}
    return {name: tensor[: shape.vocab_size] if name in padded else tensor for name, tensor in internal.items()}


def join_halves(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the model from a checkpoint, which stores the gate and the value of SwiGLU apart."""
    tensors = {name: tensor for name, tensor in stored.items() if not name.endswith(_HALVES)}
    for name, gate in stored.items():
        whole = name.removesuffix(_HALVES[0])
        if whole != name and whole + _HALVES[1] in stored:
            tensors[whole] = torch.cat([gate, stored[whole + _HALVES[1]]])
    return tensors


def split_halves(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Reverse `join_halves`."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("mlp.linear_fc1.weight"):
            stored |= {name + half: part.contiguous() for half, part in zip(_HALVES, tensor.chunk(2), strict=True)}
        else:
            stored[name] = tensor
    return stored


def check_tensors(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    *,
    remedy: str = "convert an earlier iteration, from before the loss diverged",
) -> None:
    if missing := [name for name in expected if name not in tensors]:
        raise ConversionError(f"missing: {listed(missing)}; a NeoBERT of this shape has {len(expected)} tensors.")
    if unknown := [name for name in tensors if name not in expected]:
        raise ConversionError(f"not part of a NeoBERT of this shape: {listed(unknown)}; check its number of layers.")
    for name, wanted in expected.items():
        if tuple(tensors[name].shape) != wanted:
            raise ConversionError(f"{name} has shape {tuple(tensors[name].shape)}; the settings give it {wanted}.")
    # A finite sum has finite terms; it costs a tenth of looking at each.
    suspects = [name for name in expected if not tensors[name].sum().isfinite()]
    if bad := [name for name in suspects if not tensors[name].isfinite().all()]:
        first, others = tensors[bad[0]], f", and so have {listed(bad[1:])}" if bad[1:] else ""
        raise ConversionError(
            f"{bad[0]} has {int((~first.isfinite()).sum())} of {first.numel()} values that are NaN or infinite"
            f"{others}; {remedy}."
        )
