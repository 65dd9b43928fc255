"""Outputs and losses of the heads follow the conventions of transformers."""

from typing import Any

import pytest
import torch
from tiny_neobert import build_documents, build_model, gap, pack, pad
from torch import Tensor
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

from megatron_neobert.huggingface.modeling_neobert import (
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
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
        (
            3,
            torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 0, 0]]),
            F.binary_cross_entropy_with_logits,
            "multi_label_classification",
        ),
    ],
)
def test_sequence_classification_loss_follows_from_the_labels(num_labels: int, labels: Tensor, loss: Any, kind: str):
    model = build_model(NeoBERTForSequenceClassification, num_labels=num_labels)
    output = model(**BATCH, labels=labels)
    assert output.logits.shape == (3, num_labels)
    assert torch.allclose(output.loss, loss(output.logits, labels))
    assert model.config.problem_type == kind


def test_sequence_classification_uses_the_first_token_of_every_document():
    model = build_model(NeoBERTForSequenceClassification, num_labels=3)
    expected = model(**BATCH).logits
    first = model.model(**BATCH).last_hidden_state[:, 0]
    assert torch.allclose(expected, model.classifier(model.dense(first).tanh()))
    row = pack(DOCUMENTS)
    assert gap(model(**row).logits, expected) < 1e-5
    assert gap(model(row["input_ids"], cu_seq_lens_q=row["cu_seqlens"]).logits, expected) < 1e-5


@pytest.mark.parametrize("kind", [NeoBERTForMaskedLM, NeoBERTForSequenceClassification])
def test_trainer_makes_the_same_update_with_one_and_two_micro_batches(kind: type, tmp_path):
    """A model with **kwargs that ignores num_items_in_batch would make an update twice as large with two."""
    labels = build_labels() if kind is NeoBERTForMaskedLM else torch.tensor([0, 1, 1])
    rows = [
        {"input_ids": BATCH["input_ids"][row], "attention_mask": BATCH["attention_mask"][row], "labels": labels[row]}
        for row in (0, 2)
    ]
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
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        Trainer(model, arguments, train_dataset=rows).train()
        updates.append(model.model.layer_norm.weight.detach() - before)
    assert updates[0].abs().max() > 1e-4
    assert gap(updates[1], updates[0]) < 1e-3
