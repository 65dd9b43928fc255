"""Checks of an exported folder as users load it, with torch and transformers 4.57 or later alone.

    python export_checks.py FOLDER

Prints the names of the checks as a JSON list; a check that fails ends the script with its reason. A version of
transformers without the layout's class can only load the tokenizer, so only this check runs.
"""

import json
import math
import sys
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.nn.functional import cross_entropy

STEPS = 3
MAIN = "AutoModelForMaskedLM"
WORDS = ("the", "cat", "sat", "on", "a", "mat")  # with a single token
LENGTHS = (12, 7, 4)  # tokens of the texts in a batch

VERSION = Version(transformers.__version__)
FP32 = {"torch_dtype" if VERSION.major < 5 else "dtype": torch.float32}
# Largest difference relative to the largest value, in fp32. The errors that checks detect are 0.1 or larger.
TOLERANCE = 1e-4
FIRST_NATIVE = Version("5.3")  # with EuroBERT


@dataclass(frozen=True)
class Subject:
    """A folder, whose own code is executed if it has any."""

    folder: Path

    @cached_property
    def fields(self) -> dict[str, Any]:
        """Content of config.json."""
        return json.loads((self.folder / "config.json").read_text(encoding="utf-8"))

    @property
    def auto_map(self) -> dict[str, str]:
        return self.fields.get("auto_map", {})

    @property
    def is_known(self) -> bool:
        """True if the models' classes are in the folder or in this version of transformers."""
        return bool(self.auto_map) or VERSION >= FIRST_NATIVE

    def load_with_info(self, class_name: str, **options: Any) -> tuple[Any, dict]:
        """Return a model in fp32 and evaluation mode, and the loading report of transformers."""
        model, info = getattr(transformers, class_name).from_pretrained(
            self.folder,
            trust_remote_code=bool(self.auto_map),
            local_files_only=True,
            output_loading_info=True,
            **FP32,
            **options,
        )
        return model.eval(), info

    def load(self, class_name: str, **options: Any) -> Any:
        return self.load_with_info(class_name, **options)[0]

    def tokenizer(self) -> Any:
        return transformers.AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False, local_files_only=True)

    def batch(self) -> transformers.BatchEncoding:
        """Return a batch of texts, padded on the right."""
        texts = [text_of(tokens, start=3 * row) for row, tokens in enumerate(LENGTHS)]
        return self.tokenizer()(texts, padding=True, return_tensors="pt")


def text_of(tokens: int, *, start: int = 0) -> str:
    """Return a text of this number of tokens, including [CLS] and [SEP]."""
    return " ".join(WORDS[(start + index) % len(WORDS)] for index in range(tokens - 2))


def expect_close(actual: Tensor, expected: Tensor, name: str) -> None:
    """Assert that the difference is at most TOLERANCE, relative to the largest value, and no value is NaN."""
    largest = TOLERANCE * float(expected.abs().max())
    options = {"atol": largest, "rtol": 0, "check_dtype": False}
    torch.testing.assert_close(actual, expected, msg=lambda message: f"{name}: {message}", **options)


# --- tokenizer, pipelines and Trainer


def check_tokenizer(subject: Subject) -> None:
    """Ids are those of tokenizer.json, without token_type_ids; padding and truncation are on the right."""
    loaded = subject.tokenizer()
    backend = tokenizers.Tokenizer.from_file(str(subject.folder / "tokenizer.json"))
    for texts in [(text_of(9),), ("Ünïcode, numb3rs & [MASK]; 世界!",), ("",), ("a", "b")]:
        ids, expected = loaded(*texts)["input_ids"], backend.encode(*texts).ids
        assert ids == expected, f"{texts!r} becomes {ids}, but with tokenizer.json {expected}"
    batch = loaded([text_of(9), text_of(5)], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}, f"a batch has {sorted(batch)}"
    assert batch["attention_mask"][1] == [1] * 5 + [0] * 4, f"mask of a padded text: {batch['attention_mask'][1]}"
    assert batch["input_ids"][1][5:] == [loaded.pad_token_id] * 4, "padding is not the padding token"
    assert loaded.pad_token_id == subject.fields["pad_token_id"], "pad_token_id is not config.json's"
    assert len(loaded) == subject.fields["vocab_size"], f"{len(loaded)} tokens, {subject.fields['vocab_size']} rows"
    longest = loaded.model_max_length
    text = text_of(longest + 10)
    truncated, ids = loaded(text, truncation=True)["input_ids"], backend.encode(text).ids
    assert len(truncated) == longest, f"a long text is truncated to {len(truncated)} tokens, not {longest}"
    assert truncated == [*ids[: longest - 1], ids[-1]], "a long text is not truncated at its end, before the separator"


@torch.no_grad()
def check_fill_mask(subject: Subject) -> None:
    """The best prediction is the token with the largest logit."""
    text = f"{text_of(6)} {subject.tokenizer().mask_token} {text_of(5, start=5)}"
    encoded = subject.tokenizer()(text, return_tensors="pt")
    logits = subject.load("AutoModelForMaskedLM")(**encoded).logits
    pipeline = transformers.pipeline(
        "fill-mask", model=str(subject.folder), trust_remote_code=bool(subject.auto_map), device="cpu", **FP32
    )
    expected = logits[encoded["input_ids"] == subject.tokenizer().mask_token_id][0].argmax().item()
    best = pipeline(text)[0]["token"]
    assert best == expected, f"the pipeline answers token {best}, the model {expected}"


def check_training(subject: Subject) -> None:
    """Masked-language-model training has finite losses and changes every weight."""
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    model = subject.load("AutoModelForMaskedLM")
    rows = [subject.tokenizer()(text_of(16, start=number)) for number in range(8)]
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=4, learning_rate=1e-4, logging_steps=1,
            save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        collator = DataCollatorForLanguageModeling(subject.tokenizer(), mlm_probability=0.3)
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator)
        trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == STEPS and all(map(math.isfinite, losses)), f"losses of {STEPS} steps: {losses}"
    unchanged = [name for name, weight in model.named_parameters() if torch.equal(weight, before[name])]
    assert not unchanged, f"weights that did not change: {unchanged[:3]}"


# --- heads: the folder's weights are loaded, and the loss is that of the labels


@torch.no_grad()
def check_backbone(subject: Subject) -> None:
    """All weights of AutoModel are in the folder, which may also have the pre-training head."""
    model, info = subject.load_with_info("AutoModel")
    assert not info["missing_keys"], f"weights that the folder lacks: {sorted(info['missing_keys'])[:3]}"
    assert not info["mismatched_keys"], f"weights of another shape: {sorted(info['mismatched_keys'])[:3]}"
    unused = [name for name in info["unexpected_keys"] if not name.startswith(("lm_head.", "decoder."))]
    assert not unused, f"weights that the model does not use: {sorted(unused)[:3]}"
    batch = subject.batch()
    states = model(**batch).last_hidden_state
    assert states.isfinite().all(), "hidden states are not finite"
    assert states.shape == (*batch.input_ids.shape, model.config.hidden_size), f"last_hidden_state is {states.shape}"


@torch.no_grad()
def check_masked_lm(subject: Subject) -> None:
    """All weights are used, and the loss is the mean over labels that are not -100."""
    model, info = subject.load_with_info("AutoModelForMaskedLM")
    problems = {kind: sorted(names)[:3] for kind, names in info.items() if names}
    assert not problems, f"weights and model do not fit: {problems}"
    batch = subject.batch()
    labels = torch.where(batch.input_ids % 2 == 0, batch.input_ids, -100)
    outputs = model(**batch, labels=labels)
    expect_close(outputs.loss, cross_entropy(outputs.logits.flatten(0, 1), labels.flatten()), "loss")


@torch.no_grad()
def check_classification(subject: Subject) -> None:
    """Under a new head, the backbone has the folder's weights, and the loss is that of the labels."""
    batch, stored = subject.batch(), subject.load("AutoModel").state_dict()
    labels_of_tokens = torch.where(batch.attention_mask == 1, batch.input_ids % 3, -100)
    for kind, labels in (("Sequence", torch.tensor([2, 0, 1])), ("Token", labels_of_tokens)):
        model = subject.load(f"AutoModelFor{kind}Classification", num_labels=3)
        assert model.base_model is not model, "the model has no backbone of its own"
        loaded = model.base_model.state_dict()
        wrong = [name for name, tensor in stored.items() if name not in loaded or not torch.equal(tensor, loaded[name])]
        assert not wrong, f"the backbone under the new head has other weights: {wrong[:3]}"
        outputs = model(**batch, labels=labels)
        expect_close(outputs.loss, cross_entropy(outputs.logits.view(-1, 3), labels.flatten()), f"loss of {kind}")


# --- equal results for equivalent inputs and settings, and after changes of the model


@torch.no_grad()
def check_attention_to_both_sides(subject: Subject) -> None:
    """A later token changes the hidden states of an earlier one."""
    model, ids = subject.load("AutoModel"), subject.batch().input_ids[:1]
    changed = ids.clone()
    changed[0, -2] = subject.tokenizer().mask_token_id
    before, after = (model(rows).last_hidden_state[0, 1] for rows in (ids, changed))
    assert (before - after).abs().max() > 1e-6 * before.abs().max(), "a token does not attend to later tokens"


@torch.no_grad()
def check_padded_as_alone(subject: Subject) -> None:
    """The mask may have integers or booleans; no mask is equivalent to a mask of ones."""
    model, batch = subject.load(MAIN), subject.batch()
    padded = model(**batch).logits
    as_bool = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.bool()).logits
    expect_close(as_bool, padded, "mask of booleans instead of integers")
    for row, length in enumerate(LENGTHS):
        alone = model(input_ids=batch.input_ids[row : row + 1, :length]).logits
        expect_close(padded[row, :length], alone[0], f"{length} tokens, padded or alone without a mask")


@torch.no_grad()
def check_packed_as_alone(subject: Subject) -> None:
    """Documents are separated by cu_seqlens, or by a block mask in layouts without cu_seqlens.

    Without position_ids, positions do not restart at documents. Relative rotary angles are the same.
    """
    model, batch = subject.load(MAIN), subject.batch()
    documents = [row[:length] for row, length in zip(batch.input_ids, LENGTHS, strict=True)]
    packed = {"input_ids": torch.cat(documents)[None]}
    if subject.auto_map:
        packed["cu_seqlens"] = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
        outputs = model(**packed, max_seqlen=max(LENGTHS))
    else:
        blocks = torch.block_diag(*[torch.ones(length, length) for length in LENGTHS]).bool()
        outputs = model(**packed, attention_mask=blocks[None, None])
    for document, states in zip(documents, outputs.logits[0].split(LENGTHS), strict=True):
        alone = model(input_ids=document[None]).logits[0]
        expect_close(states, alone, f"document of {len(document)} tokens, packed or alone")


@torch.no_grad()
def check_sdpa_as_eager(subject: Subject) -> None:
    batch, outputs = subject.batch(), {}
    for name in ("sdpa", "eager"):
        model = subject.load(MAIN, attn_implementation=name)
        assert model.config._attn_implementation == name, f"{name} was requested but not used"
        outputs[name] = model(**batch).logits[batch.attention_mask.bool()]
    expect_close(outputs["sdpa"], outputs["eager"], "sdpa and eager")


@torch.no_grad()
def check_inputs_embeds(subject: Subject) -> None:
    model, batch = subject.load(MAIN), subject.batch()
    embedded = model.get_input_embeddings()(batch.input_ids)
    outputs = model(inputs_embeds=embedded, attention_mask=batch.attention_mask).logits
    expect_close(outputs, model(**batch).logits, "inputs_embeds and input_ids")


@torch.no_grad()
def check_hidden_states(subject: Subject) -> None:
    """Hidden states are the embeddings and one output per layer, the last after the final norm."""
    model, batch = subject.load("AutoModel"), subject.batch()
    outputs = model(**batch, output_hidden_states=True)
    states, count = outputs.hidden_states, 1 + model.config.num_hidden_layers
    assert len(states) == count, f"{len(states)} hidden states instead of {count}"
    expect_close(states[0], model.get_input_embeddings()(batch.input_ids), "first hidden state and the embeddings")
    expect_close(states[-1], outputs.last_hidden_state, "last hidden state and last_hidden_state")
    as_tuple = model(**batch, return_dict=False)
    assert isinstance(as_tuple, tuple), f"return_dict=False gives a {type(as_tuple).__name__}"
    expect_close(as_tuple[0], outputs.last_hidden_state, "first of the tuple")


def check_gradient_checkpointing(subject: Subject) -> None:
    """Gradients are the same, and layers are computed twice."""
    gradients: list[dict[str, Tensor]] = []
    for enabled, runs in ((False, 1), (True, 2)):
        model = subject.load(MAIN).train()
        torch.manual_seed(0)  # for dropout
        if enabled:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        calls: list[int] = []
        linear = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))  # of the first layer
        linear.register_forward_pre_hook(lambda module, inputs, calls=calls: calls.append(1))
        model(**subject.batch()).logits.float().square().mean().backward()
        assert len(calls) == runs, f"a layer ran {len(calls)} times instead of {runs}"
        gradients.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    plain, checkpointed = gradients
    assert plain.keys() == checkpointed.keys() and plain, "different weights have gradients"
    for name, gradient in plain.items():
        expect_close(checkpointed[name], gradient, f"gradient of {name}")


@torch.no_grad()
def check_resize(subject: Subject) -> None:
    """With eight more tokens, outputs for old tokens are unchanged, and the head has eight more rows."""
    model, inputs = subject.load(MAIN), subject.batch()
    before, size = model(**inputs).logits, model.config.vocab_size
    model.resize_token_embeddings(size + 8)
    after = model(**inputs).logits
    assert model.get_input_embeddings().weight.shape[0] == size + 8, "the embedding did not grow"
    assert model.config.vocab_size == size + 8, f"config.vocab_size is {model.config.vocab_size}, not {size + 8}"
    assert after.shape[-1] == size + 8, f"{after.shape[-1]} logits instead of {size + 8}"
    expect_close(after[..., :size], before, "outputs before and after")


@torch.no_grad()
def check_save_and_reload(subject: Subject) -> None:
    """A reloaded model is equal bit for bit, with config and code, also with a new head."""
    cases: dict[str, dict[str, int]] = {MAIN: {}, "AutoModelForSequenceClassification": {"num_labels": 3}}
    for class_name, options in cases.items():
        model, inputs = subject.load(class_name, **options), subject.batch()
        with tempfile.TemporaryDirectory() as folder:
            saved = Subject(Path(folder))
            model.save_pretrained(folder)
            subject.tokenizer().save_pretrained(folder)
            again, info = saved.load_with_info(class_name)
            assert saved.auto_map == subject.auto_map, f"{class_name}: auto_map after saving: {saved.auto_map}"
            code = {name.split(".")[0] for name in saved.auto_map.values()}
            missing = [module for module in code if not (saved.folder / f"{module}.py").is_file()]
            assert not missing, f"{class_name}: code that is not saved: {missing}"
            ids = saved.tokenizer()(text_of(9))["input_ids"]
            assert ids == subject.tokenizer()(text_of(9))["input_ids"], "other token ids after saving"
        problems = {kind: sorted(names)[:3] for kind, names in info.items() if names}
        assert not problems, f"{class_name}: weights and model do not fit after saving: {problems}"
        loaded = again.state_dict()
        wrong = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, loaded[name])]
        assert not wrong, f"{class_name}: other weights after saving: {wrong[:3]}"
        same = torch.equal(model(**inputs).logits, again(**inputs).logits)
        assert same, f"{class_name}: other outputs after saving"


CHECKS = {name: function for name, function in vars().items() if name.startswith("check_")}


def run_checks(folder: Path) -> list[str]:
    """Run every check that this version of transformers can run, and return their names."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    subject = Subject(folder)
    names = list(CHECKS) if subject.is_known else ["check_tokenizer"]
    for name in names:
        torch.manual_seed(0)  # for new heads
        CHECKS[name](subject)
    return names


if __name__ == "__main__":
    print(json.dumps(run_checks(Path(sys.argv[1]))))
