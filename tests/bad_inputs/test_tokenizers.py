"""Tokenizer files that would fail hours later, or never: refused when they are read, with the name of the file.

Sound files, and types of tokenizer that do not fit them, are in tests/unit/data/tokenizer.
"""

import base64
import json
import struct

import pytest
from bad_inputs.refusals import assert_refused
from bad_inputs.small_sentencepiece import write_model

from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

NAMES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
IDS = {name: id_ for id_, name in enumerate(NAMES)}


def load_and_use(path):
    tokenizer = load_tokenizer(path)
    tokenizer.encode_batch(["w5 \u2603 zz", ""])
    return tokenizer.fingerprint


def test_sound_files_are_read(corpus):
    for name in (".", "vocab.txt", "tokenizer.json"):
        load_and_use(corpus.tokenizer / name)
    load_and_use(write_model(corpus.folder / "tokenizer.model"))


CONFIGS = [
    ({"auto_map": "AutoTokenizer"}, ["auto_map asks for the tokenizer's own Python code"]),
    ({"auto_map": {"AutoTokenizer": 5}}, ["auto_map asks for"]),
    ({"do_lower_case": "false"}, ['do_lower_case to be true, false or null, found "false"']),
    ({"strip_accents": []}, ["strip_accents to be true, false or null, found []"]),
    ({"tokenize_chinese_chars": "yes" * 999}, ["tokenize_chinese_chars to be true, false or null"]),
    ({"mask_token": 7}, ["mask_token to be the name of a token, found 7"]),
    ({"cls_token": "\ud800"}, ["cls_token to be the name of a token, found"]),
    ({"mask_token": ""}, ["mask_token to be the name of a token"]),
    ({"mask_token": {"content": None, "lstrip": True}}, ["mask_token to be the name of a token"]),
    ({"mask_token": "[PAD]"}, ["'[PAD]' is the mask token and the pad token as well"]),
    ({"unk_token": "[MASK]"}, ["'[MASK]' is the mask token and the unk token as well"]),
    (
        {"unk_token": "[CLS]", "cls_token": "[UNK]"},
        ["writes '[UNK]' for unknown text, but '[CLS]' is the unknown token"],
    ),
    ({"sep_token": "[NOWHERE]"}, ["[NOWHERE] missing among 100 ids"]),
    ([], ["expected a JSON object, found list"]),
    ("[" * 100_000, ["not readable as JSON"]),
    ('{"a": ' + "1" * 5000 + "}", ["not readable as JSON", "4300 digits"]),
    ("", ["line 1, column 1: not JSON"]),
    (b"\xff\xfe{\x00}\x00", ["not UTF-8 at byte 0"]),
]


@pytest.mark.parametrize(("config", "words"), CONFIGS, ids=[str(config)[:40] for config, _ in CONFIGS])
def test_configuration_that_contradicts_itself_or_the_vocabulary_is_refused(corpus, config, words):
    (corpus.tokenizer / "tokenizer.json").unlink()
    content = config if isinstance(config, (str, bytes)) else json.dumps(config)
    (corpus.tokenizer / "tokenizer_config.json").write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )
    (corpus.tokenizer / "special_tokens_map.json").unlink()
    assert_refused(lambda: load_and_use(corpus.tokenizer), 65, *words)


@pytest.mark.parametrize("config", [{"auto_map": 5}, {"auto_map": {}}, {"auto_map": None}, {"strip_accents": None}])
def test_configuration_that_decides_nothing_changes_nothing(corpus, config):
    expected = load_and_use(corpus.tokenizer)
    for name in ("tokenizer.json", "special_tokens_map.json"):
        (corpus.tokenizer / name).unlink()
    (corpus.tokenizer / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True, **config}))
    assert load_and_use(corpus.tokenizer) == expected


def test_template_without_the_text_does_not_lose_it(corpus):
    path = corpus.tokenizer / "tokenizer.json"
    expected = load_tokenizer(path).encode_batch(["w5 w6"]).ids.tolist()
    state = json.loads(path.read_text())
    for place in ("single", "pair"):
        template = state["post_processor"][place]
        state["post_processor"][place] = [entry for entry in template if "SpecialToken" in entry]
    path.write_text(json.dumps(state))
    assert load_tokenizer(path).encode_batch(["w5 w6"]).ids.tolist() == expected != []


def unigram(**values):
    vocabulary = [[name, 0.0] for name in (*NAMES, "a")]
    return {"model": {"type": "Unigram", "vocab": vocabulary, "unk_id": 1, **values}}


def precompiled(rules):
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(rules).decode()}}


def split_at(pattern):
    return {"pre_tokenizer": {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}}


STATES = [
    pytest.param(precompiled(b""), ["precompiled_charsmap is cut off or damaged"], id="empty rules"),
    pytest.param(precompiled(b"\xff" * 4), ["precompiled_charsmap is cut off"], id="rules of 4 GiB"),
    pytest.param(precompiled(struct.pack("<I", 6) + bytes(9)), ["precompiled_charsmap is cut off"], id="odd rules"),
    pytest.param(precompiled(struct.pack("<I", 4) + bytes(4) + b"\xff"), ["not a tokenizer.json"], id="not UTF-8"),
    pytest.param(
        {"normalizer": {"type": "Sequence", "normalizers": [precompiled(b"\xff" * 9)["normalizer"]]}},
        ["precompiled_charsmap is cut off"],
        id="rules inside a sequence",
    ),
    pytest.param(
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "****"}}, ["precompiled_charsmap"], id="base64"
    ),
    pytest.param({"normalizer": {"type": "Unheard"}}, ["not a tokenizer.json"], id="unheard normalizer"),
    pytest.param({"normalizer": 5}, ["not a tokenizer.json"], id="number for a normalizer"),
    pytest.param(split_at({"Regex": "(["}), ["not a tokenizer.json", "Oniguruma"], id="half an expression"),
    pytest.param({"model": {"type": "Unheard", "vocab": {}}}, ["not a tokenizer.json"], id="unheard model"),
    pytest.param({"model": None}, ["not a tokenizer.json"], id="no model"),
    pytest.param(unigram(unk_id=None), ["cannot encode a text", "unk_id"], id="Unigram without unknown"),
    pytest.param(unigram(unk_id=99), ["not a tokenizer.json"], id="Unigram with a lying unknown"),
    pytest.param(unigram(vocab=[]), ["not a tokenizer.json"], id="Unigram without pieces"),
    pytest.param({"added_tokens": None}, ["not a tokenizer.json"], id="null for tokens"),
    pytest.param({"added_tokens": [5]}, ["not a tokenizer.json"], id="number for a token"),
    pytest.param({"version": "9.9"}, ["not a tokenizer.json"], id="another version"),
    pytest.param({"truncation": {"max_length": -1}}, ["not a tokenizer.json"], id="truncation below 0"),
]


@pytest.mark.parametrize(("changes", "words"), STATES)
def test_tokenizer_json_that_the_library_would_fail_at_is_refused(corpus, changes, words):
    path = corpus.tokenizer / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    assert_refused(lambda: load_and_use(path), 65, "tokenizer.json", *words)


MODELS = [
    ({"unk_token": "[NOWHERE]"}, ["writes '[NOWHERE]' for unknown text"]),
    ({"vocab": {}}, ["cannot encode a text"]),
    ({"vocab": {"[PAD]": 2**40}}, ["not a tokenizer.json"]),
    ({"vocab": {"[PAD]": 0, "[UNK]": 2**32 - 1}}, ["claims id"]),
    ({"vocab": {**IDS, "a": 500}}, ["id 5 is missing although ids go up to 500"]),
    ({"vocab": {**IDS, "a": 4}}, ["id 4 belongs to '", "' and to '"]),
    ({"max_input_chars_per_word": -1}, ["not a tokenizer.json"]),
]


@pytest.mark.parametrize(("changes", "words"), MODELS, ids=[str(changes)[:40] for changes, _ in MODELS])
def test_wordpiece_model_that_the_library_would_fail_at_is_refused(corpus, changes, words):
    path = corpus.tokenizer / "tokenizer.json"
    state = json.loads(path.read_text())
    state["model"].update(changes)
    path.write_text(json.dumps(state))
    assert_refused(lambda: load_and_use(path), 65, "tokenizer.json", *words)


TEXTS = [
    (b"\x1f\x8b\x08" + bytes(100), ["line 1: not UTF-8"]),
    (b'{"content": "hello"}\n{"content": "world"}\n', ["line 1: a JSON object and no piece of a vocab.txt"]),
    ("".join(f"{name}\n" for name in NAMES).encode("utf-16"), ["line 1: not UTF-8"]),
    ("\r".join(NAMES).encode(), ["missing among 1 ids"]),
    ("\r\n".join([*NAMES, "a", "a"]).encode(), ["line 7: 'a' stands on line 6 too"]),
    ("\n".join([*NAMES, "", ""]).encode() + b"\n", ["line 6: empty"]),
    ("\n".join([*NAMES, "[MASK]"]).encode(), ["line 6: '[MASK]' stands on line 5 too"]),
    ("\n".join(NAMES[:4]).encode(), ["[MASK] missing among 4 ids"]),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", ["missing among 3 ids"]),
]


@pytest.mark.parametrize(("content", "words"), TEXTS, ids=[str(content)[:40] for content, _ in TEXTS])
def test_vocabulary_that_is_something_else_is_refused(tmp_path, content, words):
    path = tmp_path / "vocab.txt"
    path.write_bytes(content)
    assert_refused(lambda: load_and_use(path), 65, "vocab.txt", *words)


def last_piece(name, value):
    return lambda model: setattr(model.pieces[-1], name, value)


def trainer(name, value):
    return lambda model: setattr(model.trainer_spec, name, value)


def rules(content):
    return lambda model: setattr(model.normalizer_spec, "precompiled_charsmap", content)


def leave_a_piece_of_bpe_unused(model):
    model.trainer_spec.model_type = 2
    model.pieces[-1].type = 5


SENTENCEPIECE = [
    (last_piece("score", float("nan")), "a score of a piece is not a finite number"),
    (last_piece("piece", ""), "not a SentencePiece model, or cut off"),
    (last_piece("piece", "a"), "the piece 'a' occurs twice"),
    (last_piece("piece", "x" * 1_000_000), "a piece has 1,000,000 characters"),
    (lambda model: setattr(model.pieces[0], "type", 1), "0 of 8 pieces stand for unknown text"),
    (leave_a_piece_of_bpe_unused, "1 pieces of a BPE model are marked unused"),
    (trainer("model_type", 3), "model type 3 (whole words or characters) is not supported; train a BPE or Unigram"),
    (trainer("treat_whitespace_as_suffix", True), "spaces at the end of pieces, or not escaped, are not supported"),
    (lambda model: model.ClearField("trainer_spec"), "the settings are missing: cut off? Fetch it again"),
    (rules(b"\xff" * 8), "the normalisation rules are cut off or damaged"),  # of 4 GiB
    (rules(struct.pack("<I", 4) + bytes(4) + b"\xff"), "the tokenizers library refuses"),  # not UTF-8
    # The lengths add up, but the first unit of the table leads to one that is not there.
    (rules(struct.pack("<II", 4, 0x7FFFFC00) + b"x\0"), "cannot encode a text"),
]


@pytest.mark.parametrize(("change", "words"), SENTENCEPIECE, ids=[words[:40] for _, words in SENTENCEPIECE])
def test_sentencepiece_model_that_lies_is_refused(tmp_path, change, words):
    path = write_model(tmp_path / "tokenizer.model", change=change)
    assert_refused(lambda: load_and_use(path), 65, "tokenizer.model", words)


@pytest.mark.parametrize(
    "tail",
    [b"\x0a" + b"\xff" * 8 + b"\x7f", b"\x0a" + b"\xff" * 300_000, b"\x0a\x03\x0a\x01\xff"],
    ids=["piece of 2^63 bytes", "endless number", "piece that is not UTF-8"],
)
def test_file_that_is_no_sentencepiece_model_is_refused(tmp_path, tail):
    path = write_model(tmp_path / "tokenizer.model", tail=tail)
    assert_refused(lambda: load_and_use(path), 65, "tokenizer.model: not a SentencePiece model, or cut off")


@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json", "tokenizer.model"])
def test_file_as_large_as_a_corpus_is_not_read_as_a_tokenizer(tmp_path, name):
    path = tmp_path / name
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert_refused(lambda: load_and_use(path), 65, name, "1,099,511,627,776 bytes are more than 536,870,912")
