"""What an exported folder must do in a user's hands, with any transformers from 4.57 on.

    python export_checks.py FOLDER [--trust-remote-code]

Prints one JSON object: check -> "ok", "not applicable: REASON" or "FAILED: REASON".
"""

import importlib.util
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import tokenizers
import torch
from exported_folder import NotApplicable, Subject, check, expect_close, main_output, run_checks
from torch import Tensor
from torch.nn.functional import cross_entropy

STEPS = 3


# --- what people call instead of the model itself


@check("tokenizer")
def tokenizer(subject: Subject) -> None:
    """The ids of tokenizer.json, no token_type_ids, padding on the right, and the special tokens of config.json."""
    loaded = subject.tokenizer()
    backend = tokenizers.Tokenizer.from_file(str(subject.folder / "tokenizer.json"))
    for words in [(subject.text(9),), ("Ünïcode, numb3rs & [MASK]; 世界!",), ("",), ("a", "b")]:
        ids, expected = loaded(*words)["input_ids"], backend.encode(*words).ids
        assert ids == expected, f"{words!r} becomes {ids}, but with tokenizer.json {expected}"
    batch = loaded([subject.text(9), subject.text(5)], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}, f"a batch has {sorted(batch)}"
    assert batch["attention_mask"][1] == [1] * 5 + [0] * 4, f"mask of a padded text: {batch['attention_mask'][1]}"
    assert batch["input_ids"][1][5:] == [loaded.pad_token_id] * 4, "padding is not the padding token"
    assert loaded.pad_token_id == subject.fields["pad_token_id"], "pad_token_id is not config.json's"
    assert len(loaded) == subject.fields["vocab_size"], f"{len(loaded)} tokens, {subject.fields['vocab_size']} rows"
    longest = loaded.model_max_length
    text = subject.text(longest + 10)
    cut, whole = loaded(text, truncation=True)["input_ids"], backend.encode(text).ids
    assert len(cut) == longest, f"a long text is truncated to {len(cut)} tokens, model_max_length is {longest}"
    assert cut == [*whole[: longest - 1], whole[-1]], "a long text is not truncated at its end, before the separator"


@check("pipeline fill-mask")
@torch.no_grad()
def fill_mask(subject: Subject) -> None:
    """Its best word is the one with the highest logit."""
    pipeline, mask = subject.pipeline("fill-mask", "AutoModelForMaskedLM"), subject.tokenizer().mask_token
    text = f"{subject.text(6)} {mask} {subject.text(5, start=5)}"
    encoded = subject.encode(text)
    logits = subject.load("AutoModelForMaskedLM")(**encoded).logits
    expected = logits[encoded["input_ids"] == subject.tokenizer().mask_token_id][0].argmax().item()
    best = pipeline(text)[0]["token"]
    assert best == expected, f"the pipeline answers token {best}, the model {expected}"


@check("Trainer")
def train(subject: Subject) -> None:
    """Masked language modelling has finite losses and moves every weight."""
    if importlib.util.find_spec("accelerate") is None:
        raise NotApplicable("accelerate is not installed")
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    model = subject.load("AutoModelForMaskedLM")
    rows = [subject.tokenizer()(subject.text(16, start=number)) for number in range(8)]
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
    still = [name for name, weight in model.named_parameters() if torch.equal(weight, before[name])]
    assert not still, f"weights that did not move: {still[:3]}"


# --- heads: the folder's weights are loaded, and the loss is the one that the labels ask for


@check("AutoModel")
@torch.no_grad()
def backbone(subject: Subject) -> None:
    """AutoModel finds all its weights; only a head of pre-training may be left over."""
    model, info = subject.load_with_info("AutoModel")
    assert not info["missing_keys"], f"weights that the folder lacks: {sorted(info['missing_keys'])[:3]}"
    assert not info["mismatched_keys"], f"weights of another shape: {sorted(info['mismatched_keys'])[:3]}"
    left_over = [name for name in info["unexpected_keys"] if not name.startswith(("lm_head.", "decoder."))]
    assert not left_over, f"weights that the model does not use: {sorted(left_over)[:3]}"
    batch = subject.batch()
    states = model(**batch.inputs()).last_hidden_state
    assert states.isfinite().all(), "hidden states are not finite"
    assert states.shape == (*batch.input_ids.shape, model.config.hidden_size), f"last_hidden_state is {states.shape}"


@check("AutoModelForMaskedLM, loss")
@torch.no_grad()
def masked_lm(subject: Subject) -> None:
    """All weights are used, and the loss is the mean over the labels that are not -100."""
    model, info = subject.load_with_info("AutoModelForMaskedLM")
    problems = {kind: sorted(names)[:3] for kind, names in info.items() if names}
    assert not problems, f"weights and model do not fit: {problems}"
    batch = subject.batch()
    labels = torch.where(batch.input_ids % 2 == 0, batch.input_ids, -100)
    outputs = model(**batch.inputs(), labels=labels)
    expect_close(outputs.loss, cross_entropy(outputs.logits.flatten(0, 1), labels.flatten()), "loss")


@check("AutoModelForSequenceClassification, loss")
@torch.no_grad()
def sequence_classification(subject: Subject) -> None:
    model, labels = (
        load_with_new_head(subject, "AutoModelForSequenceClassification", num_labels=3),
        torch.tensor([2, 0, 1]),
    )
    outputs = model(**subject.batch().inputs(), labels=labels)
    expect_close(outputs.loss, cross_entropy(outputs.logits, labels), "loss")


@check("AutoModelForTokenClassification, loss")
@torch.no_grad()
def token_labels(subject: Subject) -> None:
    model, batch = load_with_new_head(subject, "AutoModelForTokenClassification", num_labels=5), subject.batch()
    labels = torch.where(batch.attention_mask == 1, batch.input_ids % 5, -100)
    outputs = model(**batch.inputs(), labels=labels)
    expect_close(outputs.loss, cross_entropy(outputs.logits.flatten(0, 1), labels.flatten()), "loss")


def load_with_new_head(subject: Subject, class_name: str, **options: Any) -> torch.nn.Module:
    """The model, after a look at its backbone: the folder's weights, not new ones."""
    model = subject.load(class_name, **options)
    stored: dict[str, Tensor] = subject.load("AutoModel").state_dict()
    loaded: dict[str, Tensor] = model.base_model.state_dict()
    wrong = [name for name, tensor in stored.items() if name not in loaded or not torch.equal(tensor, loaded[name])]
    assert not wrong, f"the backbone under the new head has other weights: {wrong[:3]}"
    assert model.base_model is not model, "the model has no backbone of its own"
    return model


# --- the same numbers whichever way the model is asked, and after what users do to it


@check("attention to both sides")
@torch.no_grad()
def looks_both_ways(subject: Subject) -> None:
    """A later token changes what an earlier one becomes."""
    model, ids = subject.load("AutoModel"), subject.batch((9,)).input_ids
    changed = ids.clone()
    changed[0, -2] = subject.tokenizer().mask_token_id
    before, after = (model(rows).last_hidden_state[0, 1] for rows in (ids, changed))
    assert (before - after).abs().max() > 1e-6 * before.abs().max(), "a token does not see those to its right"


@check("padded = alone")
@torch.no_grad()
def padded_as_alone(subject: Subject) -> None:
    """With a mask of integers or booleans; and no mask is a mask of ones."""
    model, batch = subject.load_main(), subject.batch()
    padded = main_output(model(**batch.inputs()))
    as_bool = main_output(model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.bool()))
    expect_close(as_bool, padded, "mask of booleans instead of integers")
    for row, length in enumerate(batch.lengths):
        alone = main_output(model(input_ids=batch.input_ids[row : row + 1, :length]))
        expect_close(padded[row, :length], alone[0], f"{length} tokens, padded or alone without a mask")


@check("packed = alone")
@torch.no_grad()
def packed_as_alone(subject: Subject) -> None:
    """Documents in one packed sequence: by cu_seqlens, or by a block mask where the layout has no cu_seqlens.

    Positions run on through the sequence, which rotary embeddings do not notice.
    """
    model, batch = subject.load_main(), subject.batch()
    documents = [row[:length] for row, length in zip(batch.input_ids, batch.lengths, strict=True)]
    packed = {"input_ids": torch.cat(documents)[None]}
    if subject.auto_map:
        packed["cu_seqlens"] = torch.tensor([0, *torch.tensor(batch.lengths).cumsum(0)], dtype=torch.int32)
        outputs = model(**packed, max_seqlen=max(batch.lengths))
    else:
        blocks = torch.block_diag(*[torch.ones(length, length) for length in batch.lengths]).bool()
        outputs = model(**packed, attention_mask=blocks[None, None])
    for document, states in zip(documents, main_output(outputs)[0].split(batch.lengths), strict=True):
        alone = main_output(model(input_ids=document[None]))[0]
        expect_close(states, alone, f"document of {len(document)} tokens, packed or alone")


@check("sdpa = eager")
@torch.no_grad()
def sdpa_as_eager(subject: Subject) -> None:
    batch, outputs = subject.batch(), {}
    for name in ("sdpa", "eager"):
        model = subject.load_main(attn_implementation=name)
        assert model.config._attn_implementation == name, f"{name} was asked for and not used"
        outputs[name] = main_output(model(**batch.inputs()))[batch.attention_mask.bool()]
    expect_close(outputs["sdpa"], outputs["eager"], "sdpa and eager")


@check("inputs_embeds")
@torch.no_grad()
def inputs_embeds(subject: Subject) -> None:
    model, batch = subject.load_main(), subject.batch()
    embedded = model.get_input_embeddings()(batch.input_ids)
    given = main_output(model(inputs_embeds=embedded, attention_mask=batch.attention_mask))
    expect_close(given, main_output(model(**batch.inputs())), "inputs_embeds and input_ids")


@check("hidden states")
@torch.no_grad()
def hidden_states(subject: Subject) -> None:
    """The embeddings, then one per layer, the last of them after the final norm; and a tuple where one is wanted."""
    model, batch = subject.load("AutoModel"), subject.batch()
    outputs = model(**batch.inputs(), output_hidden_states=True)
    states, wanted = outputs.hidden_states, 1 + model.config.num_hidden_layers
    assert len(states) == wanted, f"{len(states)} hidden states instead of {wanted}"
    expect_close(states[0], model.get_input_embeddings()(batch.input_ids), "first hidden state and the embeddings")
    expect_close(states[-1], outputs.last_hidden_state, "last hidden state and last_hidden_state")
    as_tuple = model(**batch.inputs(), return_dict=False)
    assert isinstance(as_tuple, tuple), f"return_dict=False gives a {type(as_tuple).__name__}"
    expect_close(as_tuple[0], outputs.last_hidden_state, "first of the tuple")


@check("gradient checkpointing")
def gradient_checkpointing(subject: Subject) -> None:
    """The same gradients, and layers that really are computed twice."""
    gradients: list[dict[str, Tensor]] = []
    for enabled, runs in ((False, 1), (True, 2)):
        model = subject.load_main().train()
        torch.manual_seed(0)  # for dropout, where a layout has it
        if enabled:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        calls: list[int] = []
        linear = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))  # of the first layer
        linear.register_forward_pre_hook(lambda module, inputs, calls=calls: calls.append(1))
        main_output(model(**subject.batch().inputs())).float().square().mean().backward()
        assert len(calls) == runs, f"a layer ran {len(calls)} times instead of {runs}"
        gradients.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    plain, checkpointed = gradients
    assert plain.keys() == checkpointed.keys() and plain, "not the same weights have gradients"
    for name, gradient in plain.items():
        expect_close(checkpointed[name], gradient, f"gradient of {name}")


@check("resize")
@torch.no_grad()
def resize(subject: Subject) -> None:
    """Eight more tokens: the old ones' outputs stay, and the head grows along."""
    model, inputs = subject.load_main(), subject.batch().inputs()
    before, size = main_output(model(**inputs)), model.config.vocab_size
    model.resize_token_embeddings(size + 8)
    after = main_output(model(**inputs))
    assert model.get_input_embeddings().weight.shape[0] == size + 8, "the embedding did not grow"
    assert model.config.vocab_size == size + 8, f"config.vocab_size is {model.config.vocab_size}, not {size + 8}"
    if subject.main_class == "AutoModelForMaskedLM":
        assert after.shape[-1] == size + 8, f"{after.shape[-1]} logits instead of {size + 8}"
        after = after[..., :size]
    expect_close(after, before, "outputs before and after")


@check("save and reload")
@torch.no_grad()
def save_and_reload(subject: Subject) -> None:
    """Bit for bit, config and code included; and so does a model with a new head."""
    wanted: list[tuple[str, dict[str, int]]] = [(subject.main_class, {})]
    if subject.has("AutoModelForSequenceClassification"):
        wanted.append(("AutoModelForSequenceClassification", {"num_labels": 3}))
    for class_name, options in wanted:
        model, inputs = subject.load(class_name, **options), subject.batch().inputs()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            model.save_pretrained(folder)
            subject.tokenizer().save_pretrained(folder)
            again, info = subject.load_with_info(class_name, folder=folder)
            saved_map = Subject(folder, subject.trusted).auto_map
            assert saved_map == subject.auto_map, f"{class_name}: auto_map after saving: {saved_map}"
            code = {name.split(".")[0] for name in saved_map.values()}
            lost = [module for module in code if not (folder / f"{module}.py").is_file()]
            assert not lost, f"{class_name}: code that saving leaves out: {lost}"
            ids = subject.tokenizer(folder)(subject.text(9))["input_ids"]
            assert ids == subject.tokenizer()(subject.text(9))["input_ids"], "other token ids after saving"
        problems = {kind: sorted(names)[:3] for kind, names in info.items() if names}
        assert not problems, f"{class_name}: weights and model do not fit after saving: {problems}"
        saved, loaded = model.state_dict(), again.state_dict()
        wrong = [name for name, tensor in saved.items() if not torch.equal(tensor, loaded[name])]
        assert not wrong, f"{class_name}: other weights after saving: {wrong[:3]}"
        same = torch.equal(main_output(model(**inputs)), main_output(again(**inputs)))
        assert same, f"{class_name}: other outputs after saving"


if __name__ == "__main__":
    print(json.dumps(run_checks(Path(sys.argv[1]), trusted=sys.argv[2:] == ["--trust-remote-code"])))
