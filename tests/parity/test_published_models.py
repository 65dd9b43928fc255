"""The reference, transformers' EuroBERT and the model of exported `neobert` folders compute the same function.

The reference and `neobert` rotate adjacent channels of a head, and EuroBERT rotates its halves. All weights are
converted through the internal layout. Tests with other settings or conventions are the controls.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tolerances import EUROBERT_LOGITS, MODELING_LOGITS
from torch import Tensor
from transformers import EuroBertConfig, EuroBertForMaskedLM

from checkpoint_conversion.compare import Comparison, build_prompts, compare_logits, make_loud
from checkpoint_conversion.mapping import (
    COPY,
    NEOBERT,
    PAIR_ADJACENT,
    TABLES,
    ModelShape,
    Table,
    to_internal,
    to_published,
)
from megatron_neobert.config.schema import ModelConfig
from megatron_neobert.huggingface.modeling_neobert import NeoBERTConfig, NeoBERTForMaskedLM
from megatron_neobert.model.reference import ReferenceConfig, ReferenceNeoBERT

SIZES = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 96}
CONFIG = ReferenceConfig(**SIZES, vocab_size=203)
SHAPE = ModelShape(ModelConfig(**SIZES), 203, 256)
PROMPTS = build_prompts(203, longest=128)
COMMON = {"vocab_size": 203, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
GATES = {"eurobert": EUROBERT_LOGITS.gate, "neobert": MODELING_LOGITS.gate}
UNPERMUTED = tuple(replace(entry, rule=COPY) if entry.rule is PAIR_ADJACENT else entry for entry in NEOBERT)


@pytest.fixture(scope="module")
def reference() -> ReferenceNeoBERT:
    return make_loud(ReferenceNeoBERT(CONFIG))


def build(layout: str, weights: dict[str, Tensor], *, attention: str = "sdpa", **changes: Any) -> Any:
    """Build the model of a layout with the settings of the reference and `changes`."""
    if layout == "eurobert":
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": CONFIG.rotary_base}}
        settings = {**COMMON, "intermediate_size": 96, "rms_norm_eps": CONFIG.norm_epsilon, "mlp_bias": True, **rope}
        model: Any = EuroBertForMaskedLM(EuroBertConfig(**{**settings, "pad_token_id": 0, **changes})).eval()
    else:
        width = 96 * 3 // 2  # SwiGLU uses two thirds
        sizes = {"intermediate_size": width, "norm_eps": CONFIG.norm_epsilon, "rope_theta": CONFIG.rotary_base}
        model = NeoBERTForMaskedLM(NeoBERTConfig(**{**COMMON, **sizes, **changes})).eval()
    model.load_state_dict(weights)
    model.set_attn_implementation(attention)
    return model


def weights_for(
    layout: str,
    reference: ReferenceNeoBERT,
    table: Table = NEOBERT,
    change: Callable[[dict[str, Tensor]], object] = lambda internal: None,
) -> dict[str, Tensor]:
    """Convert the reference's weights with `table` to the internal layout, apply `change`, and convert to `layout`."""
    internal = to_internal(reference.state_dict(), SHAPE, table)
    change(internal)
    return to_published(internal, SHAPE, TABLES[layout])


@torch.no_grad()
def compare(reference: ReferenceNeoBERT, model: Any) -> list[Comparison]:
    """Compare the logits on a padded batch, and for NeoBERT also on packed documents."""
    assert not PROMPTS.attention_mask_bs.all(), "the prompts must be padded"
    results = [model(*PROMPTS).logits]
    if isinstance(model, NeoBERTForMaskedLM):
        tokens_t, starts_n = PROMPTS.packed
        results.append(PROMPTS.unpack(model(tokens_t[None], cu_seqlens=starts_n).logits[0]))
    return [compare_logits(reference(*PROMPTS), logits, PROMPTS.attention_mask_bs) for logits in results]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", GATES)
def test_published_model_computes_the_logits_of_the_reference(reference: Any, layout: str, attention: str):
    weights = weights_for(layout, reference)
    for comparison in compare(reference, build(layout, weights, attention=attention)):
        assert comparison.max_abs > 3 * comparison.relative, "logits too small to show an error"
        assert comparison.relative <= GATES[layout]
        assert comparison.argmax_agreement == 1.0


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("eurobert", {"rms_norm_eps": 1e-6}),
        ("eurobert", {"rope_parameters": {"rope_type": "default", "rope_theta": 250_000.0}}),
        ("eurobert", {"hidden_act": "gelu"}),
        ("neobert", {"norm_eps": 1e-6}),
        ("neobert", {"rope_theta": 250_000.0}),
    ],
    ids=str,
)
def test_another_setting_gives_other_logits(reference: Any, layout: str, changes: dict[str, Any]):
    comparisons = compare(reference, build(layout, weights_for(layout, reference), **changes))
    assert min(comparison.relative for comparison in comparisons) > 10 * GATES[layout]


@pytest.mark.parametrize("layout", GATES)
def test_other_rotary_convention_gives_other_logits(reference: Any, layout: str):
    comparisons = compare(reference, build(layout, weights_for(layout, reference, UNPERMUTED)))
    assert min(comparison.relative for comparison in comparisons) > 1000 * GATES[layout]


@pytest.mark.parametrize("layout", GATES)
def test_exchanged_gate_and_up_projections_give_other_logits(reference: Any, layout: str):
    def exchange(internal: dict[str, Tensor]) -> None:
        fused = [name for name in internal if name.endswith("linear_fc1.weight")]
        internal.update({name: internal[name].roll(CONFIG.ffn_hidden_size, dims=0) for name in fused})

    comparisons = compare(reference, build(layout, weights_for(layout, reference, change=exchange)))
    assert min(comparison.relative for comparison in comparisons) > 1000 * GATES[layout]
