"""Outputs, losses, attention and folders of the model follow the conventions of transformers.

A padded batch is computed without its padding, with the outputs and gradients of the padded computation.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import PUBLISHED
from json_files import read_json
from tiny_neobert import FlashKernel, build_config, build_documents, build_model, gap, logits_alone, pack, pad
from torch import Tensor
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments
from transformers import modeling_flash_attention_utils as flash_attention

from megatron_neobert.huggingface import modeling_neobert
from megatron_neobert.huggingface.modeling_neobert import (
    AUTO_MAP,
    PUBLISHED_MODEL,
    NeoBERTConfig,
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
)

DOCUMENTS = build_documents()
BATCH = pad(DOCUMENTS)


def build_labels() -> Tensor:
    """Return labels for every third token except padding."""
    chosen = (torch.arange(27).view(3, 9) % 3 == 0) & BATCH["attention_mask"].bool()
    return BATCH["input_ids"].masked_fill(~chosen, -100)


@pytest.mark.parametrize("num_items", [None, 0, torch.tensor(0)], ids=repr)
def test_loss_without_labels_is_zero_with_zero_gradients(num_items: Any):
    model = build_model()
    loss = model(**BATCH, labels=torch.full((3, 9), -100), num_items_in_batch=num_items).loss
    loss.backward()
    assert loss == 0
    assert model.decoder.bias.grad.abs().max() == 0


@pytest.mark.parametrize(
    ("num_labels", "labels", "loss", "kind"),
    [
        (1, torch.tensor([0.5, -1.0, 2.0]), lambda x, y: F.mse_loss(x[:, 0], y), "regression"),
        (3, torch.tensor([0, 2, 1]), F.cross_entropy, "single_label_classification"),
        (3, torch.eye(3), F.binary_cross_entropy_with_logits, "multi_label_classification"),
    ],
)
def test_sequence_classification_loss_follows_from_the_labels(num_labels: int, labels: Tensor, loss: Any, kind: str):
    model = build_model(NeoBERTForSequenceClassification, num_labels=num_labels)
    output = model(**BATCH, labels=labels)
    assert output.logits.shape == (3, num_labels)
    assert torch.allclose(output.loss, loss(output.logits, labels))
    assert model.config.problem_type == kind


@pytest.mark.parametrize(
    ("settings", "pool"),
    [({}, lambda state_sh: state_sh[0]), ({"classifier_pooling": "mean"}, lambda state_sh: state_sh.mean(0))],
    ids=["default", "mean"],
)
def test_sequence_classification_pools_the_first_token_or_the_mean_of_every_document(settings: Any, pool: Any):
    model = build_model(NeoBERTForSequenceClassification, num_labels=3, **settings)
    expected = model(**BATCH).logits
    pooled = torch.stack([pool(model.model(document[None]).last_hidden_state[0]) for document in DOCUMENTS])
    assert gap(expected, model.classifier(model.dense(pooled).tanh())) < 1e-5
    assert gap(model(DOCUMENTS[0][None]).logits, expected[:1]) < 1e-5
    row = pack(DOCUMENTS)
    assert gap(model(**row).logits, expected) < 1e-5
    assert gap(model(row["input_ids"], cu_seq_lens_q=row["cu_seqlens"]).logits, expected) < 1e-5


@pytest.mark.parametrize("kind", [NeoBERTForMaskedLM, NeoBERTForSequenceClassification])
def test_trainer_makes_the_same_update_with_one_and_two_micro_batches(kind: type, tmp_path):
    """A model with **kwargs that ignores num_items_in_batch would make an update twice as large with two."""
    labels = build_labels() if kind is NeoBERTForMaskedLM else torch.tensor([0, 1, 1])
    batch = BATCH | {"labels": labels}
    rows = [{name: values[row] for name, values in batch.items()} for row in (0, 2)]
    updates = []
    for rows_per_batch in (2, 1):
        model = build_model(kind, classifier_dropout=0.0)
        before = model.model.layer_norm.weight.detach().clone()
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=rows_per_batch,
            gradient_accumulation_steps=2 // rows_per_batch,
            max_steps=1,
            learning_rate=0.1,
            optim="sgd",
            max_grad_norm=0.0,
            save_strategy="no",
            use_cpu=True,
        )
        Trainer(model, arguments, train_dataset=rows).train()
        updates.append(model.model.layer_norm.weight.detach() - before)
    assert updates[0].abs().max() > 1e-4
    assert gap(updates[1], updates[0]) < 1e-3


# --- attention: padding and packed documents are masked by every implementation


ROUNDING = 1e-5  # difference between two orders of the same sums in fp32
WRONG = 1e-2  # smallest difference in the negative controls
with_eager_and_sdpa = pytest.mark.parametrize("implementation", ["eager", "sdpa"])


@with_eager_and_sdpa
@torch.no_grad()
def test_logits_of_packed_documents_equal_those_of_single_documents(implementation: str):
    model, row = build_model(attention=implementation), pack(DOCUMENTS)
    alone = logits_alone(model, DOCUMENTS)
    assert gap(model(**row).logits[0], alone) < ROUNDING
    assert gap(model(**row, max_seqlen=9, attention_mask=torch.ones_like(row["input_ids"])).logits[0], alone) < ROUNDING
    assert gap(model(input_ids=row["input_ids"]).logits[0], alone) > WRONG, (
        "without cu_seqlens, documents must matter to each other"
    )


def flatten(documents: list[Tensor]) -> dict[str, Any]:
    """Return the batch of transformers' collator, with the arguments that sentence-transformers sends."""
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collator([{"input_ids": document.tolist()} for document in documents], return_tensors="pt")
    return {name: value for name, value in batch.items() if name != "labels"}


@torch.no_grad()
def test_document_bounds_reach_every_layer_s_kernel_and_are_never_read_on_the_host(monkeypatch: pytest.MonkeyPatch):
    """Meta tensors have no values: to read one raises, as the control shows."""
    kernel, batch = FlashKernel(monkeypatch), flatten(DOCUMENTS)
    model, alone = build_model(attention="flash_attention_2"), logits_alone(build_model(), DOCUMENTS)
    assert gap(model(**batch).logits[0], alone) < ROUNDING
    on_device = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in batch.items()}
    model.bfloat16().to("meta")(**on_device)
    assert len(kernel.calls) == 2 * model.config.num_hidden_layers
    assert all(call["longest"] == (9, 9) and type(call["longest"][0]) is int for call in kernel.calls)
    for call in kernel.calls:
        assert call["starts"] is call["key_starts"] and call["starts"].dtype == torch.int32
    assert kernel.calls[0]["starts"].tolist() == [0, 9, 10, 16]
    # Without the longest length, the model reads it from the bounds, and a tensor on "meta" has no values to read.
    with pytest.raises(RuntimeError, match="meta tensor"):
        model(**{**on_device, "max_length_q": None})


@torch.no_grad()
def test_position_ids_of_packed_documents_are_used():
    model, row = build_model(), pack(DOCUMENTS)
    expected = model(**row).logits
    positions = torch.cat([torch.arange(len(document)) for document in DOCUMENTS])[None]
    assert torch.equal(model(**row, position_ids=positions).logits, expected)
    assert gap(model(**row, position_ids=positions * 3).logits, expected) > WRONG


@torch.no_grad()
def test_positions_of_a_bf16_model_are_not_rounded():
    """bf16 cannot represent odd numbers above 256, so rounded positions 4001 and 4002 would be equal."""
    model, tokens = build_model(max_position_embeddings=8192).bfloat16(), DOCUMENTS[0][None]
    far = torch.arange(9)[None] + 4001
    assert gap(model(tokens, position_ids=far).logits.float(), model(tokens).logits.float()) < 0.05
    rounded = far.bfloat16().long()
    assert gap(model(tokens, position_ids=rounded).logits.float(), model(tokens).logits.float()) > 0.2


ROW = pack(DOCUMENTS)
TOKENS = ROW["input_ids"]


@pytest.mark.parametrize(
    ("inputs", "fragments"),
    [
        ({"input_ids": TOKENS.expand(2, 16), "cu_seqlens": ROW["cu_seqlens"]}, ["2 rows"]),
        ({**ROW, "attention_mask": torch.arange(16)[None]}, ["attention_mask and cu_seqlens"]),
        ({"input_ids": TOKENS, "cu_seqlens": torch.tensor([0, 9, 15])}, ["[0, 9, 15]", "16 tokens"]),
        ({"input_ids": TOKENS, "cu_seqlens": torch.tensor([0, 9, 9, 16])}, ["[0, 9, 9, 16]", "must increase"]),
        ({**ROW, "max_seqlen": 8}, ["max_seqlen 8", "9 tokens"]),
        ({"input_ids": TOKENS, "attention_mask": torch.ones(1, 1, 16, 16)}, ["(1, 1, 16, 16)", "(1, 16)"]),
        ({"input_ids": TOKENS, "inputs_embeds": torch.ones(1, 16, 32)}, ["exactly one of them"]),
    ],
)
def test_invalid_inputs_are_refused_with_their_values(inputs: dict[str, Any], fragments: list[str]):
    with pytest.raises(ValueError) as caught:
        build_model()(**inputs)
    assert [fragment for fragment in fragments if fragment not in str(caught.value)] == []


# --- folders: code, tying and compilation


def test_saved_folder_has_its_own_code_which_names_license_and_origin(tmp_path: Path):
    """tests/compat and the examples of the model card run this code in processes without this project."""
    build_model().save_pretrained(tmp_path)
    head = (tmp_path / "modeling_neobert.py").read_text(encoding="utf-8").split("import", maxsplit=1)[0]
    assert "Apache License, Version 2.0" in head and "Python package megatron-neobert" in head


def test_model_has_no_buffers():
    """transformers 5 builds models on the meta device and fills in stored tensors; a buffer would be undefined."""
    assert list(build_model().buffers()) == []


def test_tied_weights_are_shared_also_after_saving(tmp_path: Path):
    model = build_model(tie_word_embeddings=True)
    assert model.decoder.weight is model.model.encoder.weight
    expected = model(**BATCH).logits
    model.save_pretrained(tmp_path)
    again = NeoBERTForMaskedLM.from_pretrained(tmp_path, trust_remote_code=False).eval()
    assert again.decoder.weight is again.model.encoder.weight
    assert torch.equal(again(**BATCH).logits, expected)
    assert build_model().decoder.weight is not build_model().model.encoder.weight


@pytest.mark.parametrize("batch", [BATCH, pack(DOCUMENTS)], ids=["padded", "packed"])
def test_forward_compiles_to_one_graph_for_all_lengths(batch: dict[str, torch.Tensor]):
    torch._dynamo.reset()
    model = build_model()
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    shorter = pad(DOCUMENTS[1:]) if "attention_mask" in batch else pack(DOCUMENTS[:2])
    with torch.no_grad():
        for inputs in (batch, shorter):
            chosen = inputs["attention_mask"].bool() if "attention_mask" in inputs else slice(None)
            assert gap(compiled(**inputs).logits[chosen], model(**inputs).logits[chosen]) < 1e-5


# --- config: published settings, refused settings, and initialization


def test_published_config_is_read_and_saved_with_the_names_of_this_code(tmp_path: Path):
    published = read_json(PUBLISHED / "config.json")
    config = NeoBERTConfig.from_dict({**published, "max_length": 2048})
    assert config.max_position_embeddings == 2048
    assert (config.hidden_size, config.norm_eps, config.rope_theta, config.dim_head) == (768, 1e-5, 10_000.0, 64)
    config.save_pretrained(tmp_path)
    saved = read_json(tmp_path / "config.json")
    assert saved["max_position_embeddings"] == 2048
    assert "max_length" not in saved
    assert saved["auto_map"] == AUTO_MAP, "the published file is not in the saved folder"


@pytest.mark.parametrize(
    ("settings", "fragments"),
    [
        ({"hidden_size": 36}, ["dim_head 9", "even"]),
        ({"dim_head": 16}, ["dim_head 16", "hidden_size 32"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, ["yarn", "rope_theta"]),
        ({"rope_parameters": {"rope_theta": 5e3}, "rope_theta": 1e4}, ["rope_theta 5000", "rope_theta 10000"]),
    ],
)
def test_invalid_settings_are_refused_with_their_values(settings: dict[str, Any], fragments: list[str]):
    with pytest.raises(ValueError) as caught:
        build_config(**settings)
    assert [fragment for fragment in fragments if fragment not in str(caught.value)] == []


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_rotary_base_is_read_from_the_keys_of_transformers_5(name: str):
    assert build_config(**{name: {"rope_type": "default", "rope_theta": 5000.0}}).rope_theta == 5000.0
    assert build_config(**{name: {"type": "default"}}).rope_theta == 10_000.0
    assert build_config(**{name: None}).rope_theta == 10_000.0


def test_null_in_config_json_means_the_default():
    config = NeoBERTConfig(**dict.fromkeys(PUBLISHED_MODEL))
    assert {name: getattr(config, name) for name in PUBLISHED_MODEL} == PUBLISHED_MODEL


# --- without padding


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
    """One kernel replaces flash-attn's and torch's, which take the same arguments in the same order."""
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
