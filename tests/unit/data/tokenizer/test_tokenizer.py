"""Ids equal the published ones, no text gives a special id, and saved files load in transformers."""

import json

import numpy as np
import pytest
import transformers
from commands import PUBLISHED, command_line, succeed
from json_files import write_jsonl
from security.small_sentencepiece import write_model
from tests_tiny import made_up_texts
from tokenizers import models
from transformers import BertTokenizer
from unit.data.small_corpus import ROBERTA, byte_level_backend, ids_of, write_vocabulary

from megatron_neobert.data.tokenizer.fast_backends import probe_strings
from megatron_neobert.data.tokenizer.files import build_bert_backend
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer, load_tokenizer, train_wordpiece
from megatron_neobert.errors import ConfigError

PIECES = ["hello", "world", "##s", "mask", "[", "]", "fu", "##hrer", *"abcdefghijklmnopqrstuvwxyz", "##a", "##b", "."]


@pytest.fixture
def vocab_txt(tmp_path):
    return write_vocabulary(tmp_path / "vocab.txt", PIECES)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.backend.id_to_token(id_) for id_ in ids_of(tokenizer, [text])[0]]


def test_ids_equal_the_published_ones_of_bert_base_uncased(bert_vocabulary):
    tokenizer = load_tokenizer(bert_vocabulary)
    lines = (PUBLISHED / "bert_base_uncased_ids.jsonl").read_text(encoding="utf-8").splitlines()
    pairs = [json.loads(line) for line in lines]
    assert len(pairs) == 43
    assert ids_of(tokenizer, [pair["text"] for pair in pairs]) == [pair["ids"] for pair in pairs]
    roles = {"pad": 0, "unk": 100, "cls": 101, "sep": 102, "mask": 103}
    assert tokenizer.special_tokens == roles
    assert tokenizer.special_ids == tuple(sorted(roles.values()))


def test_vocab_txt_gives_the_ids_of_transformers_on_any_unicode_text(bert_vocabulary):
    reference, tokenizer = BertTokenizer(str(bert_vocabulary)), load_tokenizer(bert_vocabulary)
    texts = [text.replace("]", "") for text in probe_strings(tokenizer)]  # transformers parses [MASK]
    assert ids_of(tokenizer, texts) == reference(texts, add_special_tokens=False)["input_ids"]


def test_vocabulary_is_uncased_if_it_has_no_upper_case_letter(tmp_path):
    uncased = load_tokenizer(write_vocabulary(tmp_path / "uncased.txt", [*PIECES, "ℝ"]))  # ℝ has no lower case
    cased = load_tokenizer(write_vocabulary(tmp_path / "cased.txt", [*PIECES, "Hello"]))
    assert pieces(uncased, "Hello Führer") == ["hello", "fu", "##hrer"]
    assert pieces(cased, "Hello Führer") == ["Hello", "[UNK]"]


@pytest.mark.parametrize(("lower_case", "expected"), [(True, "hello"), (False, "[UNK]")])
def test_tokenizer_config_determines_the_case(vocab_txt, lower_case, expected):
    (vocab_txt.parent / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower_case}))
    for path in (vocab_txt, vocab_txt.parent):
        assert pieces(load_tokenizer(path), "HELLO") == [expected]


def byte_level(tmp_path, special, config):
    backend = byte_level_backend(special)
    backend.add_special_tokens(special)
    backend.enable_truncation(4)
    backend.enable_padding()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(tmp_path)


def test_names_of_roberta_are_recognised_and_stored_truncation_and_padding_are_ignored(tmp_path):
    tokenizer = byte_level(tmp_path, [*ROBERTA, "<|extra|>"], {})
    assert tokenizer.special_tokens == {"cls": 0, "pad": 1, "sep": 2, "unk": 3, "mask": 4}
    assert tokenizer.special_ids == (0, 1, 2, 3, 4, 5)
    lengths = tokenizer.encode_batch(["hello world", "a<mask>"]).lengths.tolist()
    assert lengths == [12, 8]  # bytes, with the space of ByteLevel


def test_names_in_tokenizer_config_take_precedence(tmp_path):
    config = {"mask_token": {"content": "<|mask|>", "lstrip": True}, "cls_token": "</s>"}
    tokenizer = byte_level(tmp_path, [*ROBERTA, "<|mask|>"], config)
    assert tokenizer.special_tokens == {"cls": 2, "pad": 1, "sep": 2, "unk": 3, "mask": 5}


def test_fingerprint_is_a_fixed_function_of_the_content_and_survives_saving(vocab_txt, tmp_path):
    """If it changes, existing corpora no longer match their tokenizer, so the format version must change, too."""
    expected = "ed5ad540ce4cb62731e500d75a9c1a93fb80cd7e2168d029afee2346832e0d82"
    load_tokenizer(vocab_txt).save_tokenizer_files(tmp_path / "saved", model_max_length=16)
    for path in (vocab_txt, *(tmp_path / "saved" / name for name in (".", "tokenizer.json", "vocab.txt"))):
        assert load_tokenizer(path).fingerprint == expected


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["normalizer"].update(lowercase=False),
        lambda state: state["model"].update(max_input_chars_per_word=50),
        lambda state: state["model"]["vocab"].update({"hello": 6, "world": 5}),
        lambda state: state["added_tokens"].append(
            {**state["added_tokens"][0], "content": "new", "id": 42, "special": False}
        ),
    ],
    ids=["case", "word length", "two pieces swapped", "added token"],
)
def test_fingerprint_changes_with_every_change_of_ids(vocab_txt, tmp_path, change):
    tokenizer = load_tokenizer(vocab_txt)
    state = json.loads(tokenizer.backend.to_str())
    change(state)
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    assert load_tokenizer(tmp_path / "tokenizer.json").fingerprint != tokenizer.fingerprint


def test_folder_saved_by_transformers_has_the_fingerprint_of_its_vocab_txt(vocab_txt, tmp_path):
    transformers.BertTokenizer(str(vocab_txt)).save_pretrained(tmp_path / "theirs")
    assert (tmp_path / "theirs" / "tokenizer.json").exists()
    assert load_tokenizer(tmp_path / "theirs").fingerprint == load_tokenizer(vocab_txt).fingerprint


def test_saved_folder_loads_in_transformers_and_adds_special_tokens(vocab_txt, tmp_path):
    tokenizer = load_tokenizer(vocab_txt)
    tokenizer.save_tokenizer_files(tmp_path / "saved", model_max_length=16)
    for loader in (transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast):
        loaded = loader.from_pretrained(tmp_path / "saved")
        hello, world = ids_of(tokenizer, ["hello world"])[0]
        cls, sep, mask = tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id
        assert dict(loaded("Hello [MASK]")) == {"input_ids": [cls, hello, mask, sep], "attention_mask": [1] * 4}
        assert loaded("hello", "world")["input_ids"] == [cls, hello, sep, world, sep]
        assert (loaded.mask_token_id, loaded.pad_token_id, loaded.unk_token_id) == (mask, tokenizer.pad_id, 1)
        assert loaded.model_max_length == 16


def test_trained_vocabulary_is_the_same_in_every_process(tmp_path):
    write_jsonl(tmp_path / "texts.jsonl", ({"content": text} for text in made_up_texts(300)))
    tokenizers = []
    for name in ("first", "second", "third"):
        arguments = ("--input", tmp_path / "texts.jsonl", "--output", tmp_path / name, "--vocab-size", 1000)
        succeed(*command_line("train-tokenizer", *arguments))
        tokenizers.append(load_tokenizer(tmp_path / name))
    assert len({tokenizer.fingerprint for tokenizer in tokenizers}) == 1
    characters = sum(len(piece.removeprefix("##")) == 1 for piece in tokenizers[0].backend.get_vocab())
    assert characters + 100 < tokenizers[0].vocab_size  # control: there are merges, whose ties need an order


def test_trained_vocabulary_keeps_long_words_of_scripts_without_spaces_and_transformers_reads_it_alike(tmp_path):
    generator = np.random.default_rng(0)
    # Lao letters without a space: 500 are a word, 501 are unknown.
    words = ["".join(map(chr, generator.integers(0x0E94, 0x0EA4, length))) for length in (101, 178, 500, 501)]
    tokenizer = train_wordpiece(words, vocab_size=500, lowercase=False, min_frequency=2)
    ids = ids_of(tokenizer, words)
    assert [tokenizer.unk_id in word_ids for word_ids in ids] == [False, False, False, True]
    tokenizer.save_tokenizer_files(tmp_path, model_max_length=16)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(words, add_special_tokens=False)["input_ids"] == ids
    # A vocab.txt alone means the limit of BERT.
    assert not (tmp_path / "vocab.txt").exists()


@pytest.mark.parametrize(
    ("text", "lower_cased"),
    [("हिन्दी में", "हिनदी म"), ("ภาษาไทยที่ดี", "ภาษาไทยทด"), ("ភាសាខ្មែរ", "ភាសាខមែរ"), ("বাংলা ভাষা", "বাংলা ভাষা")],
    ids=["Hindi", "Thai", "Khmer", "Bengali"],
)
def test_lower_casing_removes_vowel_signs_that_unicode_calls_nonspacing(text, lower_cased):
    normalize = {
        lowercase: build_bert_backend(models.WordPiece(), lowercase=lowercase).normalizer.normalize_str
        for lowercase in (True, False)
    }
    assert normalize[True](text) == lower_cased
    assert normalize[False](text) == text


def test_vocabulary_below_the_number_of_characters_is_refused():
    # 94 ASCII characters without 26 capitals are 68; 26 letters and 10 digits continue words; 5 special tokens.
    with pytest.raises(ConfigError, match=rf"--vocab-size 108 is below the {68 + 36 + 5} ids .* the 68 frequent"):
        train_wordpiece(["some text"], vocab_size=108, lowercase=True, min_frequency=2)
    assert train_wordpiece(["some text"], vocab_size=109, lowercase=True, min_frequency=2).vocab_size == 109


def test_folder_gives_tokenizer_json_before_vocab_txt(vocab_txt, tmp_path):
    tokenizer = load_tokenizer(vocab_txt)
    tokenizer.save_tokenizer_files(tmp_path, model_max_length=16)
    write_vocabulary(tmp_path / "vocab.txt", PIECES[1:])
    assert load_tokenizer(tmp_path).vocab_size == tokenizer.vocab_size


def test_sentencepiece_model_is_recognised_by_its_content_and_taken_from_a_folder(tmp_path):
    model = write_model(tmp_path / "spm.bin")
    loaded = load_tokenizer(model)
    assert loaded.special_tokens["cls"] == 1
    model.rename(tmp_path / "spiece.model")
    assert load_tokenizer(tmp_path).fingerprint == loaded.fingerprint
