"""A padded batch is computed without its padding, with the outputs and gradients of the padded computation."""

from typing import Any

import pytest
import torch
from tiny_neobert import FlashKernel, build_documents, build_model, gap, pad
from torch import Tensor
from transformers import modeling_flash_attention_utils as flash_attention

from megatron_neobert.huggingface import modeling_neobert
from megatron_neobert.huggingface.modeling_neobert import (
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
)

BATCH = pad(build_documents())
MASK = BATCH["attention_mask"]
ROUNDING = 1e-5  # measured at most 2.9e-7 in losses and states, 7.1e-7 in gradients
WRONG = 1e-2  # smallest difference of the negative control; measured 1.3
LABELS = {
    NeoBERTForMaskedLM: BATCH["input_ids"].masked_fill(MASK == 0, -100),
    NeoBERTForTokenClassification: (BATCH["input_ids"] % 3).masked_fill(MASK == 0, -100),
    NeoBERTForSequenceClassification: torch.tensor([0, 2, 1]),
}


def block_shapes(model: Any) -> list[tuple[int, ...]]:
    """Return the list to which each forward appends the shape of the first block's input."""
    shapes: list[tuple[int, ...]] = []
    block = model.base_model.transformer_encoder[0]
    block.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    return shapes


def compute(model: Any, mask: Tensor) -> dict[str, Tensor]:
    """Return the loss, hidden states at tokens, and gradients."""
    output = model(
        BATCH["input_ids"], attention_mask=mask, labels=LABELS[type(model)], output_hidden_states=True, use_cache=False
    )
    output.loss.backward()
    states = {f"state {i}": state[MASK.bool()].detach() for i, state in enumerate(output.hidden_states)}
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    return {"loss": output.loss.detach(), **states, **gradients}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("kind", list(LABELS))
def test_losses_states_and_gradients_equal_those_of_padded_blocks(
    kind: type, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
):
    model = build_model(kind, num_labels=3, classifier_dropout=0.0).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    shapes = block_shapes(model)
    unpadded = compute(model, MASK)
    monkeypatch.setattr(modeling_neobert, "may_unpad", lambda *_: False)
    padded, unmasked = compute(model, MASK), compute(model, torch.ones_like(MASK))
    assert {shape[:2] for shape in shapes} == {(1, 16), (3, 9)} and shapes[0][:2] == (1, 16)
    gaps = {name: gap(unpadded[name], padded[name]) for name in padded}
    assert max(gaps.values()) <= ROUNDING, gaps
    assert gap(unmasked["state 2"], padded["state 2"]) > WRONG


@torch.no_grad()
@pytest.mark.parametrize(
    "mask",
    [MASK.flip(1), torch.tensor([[1, 0, 1] * 3] * 3), torch.tensor([[1] * 9, [0] * 9, [1] * 9]), 0 * MASK],
    ids=["left", "holes", "empty row", "empty batch"],
)
def test_padding_may_be_anywhere(mask: Tensor, monkeypatch: pytest.MonkeyPatch):
    model, chosen = build_model(), mask.bool()
    positions = torch.arange(9)[None] * 2
    inputs = {"input_ids": BATCH["input_ids"], "attention_mask": mask, "position_ids": positions}
    unpadded = model(**inputs).logits
    monkeypatch.setattr(modeling_neobert, "may_unpad", lambda *_: False)
    assert unpadded.isfinite().all() and unpadded.shape == (3, 9, 101)
    assert not chosen.any() or gap(unpadded[chosen], model(**inputs).logits[chosen]) < ROUNDING


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["flash_attention_2", "sdpa"])
def test_packed_kernels_get_the_bounds_of_the_rows(implementation: str, monkeypatch: pytest.MonkeyPatch):
    """The kernel stands in for flash-attn's and for torch's, which take the same arguments in the same order."""
    expected, kernel = build_model()(**BATCH).logits, FlashKernel(monkeypatch)
    if implementation == "sdpa":
        monkeypatch.setattr(modeling_neobert, "has_packed_kernel", lambda *_: True)
        monkeypatch.setattr(modeling_neobert, "varlen_attn", flash_attention._flash_varlen_fn)
    actual = build_model(attention=implementation)(**BATCH).logits
    assert gap(actual[MASK.bool()], expected[MASK.bool()]) < ROUNDING
    assert [(call["starts"].tolist(), call["longest"]) for call in kernel.calls] == [([0, 9, 10, 16], (9, 9))] * 2


@torch.no_grad()
@pytest.mark.parametrize(
    ("implementation", "options", "shape"),
    [
        ("sdpa", {}, (1, 16)),
        ("sdpa", {"output_attentions": True}, (3, 9)),
        ("eager", {}, (3, 9)),
        ("flex_attention", {}, (3, 9)),
    ],
)
def test_blocks_keep_the_padding_for_weights_and_for_eager_and_flex_attention(
    implementation: str, options: dict[str, bool], shape: tuple[int, int]
):
    model = build_model(attention=implementation)
    shapes = block_shapes(model)
    with torch.compiler.set_stance("force_eager"):  # transformers compiles flex attention, which needs a C++ compiler
        model(**BATCH, **options)
    assert shapes[0][:2] == shape


@torch.no_grad()
def test_an_exported_graph_computes_other_masks():
    model = build_model()
    exported = torch.export.export(model, (BATCH["input_ids"], MASK), strict=False).module()
    mask = MASK.roll(1, 0)
    inputs = (BATCH["input_ids"], mask)
    assert gap(exported(*inputs).logits[mask.bool()], model(*inputs).logits[mask.bool()]) < ROUNDING
