"""Outputs and losses: the conventions of transformers, and sums that are divided once."""

from typing import Any

import pytest
import torch
from tiny_neobert import build_documents, build_model, gap, lay_end_to_end, pad
from torch import Tensor
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

from megatron_neobert.huggingface.modeling_neobert import (
    NeoBERT,
    NeoBERTForMaskedLM,
    NeoBERTForMultipleChoice,
    NeoBERTForQuestionAnswering,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
)

DOCUMENTS = build_documents()
BATCH = pad(DOCUMENTS)
HEADS = (
    NeoBERT,
    NeoBERTForMaskedLM,
    NeoBERTForSequenceClassification,
    NeoBERTForTokenClassification,
    NeoBERTForQuestionAnswering,
)


def build_labels() -> Tensor:
    """Every third token is predicted; padding never is."""
    chosen = (torch.arange(27).view(3, 9) % 3 == 0) & BATCH["attention_mask"].bool()
    return BATCH["input_ids"].masked_fill(~chosen, -100)


@pytest.mark.parametrize("kind", HEADS)
def test_tuple_holds_what_the_output_holds(kind: type):
    model = build_model(kind)
    output = model(**BATCH, output_hidden_states=True)
    as_tuple = model(**BATCH, output_hidden_states=True, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert len(as_tuple) == len(output.to_tuple())
    assert torch.equal(as_tuple[0], output[0])
    model.config.return_dict = False
    assert isinstance(model(**BATCH), tuple)


@pytest.mark.parametrize("kind", HEADS)
def test_embeddings_and_positional_inputs_give_what_token_ids_give(kind: type):
    model = build_model(kind)
    expected = model(**BATCH)[0]
    embeddings = model.get_input_embeddings()(BATCH["input_ids"])
    assert torch.equal(model(inputs_embeds=embeddings, attention_mask=BATCH["attention_mask"])[0], expected)
    assert torch.equal(model(None, BATCH["attention_mask"], torch.arange(9)[None], embeddings)[0], expected)
    assert torch.equal(model(**BATCH, token_type_ids=torch.zeros(3, 9).long())[0], expected)


def test_masked_language_model_loss_is_the_mean_over_labels():
    model, labels = build_model(), build_labels()
    output = model(**BATCH, labels=labels)
    chosen = labels != -100
    expected = F.cross_entropy(output.logits[chosen], labels[chosen])
    assert torch.allclose(output.loss, expected)
    divided_by_ten = model(**BATCH, labels=labels, num_items_in_batch=torch.tensor(10)).loss
    assert torch.allclose(divided_by_ten, expected * int(chosen.sum()) / 10)


def test_loss_without_any_label_is_zero_with_zero_gradients():
    model = build_model()
    loss = model(**BATCH, labels=torch.full((3, 9), -100)).loss
    loss.backward()
    assert loss == 0
    assert model.decoder.bias.grad.abs().max() == 0


def test_loss_of_a_model_in_bf16_is_computed_in_fp32():
    model, labels = build_model().bfloat16(), build_labels()
    output = model(**BATCH, labels=labels)
    assert output.logits.dtype == torch.bfloat16
    assert output.loss.dtype == torch.float32
    assert torch.equal(output.loss, F.cross_entropy(output.logits.float().flatten(0, 1), labels.flatten()))


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


def test_sequence_classification_reads_the_first_token_of_every_document():
    model = build_model(NeoBERTForSequenceClassification, num_labels=3)
    expected = model(**BATCH).logits
    first = model.model(**BATCH).last_hidden_state[:, 0]
    assert torch.allclose(expected, model.classifier(model.dense(first).tanh()))
    row = lay_end_to_end(DOCUMENTS)
    assert gap(model(**row).logits, expected) < 1e-5
    assert gap(model(row["input_ids"], cu_seq_lens_q=row["cu_seqlens"]).logits, expected) < 1e-5


@pytest.mark.parametrize("by", ["input_ids", "inputs_embeds"])
def test_multiple_choice_gives_each_choice_the_value_of_its_row_and_the_cross_entropy(by: str):
    model = build_model(NeoBERTForMultipleChoice)
    rows = {name: torch.cat([tensor, tensor.flip(0)]) for name, tensor in BATCH.items()}  # two questions, three choices
    batch = {name: tensor.unflatten(0, (2, 3)) for name, tensor in rows.items()}
    if by == "inputs_embeds":
        batch[by] = model.get_input_embeddings()(batch.pop("input_ids"))
    labels = torch.tensor([2, 0])
    output = model(**batch, labels=labels)
    first = model.model(**rows).last_hidden_state[:, 0]
    expected = model.classifier(model.dense(first).tanh()).view(2, 3)
    assert torch.allclose(output.logits, expected, atol=1e-6)
    assert torch.allclose(output.loss, F.cross_entropy(expected, labels))
    assert torch.equal(model(**batch, return_dict=False)[0], output.logits)


def test_classification_heads_drop_out_in_training_alone():
    model = build_model(NeoBERTForSequenceClassification)
    assert torch.equal(model(**BATCH).logits, model(**BATCH).logits)
    model.train()
    assert not torch.equal(model(**BATCH).logits, model(**BATCH).logits)
    language_model = build_model().train()
    assert torch.equal(language_model(**BATCH).logits, language_model(**BATCH).logits)


def test_answers_outside_the_row_are_ignored():
    model = build_model(NeoBERTForQuestionAnswering)
    starts, ends = torch.tensor([2, 0, 900]), torch.tensor([[4], [0], [901]])
    output = model(**BATCH, start_positions=starts, end_positions=ends)
    both = [
        F.cross_entropy(logits[:2], positions[:2].flatten())
        for logits, positions in ((output.start_logits, starts), (output.end_logits, ends))
    ]
    assert output.start_logits.shape == (3, 9)
    assert torch.allclose(output.loss, sum(both) / 2)


@pytest.mark.parametrize("kind", [NeoBERTForMaskedLM, NeoBERTForSequenceClassification])
def test_trainer_takes_the_same_step_in_one_and_in_two_micro_batches(kind: type, tmp_path):
    """A model that takes **kwargs and ignores num_items_in_batch would take steps twice as large in two."""
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
