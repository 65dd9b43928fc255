"""The reference, with adjacent rotary pairs, and Hugging Face's EuroBERT, with paired halves, are one function."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tolerances import EUROBERT_LOGITS
from torch import Tensor
from transformers import EuroBertConfig, EuroBertForMaskedLM

from checkpoint_conversion.comparison import Comparison, build_prompts, compare_logits, make_loud
from checkpoint_conversion.mapping import EUROBERT, NEOBERT, Table, to_internal, to_published
from checkpoint_conversion.tensor_rules import COPY, PAIR_ADJACENT, ModelShape
from megatron_neobert.model.reference import ReferenceConfig, ReferenceNeoBERT

CONFIG = ReferenceConfig(num_layers=4, hidden_size=64, num_attention_heads=4, ffn_hidden_size=96, vocab_size=203)
SHAPE = ModelShape(
    num_layers=4, hidden_size=64, num_attention_heads=4, ffn_hidden_size=96, vocab_size=203, padded_vocab_size=256
)


@pytest.fixture(scope="module")
def reference() -> ReferenceNeoBERT:
    return make_loud(ReferenceNeoBERT(CONFIG))


def build_eurobert(weights: dict[str, Tensor], **changes: Any) -> EuroBertForMaskedLM:
    """EuroBERT with the reference's settings, some of them changed."""
    settings = {
        "vocab_size": CONFIG.vocab_size,
        "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.ffn_hidden_size,
        "num_hidden_layers": CONFIG.num_layers,
        "num_attention_heads": CONFIG.num_attention_heads,
        "rms_norm_eps": CONFIG.norm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": CONFIG.rotary_base},
        "mlp_bias": True,
        "pad_token_id": 0,
    }
    model = EuroBertForMaskedLM(EuroBertConfig(**{**settings, **changes})).eval()
    model.load_state_dict(weights)
    return model


def compare(reference: ReferenceNeoBERT, eurobert: EuroBertForMaskedLM) -> Comparison:
    prompts = build_prompts(CONFIG.vocab_size, longest=128)
    assert not prompts.attention_mask_bs.all(), "the prompts must be padded"
    with torch.no_grad():
        return compare_logits(reference(*prompts), eurobert(*prompts).logits, prompts.attention_mask_bs)


def to_eurobert(reference: ReferenceNeoBERT, table: Table = NEOBERT) -> dict[str, Tensor]:
    """The published weights through the internal layout to EuroBERT's."""
    return to_published(to_internal(reference.state_dict(), SHAPE, table), SHAPE, EUROBERT)


def test_eurobert_computes_the_logits_of_the_reference(reference: ReferenceNeoBERT):
    comparison = compare(reference, build_eurobert(to_eurobert(reference)))
    assert comparison.largest_logit > 3, "logits too small to show an error"
    assert comparison.relative <= EUROBERT_LOGITS.gate
    assert comparison.argmax_agreement == 1.0


def test_eurobert_without_the_rotary_permutation_computes_something_else(reference: ReferenceNeoBERT):
    unpermuted = tuple(replace(entry, rule=COPY) if entry.rule is PAIR_ADJACENT else entry for entry in NEOBERT)
    eurobert = build_eurobert(to_eurobert(reference, unpermuted))
    assert compare(reference, eurobert).relative > 1000 * EUROBERT_LOGITS.gate


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 1e-6},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 250_000.0}},
        {"hidden_act": "gelu"},
    ],
    ids=["norm epsilon", "rotary base", "activation"],
)
def test_eurobert_with_another_setting_computes_something_else(reference: ReferenceNeoBERT, changes: dict[str, Any]):
    eurobert = build_eurobert(to_eurobert(reference), **changes)
    assert compare(reference, eurobert).relative > 10 * EUROBERT_LOGITS.gate


def test_gate_and_up_exchanged_compute_something_else(reference: ReferenceNeoBERT):
    weights = to_eurobert(reference)
    for layer in range(CONFIG.num_layers):
        gate, up = (f"model.layers.{layer}.mlp.{name}_proj.weight" for name in ("gate", "up"))
        weights[gate], weights[up] = weights[up], weights[gate]
    assert compare(reference, build_eurobert(weights)).relative > 1000 * EUROBERT_LOGITS.gate
