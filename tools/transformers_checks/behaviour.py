"""Does the model compute the same whichever way it is asked, and survive what users do to it?"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from transformers_checks.subject import NotApplicable, Subject, expect, expect_close, main_output

_BF16_COSINE = 0.99


def looks_both_ways(subject: Subject) -> None:
    """A later token changes what an earlier one becomes."""
    model, ids = subject.load("AutoModel")[0], subject.batch((9,)).input_ids
    changed = ids.clone()
    changed[0, -2] = subject.tokenizer().mask_token_id
    with torch.no_grad():
        before, after = (model(rows).last_hidden_state[0, 1] for rows in (ids, changed))
    expect((before - after).abs().max() > 1e-6 * before.abs().max(), "a token does not see those to its right")


@torch.no_grad()
def padded_as_alone(subject: Subject) -> None:
    """With a mask of integers or booleans; and no mask is a mask of ones."""
    model, batch = subject.load_main(), subject.batch()
    padded = main_output(model(**batch.inputs()))
    as_bool = main_output(model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.bool()))
    expect_close(as_bool, padded, "mask of booleans instead of integers")
    for row, length in enumerate(batch.lengths):
        alone = main_output(model(input_ids=batch.input_ids[row : row + 1, :length]))
        expect_close(padded[row, :length], alone[0], f"row of {length} tokens, padded or alone without a mask")


@torch.no_grad()
def packed_as_alone(subject: Subject) -> None:
    """Documents end to end in one row: with cu_seqlens, or with a block mask where the layout has no cu_seqlens.

    Positions run on through the row, which rotary embeddings do not notice.
    """
    model, batch = subject.load_main(), subject.batch()
    documents = [row[:length] for row, length in zip(batch.input_ids, batch.lengths, strict=True)]
    packed = {"input_ids": torch.cat(documents)[None]}
    if subject.auto_map:
        ends = torch.tensor(batch.lengths).cumsum(0)
        packed["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.long), ends]).int()
        outputs = model(**packed, max_seqlen=max(batch.lengths))
    else:
        blocks = torch.block_diag(*[torch.ones(length, length) for length in batch.lengths]).bool()
        outputs = model(**packed, attention_mask=blocks[None, None])
    for document, states in zip(documents, main_output(outputs)[0].split(batch.lengths), strict=True):
        alone = main_output(model(input_ids=document[None]))[0]
        expect_close(states, alone, f"document of {len(document)} tokens, packed or alone")


@torch.no_grad()
def sdpa_as_eager(subject: Subject) -> None:
    batch = subject.batch()
    outputs = {}
    for name in ("sdpa", "eager"):
        model = subject.load_main(attn_implementation=name)
        expect(model.config._attn_implementation == name, f"{name} was asked for and not used")
        outputs[name] = main_output(model(**batch.inputs()))[batch.attention_mask.bool()]
    expect_close(outputs["sdpa"], outputs["eager"], "sdpa and eager")


@torch.no_grad()
def inputs_embeds(subject: Subject) -> None:
    model, batch = subject.load_main(), subject.batch()
    embedded = model.get_input_embeddings()(batch.input_ids)
    given = main_output(model(inputs_embeds=embedded, attention_mask=batch.attention_mask))
    expect_close(given, main_output(model(**batch.inputs())), "inputs_embeds and input_ids")


@torch.no_grad()
def hidden_states(subject: Subject) -> None:
    """The embeddings, then one per layer, the last of them after the final norm; and a tuple where one is wanted."""
    model, batch = subject.load("AutoModel")[0], subject.batch()
    outputs = model(**batch.inputs(), output_hidden_states=True)
    states, wanted = outputs.hidden_states, 1 + model.config.num_hidden_layers
    expect(len(states) == wanted, f"{len(states)} hidden states instead of {wanted}")
    expect_close(states[0], model.get_input_embeddings()(batch.input_ids), "first hidden state and the embeddings")
    expect_close(states[-1], outputs.last_hidden_state, "last hidden state and last_hidden_state")
    as_tuple = model(**batch.inputs(), return_dict=False)
    expect(isinstance(as_tuple, tuple), f"return_dict=False gives a {type(as_tuple).__name__}")
    expect_close(as_tuple[0], outputs.last_hidden_state, "first of the tuple")


@torch.no_grad()
def bfloat16(subject: Subject) -> None:
    batch, real = subject.batch(), subject.batch().attention_mask.bool()
    exact, rounded = (subject.load_main(dtype=dtype)(**batch.inputs()) for dtype in (torch.float32, torch.bfloat16))
    outputs = main_output(rounded)
    expect(outputs.dtype == torch.bfloat16, f"outputs of a bfloat16 model are {outputs.dtype}")
    cosine = cosine_similarity(outputs[real].float(), main_output(exact)[real], dim=-1).min().item()
    expect(cosine >= _BF16_COSINE, f"cosine of bfloat16 and float32 outputs is {cosine:.4f}, below {_BF16_COSINE}")


@torch.no_grad()
def device_map(subject: Subject) -> None:
    try:
        import accelerate  # noqa: F401
    except ImportError as error:
        raise NotApplicable("accelerate is not installed") from error
    batch = subject.batch()
    mapped = main_output(subject.load_main(device_map="cpu")(**batch.inputs()))
    expect_close(mapped, main_output(subject.load_main()(**batch.inputs())), "with and without device_map")


def gradient_checkpointing(subject: Subject) -> None:
    """The same gradients, and layers that really are computed twice."""
    gradients: list[dict[str, Tensor]] = []
    for enabled, runs in ((False, 1), (True, 2)):
        torch.manual_seed(0)  # for dropout, where a layout has it
        model = subject.load_main().train()
        if enabled:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        calls: list[int] = []
        linear = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))  # of the first layer
        linear.register_forward_pre_hook(lambda module, inputs, calls=calls: calls.append(1))
        main_output(model(**subject.batch().inputs())).float().square().mean().backward()
        expect(len(calls) == runs, f"a layer ran {len(calls)} times instead of {runs}")
        gradients.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    plain, checkpointed = gradients
    expect(plain.keys() == checkpointed.keys() and bool(plain), "not the same weights have gradients")
    for name, gradient in plain.items():
        expect_close(checkpointed[name], gradient, f"gradient of {name}")


@torch.no_grad()
def resize(subject: Subject) -> None:
    """Eight more tokens: the old ones' outputs stay, and the head grows along."""
    model, batch = subject.load_main(), subject.batch()
    before, size = main_output(model(**batch.inputs())), model.config.vocab_size
    model.resize_token_embeddings(size + 8)
    after = main_output(model(**batch.inputs()))
    expect(model.get_input_embeddings().weight.shape[0] == size + 8, "the embedding did not grow")
    expect(model.config.vocab_size == size + 8, f"config.vocab_size is {model.config.vocab_size}, not {size + 8}")
    if subject.main_class == "AutoModelForMaskedLM":
        expect(after.shape[-1] == size + 8, f"{after.shape[-1]} logits instead of {size + 8}")
        after = after[..., :size]
    expect_close(after, before, "outputs before and after")


@torch.no_grad()
def save_and_reload(subject: Subject) -> None:
    """Bit for bit, config and code included; and so does a model with a new head."""
    _expect_same_after_saving(subject, subject.main_class)
    if subject.has("AutoModelForSequenceClassification"):
        _expect_same_after_saving(subject, "AutoModelForSequenceClassification", num_labels=3)


def _expect_same_after_saving(subject: Subject, class_name: str, **options: Any) -> None:
    model, batch = subject.load(class_name, **options)[0], subject.batch()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder)
        subject.tokenizer().save_pretrained(folder)
        again, info = subject.load(class_name, folder=folder)
        saved_map = Subject(folder, subject.trusted).auto_map
        expect(saved_map == subject.auto_map, f"{class_name}: auto_map after saving: {saved_map}")
        lost = [
            code
            for code in {name.split(".")[0] for name in saved_map.values()}
            if not (folder / f"{code}.py").is_file()
        ]
        expect(not lost, f"{class_name}: code that saving leaves out: {lost}")
        tokenizer = subject.tokenizer(folder)
    problems = {kind: sorted(names)[:3] for kind, names in info.items() if names}
    expect(not problems, f"{class_name}: weights and model do not fit after saving: {problems}")
    saved, loaded = model.state_dict(), again.state_dict()
    wrong = [name for name, tensor in saved.items() if not torch.equal(tensor, loaded[name])]
    expect(not wrong, f"{class_name}: other weights after saving: {wrong[:3]}")
    same = torch.equal(main_output(model(**batch.inputs())), main_output(again(**batch.inputs())))
    expect(same, f"{class_name}: other outputs after saving")
    text = subject.text(9)
    expect(tokenizer(text)["input_ids"] == subject.tokenizer()(text)["input_ids"], "other token ids after saving")
