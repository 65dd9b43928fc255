"""Tensors that do not fit the model are refused before they are mapped."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from checkpoint_conversion.mapping import (
    EUROBERT,
    NEOBERT,
    ModelShape,
    expand_table,
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
