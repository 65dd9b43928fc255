"""Mapping tables: every value is published once, in the right order, and wrong tensors are refused."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from checkpoint_conversion.mapping import (
    EUROBERT,
    NEOBERT,
    TABLES,
    ModelShape,
    Table,
    expand_table,
    join_halves,
    split_halves,
    to_internal,
    to_published,
)
from megatron_neobert.config.schema import ModelConfig
from megatron_neobert.errors import ConversionError

MODEL = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2, ffn_hidden_size=6)
SHAPE = ModelShape(MODEL, vocab_size=11, padded_vocab_size=16)


def build_internal(shape: ModelShape = SHAPE) -> dict[str, Tensor]:
    """Return random tensors under the internal names, with zeros in the rows that pad the vocabulary."""
    torch.manual_seed(3)
    entries = expand_table(NEOBERT, shape.model.num_layers)
    tensors = {entry.internal: torch.randn(shape.resolve(entry.internal_shape)) for entry in entries}
    for name in ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias"):
        tensors[name][shape.vocab_size :] = 0
    return tensors


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_value_is_published_exactly_once(table: Table):
    """All internal values are different; published values are the same numbers, and EuroBERT's zero biases."""
    internal, first = {}, 1
    for name, tensor in build_internal().items():
        used = tensor[: SHAPE.vocab_size] if SHAPE.resolve("V")[0] == len(tensor) and "layers" not in name else tensor
        internal[name] = torch.zeros_like(tensor)
        internal[name][: len(used)] = torch.arange(first, first + used.numel()).view_as(used)
        first += used.numel()
    published = to_published(internal, SHAPE, table)
    values = Counter(int(value) for tensor in published.values() for value in tensor.flatten())
    zeros = values.pop(0, 0)
    assert values == Counter(range(1, first))
    assert zeros == (2 * (2 * 6 + 8) if table is EUROBERT else 0)  # gate, up and down biases of two layers


def test_rotary_pairs_become_adjacent_in_queries_and_keys_only():
    """With heads of width 4, internal channel 0 pairs with 2 and 1 with 3, so published rows are 0, 2, 1, 3."""
    internal = build_internal()
    rows = torch.arange(24.0)  # q0 k0 v0 q1 k1 v1, four rows each
    internal["decoder.layers.0.self_attention.linear_qkv.weight"] = rows[:, None].expand(24, 8).contiguous()
    published = to_published(internal, SHAPE, NEOBERT)["model.transformer_encoder.0.qkv.weight"][:, 0]
    assert published.tolist() == [
        0, 2, 1, 3, 4, 6, 5, 7, 8, 9, 10, 11,
        12, 14, 13, 15, 16, 18, 17, 19, 20, 21, 22, 23,
    ]  # fmt: skip


def test_halves_of_swiglu_are_stored_separately_and_joined_in_order():
    internal = build_internal(replace(SHAPE, model=replace(MODEL, num_layers=12)))
    stored = split_halves(internal)
    name = "decoder.layers.11.mlp.linear_fc1.weight"
    assert torch.equal(stored[f"{name}_w"], internal[name][: len(internal[name]) // 2]), "the gate comes first"
    restored = join_halves(stored)
    assert restored.keys() == internal.keys()
    assert all(torch.equal(restored[name], tensor) for name, tensor in internal.items())


def edit(name: str, change: Callable[[Tensor], object]) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: change(tensors[name])


def add(name: str, *shape: int) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("decoder.final_layernorm.weight"), r"^missing: decoder\.final_.* has 16 tensors"),
        (add("decoder.layers.2.mlp.x", 1), r"^not part of .*: decoder\.layers\.2\.mlp\.x;"),
        (add("decoder.layers.1.mlp.linear_fc2.weight", 8, 7), r"linear_fc2\.weight has shape \(8, 7\).*\(8, 6\)"),
        (edit("output_layer.weight", lambda tensor: tensor[2, 1:4].fill_(torch.nan)), r"weight has 3 of 128 values"),
        (edit("output_layer.weight", lambda tensor: tensor[2, 1:4].fill_(torch.inf)), r"weight has 3 of 128 values"),
        (
            edit("output_layer.bias", lambda tensor: tensor[12].fill_(1)),
            r"bias is not zero in rows 11 to 15.*11 tokens",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_refused_by_name(change, message):
    internal = build_internal()
    change(internal)
    with pytest.raises(ConversionError, match=message):
        to_published(internal, SHAPE, NEOBERT)


def test_published_bias_that_is_not_zero_is_refused():
    published = to_published(build_internal(), SHAPE, EUROBERT)
    published["model.layers.1.mlp.down_proj.bias"][5] = 0.5
    with pytest.raises(ConversionError, match=r"layers\.1\.mlp\.down_proj\.bias has 1 nonzero values"):
        to_internal(published, SHAPE, EUROBERT)
