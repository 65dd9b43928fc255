"""Tokenizer, pipelines and Trainer: what people call instead of the model itself."""

import importlib.util
import math
import tempfile
from typing import Any

import tokenizers
import torch
from torch import Tensor

from transformers_checks.subject import NotApplicable, Subject, expect, expect_close

_STEPS = 3


def tokenizer(subject: Subject) -> None:
    """The ids of tokenizer.json, no token_type_ids, padding on the right, and the special tokens of config.json."""
    loaded = subject.tokenizer()
    backend = tokenizers.Tokenizer.from_file(str(subject.folder / "tokenizer.json"))
    for text in (subject.text(9), "Ünïcode, numb3rs & [MASK]; 世界!", ""):
        ids, expected = loaded(text)["input_ids"], backend.encode(text).ids
        expect(ids == expected, f"{text!r} becomes {ids}, but with tokenizer.json {expected}")
    pair, expected = loaded("a", "b")["input_ids"], backend.encode("a", "b").ids
    expect(pair == expected, f"a pair of texts becomes {pair}, but with tokenizer.json {expected}")
    batch = loaded([subject.text(9), subject.text(5)], padding=True)
    expect(set(batch) == {"input_ids", "attention_mask"}, f"a batch has {sorted(batch)}")
    expect(batch["attention_mask"][1] == [1] * 5 + [0] * 4, f"mask of a padded text: {batch['attention_mask'][1]}")
    expect(batch["input_ids"][1][5:] == [loaded.pad_token_id] * 4, "padding is not the padding token")
    expect(loaded.pad_token_id == subject.fields["pad_token_id"], "pad_token_id is not config.json's")
    expect(len(loaded) == subject.fields["vocab_size"], f"{len(loaded)} tokens, {subject.fields['vocab_size']} rows")
    longest = loaded.model_max_length
    text = subject.text(longest + 10)
    cut, whole = loaded(text, truncation=True)["input_ids"], backend.encode(text).ids
    expect(len(cut) == longest, f"a long text is cut to {len(cut)} tokens, model_max_length is {longest}")
    expect(cut == [*whole[: longest - 1], whole[-1]], "a long text is not cut at its end, before the separator")


def fill_mask(subject: Subject) -> None:
    """Its best word is the one with the highest logit."""
    pipeline, loaded = subject.pipeline("fill-mask", "AutoModelForMaskedLM"), subject.tokenizer()
    text = f"{subject.text(6)} {loaded.mask_token} {subject.text(5, start=5)}"
    best = pipeline(text)[0]["token"]
    encoded = loaded(text, return_tensors="pt")
    with torch.no_grad():
        logits = subject.load("AutoModelForMaskedLM")[0](**encoded).logits
    expected = logits[encoded["input_ids"] == loaded.mask_token_id][0].argmax().item()
    expect(best == expected, f"the pipeline answers token {best}, the model {expected}")


def feature_extraction(subject: Subject) -> None:
    features = torch.tensor(subject.pipeline("feature-extraction", "AutoModel")(subject.text(9))[0])
    with torch.no_grad():
        expected = subject.load("AutoModel")[0](**_encode(subject, subject.text(9))).last_hidden_state[0]
    expect_close(features, expected, "features and last_hidden_state")


def text_classification(subject: Subject) -> None:
    model = _load_if_there(subject, "AutoModelForSequenceClassification", num_labels=3)
    pipeline = subject.pipeline("text-classification", "AutoModelForSequenceClassification", model)
    scores = {answer["label"]: answer["score"] for answer in pipeline(subject.text(9), top_k=None)}
    with torch.no_grad():
        expected = model(**_encode(subject, subject.text(9))).logits[0].softmax(dim=-1)
    answered = torch.tensor([scores[model.config.id2label[label]] for label in range(3)])
    expect_close(answered, expected, "scores and the softmax of the logits")


def token_classification(subject: Subject) -> None:
    model = _load_if_there(subject, "AutoModelForTokenClassification", num_labels=3)
    pipeline = subject.pipeline("token-classification", "AutoModelForTokenClassification", model)
    answered = [answer["entity"] for answer in pipeline(subject.text(9), ignore_labels=[])]
    with torch.no_grad():
        labels = model(**_encode(subject, subject.text(9))).logits[0].argmax(dim=-1).tolist()[1:-1]
    expected = [model.config.id2label[label] for label in labels]
    expect(answered == expected, f"the pipeline answers {answered}, the model {expected}")


def question_answering(subject: Subject) -> None:
    model = _load_if_there(subject, "AutoModelForQuestionAnswering")
    pipeline = subject.pipeline("question-answering", "AutoModelForQuestionAnswering", model)
    question, context = subject.text(5), subject.text(12, start=4)
    answer = pipeline(question=question, context=context)
    expect(answer["answer"] in context, f"the answer {answer['answer']!r} is not in the text")
    expect(0 <= answer["score"] <= 1, f"the answer's score is {answer['score']}")


def train_masked_lm(subject: Subject) -> None:
    """Trainer and transformers' own masking: finite losses, and every weight moves."""
    from transformers import DataCollatorForLanguageModeling

    model = _load_if_there(subject, "AutoModelForMaskedLM")
    rows = [subject.tokenizer()(subject.text(16, start=number)) for number in range(8)]
    _train(model, rows, DataCollatorForLanguageModeling(subject.tokenizer(), mlm_probability=0.3))


def train_classification(subject: Subject) -> None:
    from transformers import DataCollatorWithPadding

    model = _load_if_there(subject, "AutoModelForSequenceClassification", num_labels=2)
    texts = [subject.text(6 + number, start=number) for number in range(8)]
    rows = [{**subject.tokenizer()(text), "labels": number % 2} for number, text in enumerate(texts)]
    _train(model, rows, DataCollatorWithPadding(subject.tokenizer()))


def _train(model: Any, rows: list[Any], collator: Any) -> None:
    if importlib.util.find_spec("accelerate") is None:
        raise NotApplicable("accelerate is not installed")
    from transformers import Trainer, TrainingArguments

    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=_STEPS,
            per_device_train_batch_size=4,
            learning_rate=1e-4,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator)
        trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    expect(len(losses) == _STEPS and all(map(math.isfinite, losses)), f"losses of {_STEPS} steps: {losses}")
    still = [name for name, weight in model.named_parameters() if torch.equal(weight, before[name])]
    expect(not still, f"weights that did not move: {still[:3]}")


def _load_if_there(subject: Subject, class_name: str, **options: Any) -> Any:
    torch.manual_seed(0)  # for the head that is new
    return subject.load(class_name, **options)[0]


def _encode(subject: Subject, text: str) -> dict[str, Tensor]:
    return subject.tokenizer()(text, return_tensors="pt")
