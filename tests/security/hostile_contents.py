"""Changes of valid files, and part of the message with which a reader refuses each.

hostile_inputs.py has files that would run code, test_fuzz.py has random changes, and
tests/unit/data/corpus/test_corpus.py has damage inside an index.
"""

import base64
import json
import os
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from good_inputs import WORDS
from json_files import edit_json
from safetensors.torch import load_file, save_file
from small_sentencepiece import write_model
from unit.data.small_corpus import SPECIAL, damage, numbered_tokenizer, random_documents, replaced, write_corpus

Change = Callable[[Path], object]
HUGE = "1,099,511,627,776 bytes are more than"


def write(name: str, content: str | bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def make_huge(name: str) -> Change:
    """Return a change that makes a sparse file of one tebibyte."""

    def change(folder: Path) -> None:
        (folder / name).touch()
        os.truncate(folder / name, 1 << 40)

    return change


def edit(name: str, **values: Any) -> Change:
    return lambda folder: edit_json(folder / name, **values)


# --- corpora


def manifest(**values: Any) -> Change:
    return edit("small.json", **values)


def replace(end: str, put: Change) -> Change:
    """Return a change that removes a file of the corpus and calls `put` with its path."""

    def change(folder: Path) -> None:
        path = folder / f"small{end}"
        path.unlink()
        put(path)

    return change


def use_the_index_of_another_corpus(folder: Path) -> None:
    write_corpus(folder / "other", random_documents([1, 3, 2, 4], 100))
    (folder / "other.idx").replace(folder / "small.idx")


CORPORA = [
    (write("small.json", "[" * 100_000), "not a manifest"),
    (make_huge("small.json"), f"{HUGE} a manifest has"),
    (manifest(format_version="2" * 9999), "format_version 1, found"),
    (manifest(tokens=True), "Expected `int`, got `bool` - at `$.tokens`"),
    (manifest(shards=[]), "Expected `array` of length >= 1 - at `$.shards`"),
    (manifest(vocab_size=2**33), "Expected `int` <= 2147483648 - at `$.vocab_size`"),
    (manifest(vocab_size=101), "expected vocab_size 100 of tokenizer"),
    (manifest(special_ids=[0, 1, 2, 3, 400]), "400] are not all below vocab_size"),
    (manifest(special_tokens={"pad": 4, "unk": 1, "cls": 2, "sep": 3, "mask": 0}), "expected special_tokens"),
    (manifest(dtype="uint8"), "expected dtype uint16 as in small.idx, found uint8"),
    (lambda folder: damage(folder / "small.json", replaced(b'"sha256": "', b'"sha256": "0')), "expected sha256 0"),
    (use_the_index_of_another_corpus, "small.idx, byte 0: expected sha256"),
    *((replace(end, put), f"small{end} missing: the corpus is unfinished")
      for end in (".bin", ".idx", ".json")
      for put in (lambda path: None, Path.mkdir, lambda path: path.symlink_to(path.name))),
]  # fmt: skip


# --- tokenizers


TOKENIZER_CONFIGS = [
    (write("tokenizer_config.json", config), words)
    for config, words in (
        ('{"auto_map": "AutoTokenizer"}', "auto_map names Python code of the tokenizer"),
        ('{"do_lower_case": "false"}', 'do_lower_case is "false", but must be true, false or null'),
        ('{"mask_token": 7}', "mask_token is 7, but must be the name of a token"),
        ('{"cls_token": "\\ud800"}', "cls_token is"),
        ('{"mask_token": {"content": null, "lstrip": true}}', "but must be the name of a token"),
        ('{"mask_token": "[PAD]"}', "'[PAD]' is the mask token and also the pad token"),
        ('{"unk_token": "[CLS]", "cls_token": "[UNK]"}', "for unknown text, but the unknown token is '[CLS]'"),
        ('{"sep_token": "[NOWHERE]"}', "[NOWHERE] missing among 27 ids"),
        ("[]", "expected a JSON object, found list"),
        ("[" * 100_000, "not readable as JSON"),
        ('{"a": ' + "1" * 5000 + "}", "4300 digits"),
        (b"\xff\xfe{\x00}\x00", "can't decode byte 0xff in position 0"),
    )
]
IDS = {name: id_ for id_, name in enumerate(SPECIAL)}
STATE = json.loads(numbered_tokenizer(100).backend.to_str())


def state(**changes: Any) -> Change:
    """Return a change that writes a valid tokenizer.json with other values of some keys."""
    return write("tokenizer.json", json.dumps({**STATE, **changes}))


def word_piece(**values: Any) -> Change:
    return state(model={**STATE["model"], **values})


def unigram(**values: Any) -> Change:
    vocabulary = [[name, 0.0] for name in (*SPECIAL, "a")]
    return state(model={"type": "Unigram", "vocab": vocabulary, "unk_id": 1, **values})


def precompiled(rules: bytes) -> dict[str, str]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(rules).decode()}


CUT_OFF = "precompiled_charsmap is truncated or damaged"
HALF_AN_EXPRESSION = {"type": "Split", "pattern": {"Regex": "(["}, "behavior": "Isolated", "invert": False}
TOKENIZER_JSON = [
    (state(normalizer=precompiled(b"\xff" * 4)), CUT_OFF),  # of 4 GiB
    (state(normalizer=precompiled(struct.pack("<I", 4) + bytes(4) + b"\xff")), "not a tokenizer.json"),  # not UTF-8
    (state(normalizer={"type": "Sequence", "normalizers": [precompiled(b"\xff" * 9)]}), CUT_OFF),
    (state(normalizer={"type": "Precompiled", "precompiled_charsmap": "****"}), CUT_OFF),
    (state(pre_tokenizer=HALF_AN_EXPRESSION), "not a tokenizer.json (Oniguruma"),
    (unigram(unk_id=None), "cannot encode a text"),
    (unigram(vocab=[]), "not a tokenizer.json"),
    (word_piece(unk_token="[NOWHERE]"), "uses '[NOWHERE]' for unknown text"),
    (word_piece(vocab={}), "cannot encode a text"),
    (word_piece(vocab={"[PAD]": 0, "[UNK]": 2**32 - 1}), "has id 1 instead of 4294967295"),
    (word_piece(vocab={**IDS, "a": 500}), "id 5 is missing, but the largest id is 500"),
    (word_piece(vocab={**IDS, "a": 4}), "both have id 4; give each piece another id"),
    (make_huge("tokenizer.json"), "bytes; a tokenizer file has at most 536,870,912"),
]
VOCABULARIES = [
    *TOKENIZER_CONFIGS,
    (write("vocab.txt", b"\x1f\x8b\x08" + bytes(100)), "line 1 is not UTF-8"),
    (write("vocab.txt", '{"content": "hello"}\n'), "missing among 1 ids"),
    (write("vocab.txt", "\r\n".join([*SPECIAL, "a", "a"])), "line 7: 'a' is also on line 6"),
    (write("vocab.txt", "\n".join([*SPECIAL, "", "", ""])), "line 6 is empty"),
    (write("vocab.txt", "\n".join(SPECIAL[:4])), "[MASK] missing among 4 ids"),
    (make_huge("vocab.txt"), "bytes; a tokenizer file has at most 536,870,912"),
]


def sentencepiece(change: Callable[[Any], object] = lambda model: None, tail: bytes = b"") -> Change:
    return lambda folder: write_model(folder / "tokenizer.model", change=change, tail=tail)


def last_piece(name: str, value: object) -> Change:
    return sentencepiece(lambda model: setattr(model.pieces[-1], name, value))


def trainer(name: str, value: object) -> Change:
    return sentencepiece(lambda model: setattr(model.trainer_spec, name, value))


def rules(content: bytes) -> Change:
    return sentencepiece(lambda model: setattr(model.normalizer_spec, "precompiled_charsmap", content))


def leave_a_piece_of_bpe_unused(model: Any) -> None:
    model.trainer_spec.model_type = 2
    model.pieces[-1].type = 5


NO_MODEL = "tokenizer.model: not a SentencePiece model, or truncated"
SENTENCEPIECE = [
    (last_piece("score", float("nan")), "the score of a piece is not a finite number"),
    (last_piece("piece", ""), NO_MODEL),
    (last_piece("piece", "a"), "the piece 'a' occurs 2 times"),
    (last_piece("piece", "x" * 1_000_000), "a piece has 1,000,000 characters"),
    (sentencepiece(lambda model: setattr(model.pieces[0], "type", 1)), "0 of 8 pieces are the unknown token"),
    (sentencepiece(leave_a_piece_of_bpe_unused), "1 pieces of a BPE model are marked unused"),
    (trainer("model_type", 3), "model type 3 (words or characters) is not supported; train a BPE or Unigram"),
    (trainer("treat_whitespace_as_suffix", True), "spaces at the end of pieces, or not escaped, are not supported"),
    (sentencepiece(lambda model: model.ClearField("trainer_spec")), "the training settings are missing"),
    (rules(b"\xff" * 8), "the normalisation rules are truncated or damaged"),  # of 4 GiB
    (rules(struct.pack("<I", 4) + bytes(4) + b"\xff"), "the tokenizers library cannot load it"),  # not UTF-8
    # The lengths are consistent, but the first unit of the table points outside the table.
    (rules(struct.pack("<II", 4, 0x7FFFFC00) + b"x\0"), "cannot encode a text"),
    (sentencepiece(tail=b"\x0a" + b"\xff" * 8 + b"\x7f"), NO_MODEL),  # a piece of 2^63 bytes
    (sentencepiece(tail=b"\x0a\x03\x0a\x01\xff"), NO_MODEL),  # not UTF-8
    (make_huge("tokenizer.model"), "bytes; a tokenizer file has at most 536,870,912"),
]


# --- settings


def aliases(last: str) -> str:
    """Return YAML whose nested lists of ten aliases each expand to 10^9 entries."""
    names = "abcdefghi"
    lines = ["a: &a [x,x,x,x,x,x,x,x,x,x]"]
    lines += [f"{name}: &{name} [{','.join([f'*{previous}'] * 10)}]" for previous, name in pairwise(names)]
    return "data:\n" + "".join(f"  {line}\n" for line in lines) + last


YAML = [
    (write("run.yaml", text), words)
    for text, words in (
        ("model: " + "[" * 5000, "recursion"),
        ("model: &a {num_layers: *a}\n", "is not a whole number"),
        ("model: !!python/name:os.system\n", "could not determine a constructor"),
        ("training:\n  _target_: os.mkdir\n", "unknown setting training._target_"),
        ("model:\n  num_layers: " + "9" * 5000, "4300 digits"),
        ("model:\n  num_layers: " + "9" * 400, "1329 bits is beyond 9223372036854775807"),
        ("training:\n  train_iters: ٣٠٠٠\n", "'٣٠٠٠' is not a whole number"),
        ("training:\n  bf16: 'true'\n", "'true' is not true or false"),
        ('checkpoint:\n  save: ""\n', "'' is not a text in UTF-8"),
        ('checkpoint:\n  save: "a\\0b"\n', "'a\\x00b' is not a text"),
        ('checkpoint:\n  save: "a\\uD800b"\n', "is not a text"),
        ("x" * 999 + ": 1\n", "unknown section 'xx"),
        ('"a\\nb": 1\n', "unknown section 'a\\nb'"),
        ("model: {}\n---\nmodel: {}\n", "expected a single document"),
        ("# x\n" * 2_500_000, "10,000,000 bytes, and settings have at most 262,144"),
        ("model:\n  num_layers: 2\n".encode("utf-16"), "'utf-8' codec can't decode"),
        (aliases("model: *i\n"), "unknown setting"),
        (aliases("  data_path: *i\n"), "data_path"),
    )
]


# --- Hugging Face folders


WEIGHTS, WEIGHT = "model.safetensors", "model.layers.0.self_attn.q_proj.weight"  # any weight would do


def index(file: str) -> Change:
    """Return a change that adds an index, which names `file` as the weights."""
    return write(f"{WEIGHTS}.index.json", json.dumps({"weight_map": {WEIGHT: file}}))


def spoil(change_tensors: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change_tensors(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return change


MODELS = [
    *((index(file), f"is {file!r}, but must be a safetensors file in the same folder")
      for file in ("../outside.safetensors", "/etc/w.safetensors", "sub/w.safetensors", "w.bin")),
    *((edit("config.json", **{key: "somebody/kernel"}), f"{key} is 'somebody/kernel', for which transformers may")
      for key in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")),
    (write(WEIGHTS, struct.pack("<Q", 100_000) + b"[" * 100_000), f"{WEIGHTS}: not a safetensors file"),
    (spoil(lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT].int()})), "is stored as torch.int32"),
    (spoil(lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT][:4].clone()})), "has shape (4, 8)"),
    (spoil(lambda tensors: tensors[WEIGHT].fill_(float("nan"))), "finite"),
    (spoil(lambda tensors: tensors.update({"\x1b[2J\x1b]0;owned\x07": torch.zeros(1)})), r"shape: '\x1b[2J"),
    (edit("config.json", num_hidden_layers=10**6), "num_hidden_layers 1,000,000"),
    (edit("config.json", intermediate_size=2**31 - 1), "give it (2147483647, 8)"),
    (edit("config.json", vocab_size=10**9), "give it (1000000000, 8)"),
    (edit("config.json", num_labels=10**6), "num_labels is 1000000"),  # transformers gives each of them a name
    (edit("config.json", hidden_act="\x1b[31m"), "hidden_act is '\\x1b[31m'"),
    (write("config.json", b"\xff"), "not JSON"),
    (write("config.json", '{"vocab_size": 16, "vocab_size": 17}'), "duplicate key 'vocab_size'"),
    (make_huge("config.json"), HUGE),
    (edit("config.json", vocab_size=len(WORDS) - 1), f"has {len(WORDS)} ids and the embedding {len(WORDS) - 1} rows"),
]  # fmt: skip


# Kind in readers.py -> changes of a valid folder, each with part of the refusal.
CONTENTS = {
    "corpus": CORPORA,
    "tokenizer.json": TOKENIZER_JSON,
    "vocab.txt": VOCABULARIES,
    "tokenizer.model": SENTENCEPIECE,
    "YAML": YAML,
    "model": MODELS,
}
