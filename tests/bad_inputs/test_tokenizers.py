"""Tokenizer files that would fail hours later, or never, are refused when they are read, with the name of the file.

tests/unit/data/tokenizer has valid files, and types of tokenizer that do not fit them.
"""

import base64
import json
import struct

import pytest
from bad_inputs.refusals import assert_refused
from bad_inputs.small_sentencepiece import write_model
from unit.data.small_corpus import SPECIAL, numbered_tokenizer

from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

IDS = {name: id_ for id_, name in enumerate(SPECIAL)}
STATE = json.loads(numbered_tokenizer(100).backend.to_str())


def load_and_use(path):
    tokenizer = load_tokenizer(path)
    tokenizer.encode_batch(["w5 \u2603 zz", ""])
    return tokenizer.fingerprint


def test_sound_files_are_read(corpus):
    for name in (".", "vocab.txt", "tokenizer.json"):
        load_and_use(corpus.tokenizer / name)
    load_and_use(write_model(corpus.folder / "tokenizer.model"))


CONFIGS = [
    ('{"auto_map": "AutoTokenizer"}', "auto_map asks for the tokenizer's own Python code"),
    ('{"do_lower_case": "false"}', 'do_lower_case to be true, false or null, found "false"'),
    ('{"mask_token": 7}', "mask_token to be the name of a token, found 7"),
    ('{"cls_token": "\\ud800"}', "cls_token to be the name of a token, found"),
    ('{"mask_token": {"content": null, "lstrip": true}}', "mask_token to be the name of a token"),
    ('{"mask_token": "[PAD]"}', "'[PAD]' is the mask token and the pad token as well"),
    ('{"unk_token": "[CLS]", "cls_token": "[UNK]"}', "writes '[UNK]' for unknown text, but '[CLS]' is the unknown"),
    ('{"sep_token": "[NOWHERE]"}', "[NOWHERE] missing among 100 ids"),
    ("[]", "expected a JSON object, found list"),
    ("[" * 100_000, "not readable as JSON"),
    ('{"a": ' + "1" * 5000 + "}", "4300 digits"),
    ("", "line 1, column 1: not JSON"),
    (b"\xff\xfe{\x00}\x00", "not UTF-8 at byte 0"),
]


@pytest.mark.parametrize(("config", "words"), CONFIGS, ids=[str(config)[:40] for config, _ in CONFIGS])
def test_configuration_that_contradicts_itself_or_the_vocabulary_is_refused(corpus, config, words):
    for name in ("tokenizer.json", "special_tokens_map.json"):
        (corpus.tokenizer / name).unlink()
    (corpus.tokenizer / "tokenizer_config.json").write_bytes(config if isinstance(config, bytes) else config.encode())
    assert_refused(lambda: load_and_use(corpus.tokenizer), 65, words)


@pytest.mark.parametrize("config", [{"auto_map": 5}, {"auto_map": {}}, {"strip_accents": None}])
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
    vocabulary = [[name, 0.0] for name in (*SPECIAL, "a")]
    return {"model": {"type": "Unigram", "vocab": vocabulary, "unk_id": 1, **values}}


def word_piece(**values):
    return {"model": {**STATE["model"], **values}}


def precompiled(rules):
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(rules).decode()}}


HALF_A_GROUP = {"type": "Split", "pattern": {"Regex": "(["}, "behavior": "Isolated", "invert": False}
STATES = {
    "empty rules": (precompiled(b""), "precompiled_charsmap is cut off or damaged"),
    "rules of 4 GiB": (precompiled(b"\xff" * 4), "precompiled_charsmap is cut off"),
    "odd rules": (precompiled(struct.pack("<I", 6) + bytes(9)), "precompiled_charsmap is cut off"),
    "rules that are not UTF-8": (precompiled(struct.pack("<I", 4) + bytes(4) + b"\xff"), "not a tokenizer.json"),
    "rules inside a sequence": (
        {"normalizer": {"type": "Sequence", "normalizers": [precompiled(b"\xff" * 9)["normalizer"]]}},
        "precompiled_charsmap is cut off",
    ),
    "rules not in base64": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "****"}},
        "precompiled_charsmap is cut off",
    ),
    "half an expression": ({"pre_tokenizer": HALF_A_GROUP}, "not a tokenizer.json (Oniguruma"),
    "no model": ({"model": None}, "not a tokenizer.json"),
    "null for tokens": ({"added_tokens": None}, "not a tokenizer.json"),
    "Unigram without unknown": (unigram(unk_id=None), "cannot encode a text"),
    "Unigram without pieces": (unigram(vocab=[]), "not a tokenizer.json"),
    "unknown piece nowhere": (word_piece(unk_token="[NOWHERE]"), "writes '[NOWHERE]' for unknown text"),
    "no pieces": (word_piece(vocab={}), "cannot encode a text"),
    "huge id": (word_piece(vocab={"[PAD]": 0, "[UNK]": 2**32 - 1}), "claims id"),
    "gap in the ids": (word_piece(vocab={**IDS, "a": 500}), "id 5 is missing although ids go up to 500"),
    "id of two pieces": (word_piece(vocab={**IDS, "a": 4}), "id 4 belongs to '"),
}


@pytest.mark.parametrize(("changes", "words"), STATES.values(), ids=STATES)
def test_tokenizer_json_that_the_library_would_fail_at_is_refused(tmp_path, changes, words):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**STATE, **changes}))
    assert_refused(lambda: load_and_use(path), 65, "tokenizer.json", words)


TEXTS = [
    (b"\x1f\x8b\x08" + bytes(100), "line 1: not UTF-8"),
    (b'{"content": "hello"}\n{"content": "world"}\n', "line 1: a JSON object and no piece of a vocab.txt"),
    ("\r\n".join([*SPECIAL, "a", "a"]).encode(), "line 7: 'a' stands on line 6 too"),
    ("\n".join([*SPECIAL, "", ""]).encode() + b"\n", "line 6: empty"),
    ("\n".join(SPECIAL[:4]).encode(), "[MASK] missing among 4 ids"),
]


@pytest.mark.parametrize(("content", "words"), TEXTS, ids=[str(content)[:40] for content, _ in TEXTS])
def test_vocabulary_that_is_something_else_is_refused(tmp_path, content, words):
    path = tmp_path / "vocab.txt"
    path.write_bytes(content)
    assert_refused(lambda: load_and_use(path), 65, "vocab.txt", words)


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
    "tail", [b"\x0a" + b"\xff" * 8 + b"\x7f", b"\x0a\x03\x0a\x01\xff"], ids=["2^63 bytes", "UTF-8"]
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
