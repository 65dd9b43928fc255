"""The mapping table: nothing lost, nothing invented, and the same table read both ways."""

from collections import Counter
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
from megatron_neobert.errors import ConversionError

SHAPE = ModelShape(
    num_layers=2, hidden_size=8, num_attention_heads=2, ffn_hidden_size=6, vocab_size=11, padded_vocab_size=16
)


def build_internal(shape: ModelShape = SHAPE, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random tensors under the internal names, zeros in the rows that pad the vocabulary."""
    torch.manual_seed(3)
    rows = expand_table(NEOBERT, shape.num_layers)
    tensors = {row.internal: torch.randn(shape.resolve(row.internal_shape)).to(dtype) for row in rows}
    for name in ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias"):
        tensors[name][shape.vocab_size :] = 0
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_weights_survive_the_round_trip_bit_for_bit(table: Table, dtype: torch.dtype):
    internal = build_internal(dtype=dtype)
    restored = to_internal(to_published(internal, SHAPE, table), SHAPE, table)
    assert restored.keys() == internal.keys()
    for name, tensor in internal.items():
        assert restored[name].dtype == dtype
        assert torch.equal(restored[name], tensor), name


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_value_is_published_exactly_once(table: Table):
    """Each internal value is a number of its own; published values are those numbers and EuroBERT's zero biases."""
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


def test_rotary_pairs_become_adjacent_in_queries_and_keys_and_values_stay():
    """Heads of width 4: internal channel 0 pairs with 2 and 1 with 3, so published rows are 0, 2, 1, 3."""
    internal = build_internal()
    rows = torch.arange(24.0)  # q0 k0 v0 q1 k1 v1, four rows each
    internal["decoder.layers.0.self_attention.linear_qkv.weight"] = rows[:, None].expand(24, 8).contiguous()
    published = to_published(internal, SHAPE, NEOBERT)["model.transformer_encoder.0.qkv.weight"][:, 0]
    assert published.tolist() == [
        0, 2, 1, 3, 4, 6, 5, 7, 8, 9, 10, 11,
        12, 14, 13, 15, 16, 18, 17, 19, 20, 21, 22, 23,
    ]  # fmt: skip


def test_eurobert_gets_the_heads_of_queries_keys_and_values_apart():
    internal = build_internal()
    rows = torch.arange(24.0)
    internal["decoder.layers.1.self_attention.linear_qkv.weight"] = rows[:, None].expand(24, 8).contiguous()
    published = to_published(internal, SHAPE, EUROBERT)
    heads = [published[f"model.layers.1.self_attn.{letter}_proj.weight"][:, 0].tolist() for letter in "qkv"]
    assert heads == [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 16, 17, 18, 19], [8, 9, 10, 11, 20, 21, 22, 23]]


def test_gate_is_the_first_half_of_the_fused_matrix():
    internal = build_internal()
    fused = internal["decoder.layers.0.mlp.linear_fc1.weight"]
    published = to_published(internal, SHAPE, EUROBERT)
    assert torch.equal(published["model.layers.0.mlp.gate_proj.weight"], fused[:6])
    assert torch.equal(published["model.layers.0.mlp.up_proj.weight"], fused[6:])


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_published_tensors_share_no_memory_which_safetensors_would_refuse(table: Table, heads: int):
    shape = replace(SHAPE, num_attention_heads=heads)
    for name, tensor in to_published(build_internal(shape), shape, table).items():
        assert tensor.is_contiguous(), name
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_no_name_stands_twice_in_a_table(table: Table):
    rows = expand_table(table, 3)
    published = [name for row in rows for name in row.published + row.zero_biases]
    assert len(published) == len(set(published))
    assert len({row.internal for row in rows}) == len(rows) == 4 + 6 * 3


def test_halves_of_swiglu_are_stored_apart_and_joined_in_order():
    internal = build_internal(replace(SHAPE, num_layers=12))
    stored = split_halves(internal)
    name = "decoder.layers.11.mlp.linear_fc1.weight"
    assert torch.equal(stored[f"{name}_w"], internal[name][: len(internal[name]) // 2]), "the gate comes first"
    restored = join_halves(stored)
    assert restored.keys() == internal.keys()
    assert all(torch.equal(restored[name], tensor) for name, tensor in internal.items())


def test_missing_tensor_is_refused_by_name():
    internal = build_internal()
    del internal["decoder.final_layernorm.weight"]
    with pytest.raises(ConversionError, match=r"^missing: decoder\.final_layernorm\.weight; .* has 16 tensors"):
        to_published(internal, SHAPE, NEOBERT)


def test_layer_too_many_is_refused_with_the_number_of_its_tensors():
    internal = build_internal(replace(SHAPE, num_layers=3))
    with pytest.raises(ConversionError, match=r"^not part of .*: decoder\.layers\.2\..* and 2 more;"):
        to_published(internal, SHAPE, EUROBERT)


def test_other_width_is_refused_with_both_shapes():
    internal = build_internal()
    internal["decoder.layers.1.mlp.linear_fc2.weight"] = torch.zeros(8, 7)
    with pytest.raises(
        ConversionError, match=r"decoder\.layers\.1\.mlp\.linear_fc2\.weight has shape \(8, 7\).*\(8, 6\)"
    ):
        to_published(internal, SHAPE, NEOBERT)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_value_that_is_not_finite_is_refused_with_their_number(value: float):
    internal = build_internal()
    internal["decoder.layers.0.self_attention.linear_proj.weight"][2, 1:4] = value
    with pytest.raises(ConversionError, match=r"linear_proj\.weight has 3 of 64 values that are NaN or infinite"):
        to_published(internal, SHAPE, EUROBERT)


def test_padding_of_the_vocabulary_that_is_not_zero_is_refused():
    internal = build_internal()
    internal["output_layer.bias"][12] = 1.0
    with pytest.raises(ConversionError, match=r"output_layer\.bias is not zero in its rows 11 to 15.*11 tokens"):
        to_published(internal, SHAPE, NEOBERT)


def test_bias_that_neobert_does_not_have_is_refused_on_the_way_back():
    published = to_published(build_internal(), SHAPE, EUROBERT)
    published["model.layers.1.mlp.down_proj.bias"][5] = 0.5
    with pytest.raises(ConversionError, match=r"layers\.1\.mlp\.down_proj\.bias has 1 values other than zero"):
        to_internal(published, SHAPE, EUROBERT)
