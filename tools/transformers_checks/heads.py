"""Does every model class load the folder's weights, and is its loss the one that its labels ask for?"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from transformers_checks.subject import Subject, expect, expect_close


def backbone(subject: Subject) -> None:
    """AutoModel finds all its weights; only a head of pre-training may be left over."""
    model, info = subject.load("AutoModel")
    expect(not info["missing_keys"], f"weights that the folder lacks: {sorted(info['missing_keys'])[:3]}")
    expect(not info["mismatched_keys"], f"weights of another shape: {sorted(info['mismatched_keys'])[:3]}")
    left_over = [name for name in info["unexpected_keys"] if not name.startswith(("lm_head.", "decoder."))]
    expect(not left_over, f"weights that the model does not use: {sorted(left_over)[:3]}")
    batch = subject.batch()
    with torch.no_grad():
        states = model(**batch.inputs()).last_hidden_state
    expect(bool(states.isfinite().all()), "hidden states are not finite")
    shape = (*batch.input_ids.shape, model.config.hidden_size)
    expect(states.shape == shape, f"last_hidden_state is {tuple(states.shape)} instead of {shape}")


def masked_lm(subject: Subject) -> None:
    """All weights are used, and the loss is the mean over the labels that are not -100."""
    model, info = subject.load("AutoModelForMaskedLM")
    problems = {kind: sorted(names)[:3] for kind, names in info.items() if names}
    expect(not problems, f"weights and model do not fit: {problems}")
    batch = subject.batch()
    labels = torch.where(batch.input_ids % 2 == 0, batch.input_ids, -100)
    with torch.no_grad():
        outputs = model(**batch.inputs(), labels=labels)
    expect_close(outputs.loss, cross_entropy(outputs.logits.flatten(0, 1), labels.flatten()), "loss")


def sequence_classification(subject: Subject) -> None:
    model, batch = _load_with_new_head(subject, "AutoModelForSequenceClassification", num_labels=3), subject.batch()
    labels = torch.tensor([2, 0, 1])
    with torch.no_grad():
        outputs = model(**batch.inputs(), labels=labels)
    expect(outputs.logits.shape == (3, 3), f"logits are {tuple(outputs.logits.shape)} for 3 texts and 3 labels")
    expect_close(outputs.loss, cross_entropy(outputs.logits, labels), "loss")


def token_classification(subject: Subject) -> None:
    model, batch = _load_with_new_head(subject, "AutoModelForTokenClassification", num_labels=5), subject.batch()
    labels = torch.where(batch.attention_mask == 1, batch.input_ids % 5, -100)
    with torch.no_grad():
        outputs = model(**batch.inputs(), labels=labels)
    expect(outputs.logits.shape == (*labels.shape, 5), f"logits are {tuple(outputs.logits.shape)} for 5 labels")
    expect_close(outputs.loss, cross_entropy(outputs.logits.flatten(0, 1), labels.flatten()), "loss")


def question_answering(subject: Subject) -> None:
    model, batch = _load_with_new_head(subject, "AutoModelForQuestionAnswering"), subject.batch()
    starts, ends = torch.tensor([1, 2, 1]), torch.tensor([3, 4, 2])
    with torch.no_grad():
        outputs = model(**batch.inputs(), start_positions=starts, end_positions=ends)
    expected = (cross_entropy(outputs.start_logits, starts) + cross_entropy(outputs.end_logits, ends)) / 2
    expect_close(outputs.loss, expected, "loss")


def _load_with_new_head(subject: Subject, class_name: str, **options: Any) -> torch.nn.Module:
    """The model, after a look at its backbone: the folder's weights, not new ones."""
    model, _ = subject.load(class_name, **options)
    stored: dict[str, Tensor] = subject.load("AutoModel")[0].state_dict()
    loaded: dict[str, Tensor] = model.base_model.state_dict()
    wrong = [name for name, tensor in stored.items() if name not in loaded or not torch.equal(tensor, loaded[name])]
    expect(not wrong, f"the backbone under the new head has other weights: {wrong[:3]}")
    expect(model.base_model is not model, "the model has no backbone of its own")
    return model
