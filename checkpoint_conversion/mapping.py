"""Which weight is which: one table per published layout, read in both directions.

The internal side is the Megatron model, one tensor per layer under the names that its checkpoints use (those of
Transformer Engine, from any classes that trained it). The published sides are NeoBERT's own names, and those of Hugging
Face's EuroBERT and of a Llama that looks both ways, which compute the same function; tensor_rules.py has what
differs beyond names. Nothing here touches a disk.

Source: tests/parity/test_published_models.py shows that the functions are equal, and not equal under the other
rotary convention.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoint_conversion.tensor_rules import (
    COPY,
    PAIR_ADJACENT,
    SPLIT_HALVES,
    SPLIT_HEADS,
    STRIP_PADDING,
    ModelShape,
    Rule,
)
from megatron_neobert.errors import ConversionError

_HALVES = ("_w", "_v")  # what megatron.core adds to the name, mlp.py: apply_swiglu_sharded_factory
LAYERS_PREFIX = "decoder.layers."  # of the names that a checkpoint gives its layers
_LISTED_NAMES = 4  # names that a message spells out before it counts the rest


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
        def numbered(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(name.replace("{i}", str(layer)) for name in names)

        (internal,) = numbered((self.internal,))
        published, zero_biases = numbered(self.published), numbered(self.zero_biases)
        return Entry(internal, self.internal_shape, self.rule, published, self.published_shape, zero_biases)


Table = tuple[Entry, ...]

_ATTENTION = "decoder.layers.{i}.self_attention."
_MLP = "decoder.layers.{i}.mlp."


# fmt: off
def _neobert(*feed_forward: Entry) -> Table:
    layer = "model.transformer_encoder.{i}."
    return (
        Entry("embedding.word_embeddings.weight", "V h", STRIP_PADDING, ("model.encoder.weight",), "v h"),
        Entry(f"{_ATTENTION}linear_qkv.layer_norm_weight", "h", COPY, (f"{layer}attention_norm.weight",), "h"),
        Entry(f"{_ATTENTION}linear_qkv.weight", "3h h", PAIR_ADJACENT, (f"{layer}qkv.weight",), "3h h"),
        Entry(f"{_ATTENTION}linear_proj.weight", "h h", COPY, (f"{layer}wo.weight",), "h h"),
        Entry(f"{_MLP}linear_fc1.layer_norm_weight", "h", COPY, (f"{layer}ffn_norm.weight",), "h"),
        *feed_forward,
        Entry(f"{_MLP}linear_fc2.weight", "h f", COPY, (f"{layer}ffn.w3.weight",), "h f"),
        Entry("decoder.final_layernorm.weight", "h", COPY, ("model.layer_norm.weight",), "h"),
        Entry("output_layer.weight", "V h", STRIP_PADDING, ("decoder.weight",), "v h"),
        Entry("output_layer.bias", "V", STRIP_PADDING, ("decoder.bias",), "v"),
    )


def _llama_like(prefix: str, head: str, *, has_biases: bool) -> Table:
    """The names that Llama gave its parts and EuroBERT kept.

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


_FC1 = f"{_MLP}linear_fc1.weight"
_W12, _W1, _W2 = (f"model.transformer_encoder.{{i}}.ffn.{name}.weight" for name in ("w12", "w1", "w2"))

NEOBERT = _neobert(Entry(_FC1, "2f h", COPY, (_W12,), "2f h"))
# Of the fork pszemraj/NeoBERT, whose feed-forward keeps both halves apart; read, never written.
NEOBERT_UNPACKED = _neobert(Entry(_FC1, "2f h", SPLIT_HALVES, (_W1, _W2), "f h"))
EUROBERT = _llama_like("model.", "lm_head", has_biases=True)
LLAMA = _llama_like("", "decoder", has_biases=False)  # the class has no head; ours lies beside it
# fmt: on

TABLES = {"eurobert": EUROBERT, "neobert": NEOBERT, "neobert-unpacked": NEOBERT_UNPACKED, "llama": LLAMA}


def to_published(internal: Mapping[str, Tensor], shape: ModelShape, table: Table) -> dict[str, Tensor]:
    """The weights of a Megatron model under the names of a published layout, dtypes kept.

    Raises:
        ConversionError: A tensor is missing, unknown, of another shape or not finite, or the rows that pad the
            vocabulary are not zero.
    """
    entries = expand_table(table, shape.num_layers)
    _check_tensors(internal, {entry.internal: shape.resolve(entry.internal_shape) for entry in entries})
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
    _check_tensors(published, _shapes_of(entries, shape))
    return published


def to_internal(published: Mapping[str, Tensor], shape: ModelShape, table: Table) -> dict[str, Tensor]:
    """The way back of `to_published`; rows that pad the vocabulary are zeros.

    Raises:
        ConversionError: As there, or a bias that NeoBERT does not have is not zero.
    """
    entries = expand_table(table, shape.num_layers)
    _check_tensors(published, _shapes_of(entries, shape), remedy="fetch the weights again, or use others")
    internal: dict[str, Tensor] = {}
    for entry in entries:
        for name in entry.zero_biases:
            if nonzero := int(published[name].count_nonzero()):
                raise ConversionError(
                    f"{name} has {nonzero} values other than zero; NeoBERT has no such bias to hold them."
                )
        internal[entry.internal] = entry.rule.restore([published[name] for name in entry.published], shape)
    _check_tensors(internal, {entry.internal: shape.resolve(entry.internal_shape) for entry in entries})
    return internal


def published_shapes(table: Table, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of a folder in this layout, and its shape."""
    return _shapes_of(expand_table(table, shape.num_layers), shape)


def expand_table(table: Table, num_layers: int) -> list[Entry]:
    """The rows of every layer, and those that belong to none."""
    expanded: list[Entry] = []
    for entry in table:
        expanded += [entry.for_layer(layer) for layer in range(num_layers)] if "{i}" in entry.internal else [entry]
    return expanded


def without_padding(internal: Mapping[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Internal weights as views without the rows that pad the vocabulary."""
    padded = {entry.internal for entry in NEOBERT if entry.rule is STRIP_PADDING}
    return {name: tensor[: shape.vocab_size] if name in padded else tensor for name, tensor in internal.items()}


def join_halves(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the model out of a checkpoint, which stores the gate and the value of SwiGLU apart."""
    tensors = {name: tensor for name, tensor in stored.items() if not name.endswith(_HALVES)}
    for name, gate in stored.items():
        whole = name.removesuffix(_HALVES[0])
        if whole != name and whole + _HALVES[1] in stored:
            tensors[whole] = torch.cat([gate, stored[whole + _HALVES[1]]])
    return tensors


def split_halves(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The way back of `join_halves`."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("mlp.linear_fc1.weight"):
            stored |= {name + half: part.contiguous() for half, part in zip(_HALVES, tensor.chunk(2), strict=True)}
        else:
            stored[name] = tensor
    return stored


def _shapes_of(entries: list[Entry], shape: ModelShape) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        resolved = shape.resolve(entry.published_shape)
        shapes |= dict.fromkeys(entry.published, resolved) | dict.fromkeys(entry.zero_biases, resolved[:1])
    return shapes


def _check_tensors(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    *,
    remedy: str = "convert an earlier iteration, from before the loss diverged",
) -> None:
    if missing := [name for name in expected if name not in tensors]:
        raise ConversionError(f"missing: {_list(missing)}; a NeoBERT of this shape has {len(expected)} tensors.")
    if unknown := [name for name in tensors if name not in expected]:
        raise ConversionError(f"not part of a NeoBERT of this shape: {_list(unknown)}; check its number of layers.")
    for name, wanted in expected.items():
        if tuple(tensors[name].shape) != wanted:
            raise ConversionError(f"{name} has shape {tuple(tensors[name].shape)}; the settings give it {wanted}.")
    # A finite sum has finite terms; it costs a tenth of looking at each.
    suspects = [name for name in expected if not tensors[name].sum().isfinite()]
    if bad := [name for name in suspects if not tensors[name].isfinite().all()]:
        first, others = tensors[bad[0]], f", and so have {_list(bad[1:])}" if bad[1:] else ""
        raise ConversionError(
            f"{bad[0]} has {int((~first.isfinite()).sum())} of {first.numel()} values that are NaN or infinite"
            f"{others}; {remedy}."
        )


def _list(names: list[str]) -> str:
    """The first names, and the number of the others."""
    return ", ".join(names[:_LISTED_NAMES]) + f" and {len(names) - _LISTED_NAMES} more" * (len(names) > _LISTED_NAMES)
