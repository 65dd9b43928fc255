"""SentencePiece models give SentencePiece's ids, with the exceptions that the module lists, and all five roles."""

import re
from pathlib import Path

import pytest
from tests_tiny import made_up_texts
from unit.data.small_corpus import ids_of

from megatron_neobert.data.tokenizer.fast_backends import probe_strings
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")

LINES = made_up_texts(1500, letters="kaotmirensolth.éü字")
ASCII = "".join(map(chr, range(33, 127)))  # so that the letters of "<s>" are known
IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
KINDS = {
    "bpe": {"model_type": "bpe", **IDENTITY},
    "bpe with bytes": {"model_type": "bpe", "byte_fallback": True, **IDENTITY},
    "bpe without a space before the text": {"model_type": "bpe", "add_dummy_prefix": False, **IDENTITY},
    "bpe that removes spaces": {"model_type": "bpe", "normalization_rule_name": "identity"},
    "unigram": {"model_type": "unigram", **IDENTITY},
    "unigram that removes spaces": {"model_type": "unigram", "normalization_rule_name": "identity"},
}


def train(folder: Path, **settings) -> Path:
    """Train a model of 450 pieces, which takes about half a second."""
    path = folder / "tokenizer"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_prefix=str(path),
        **{"vocab_size": 450, "minloglevel": 2, "required_chars": ASCII, "hard_vocab_limit": False, **settings},
    )
    return path.with_suffix(".model")


def differing(path: Path, texts: list[str]) -> list[str]:
    """Return the texts for which SentencePiece gives other ids."""
    expected = sentencepiece.SentencePieceProcessor(model_file=str(path)).encode(texts)
    ids = ids_of(load_tokenizer(path), texts)
    return [text for text, *both in zip(texts, ids, expected, strict=True) if both[0] != both[1]]


def spaced_texts() -> list[str]:
    numbers = [0, 1, 2, 3, 7, 16, 17, 20, 33]
    return [f"{' ' * a}ka{' ' * b}to\n{' ' * c}" for a in numbers for b in numbers for c in numbers]


def adversarial_texts(path: Path) -> list[str]:
    texts = [*probe_strings(load_tokenizer(path)), *LINES[:200], *spaced_texts()]
    assert len(texts) > 3500
    return texts


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_sentencepiece_or_in_unigram_models_equally_likely_on_adversarial_strings(tmp_path, kind):
    path = train(tmp_path, **KINDS[kind])
    different = differing(path, [*adversarial_texts(path), "[MASK] <s>a</s> <unk><pad>", "<0x0A>"])
    assert not different or KINDS[kind]["model_type"] == "unigram"
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    for text in different:
        segmentations = (ids_of(load_tokenizer(path), [text])[0], processor.encode(text))
        score, expected = (sum(processor.get_score(id_) for id_ in ids) for ids in segmentations)
        assert score == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_ids_with_nfkc_rules_differ_only_if_several_code_points_form_one_character(tmp_path, model_type):
    path = train(tmp_path, model_type=model_type, normalization_rule_name="nmt_nfkc", byte_fallback=True)
    texts = [*adversarial_texts(path), "ﬁnance ½ Ｔｏ　ＫＡ ㌀ é e\u0301", "한국어"]
    one_character = re.compile("[\u0300-\u036f]{2}|\u034f|[\u1100-\u11ff]")  # two marks, a joiner, Korean letters
    different = differing(path, texts)
    assert different  # the exception exists
    assert [text for text in different if not one_character.search(text)] == []


@pytest.mark.parametrize("rules", [IDENTITY, {"normalization_rule_name": "nmt_nfkc"}], ids=["identity", "nfkc"])
def test_user_defined_symbols_split_a_text_as_in_sentencepiece(tmp_path, rules):
    symbols = ["\n", "<tag>", "<tag>>", "ka ka"]
    path = train(tmp_path, model_type="bpe", user_defined_symbols=symbols, **rules)
    tokenizer = load_tokenizer(path)
    texts = ["ka\nto", "ka \n to", "\nka\n", "ka\n\n\nto", "ka<tag>to <tag> <tag>>", " <tag>ka", "ka ka", "<tag><tag>"]
    texts += spaced_texts()
    assert differing(path, texts) == []
    ids = {symbol: tokenizer.backend.token_to_id(symbol) for symbol in symbols}
    assert ids["\n"] in ids_of(tokenizer, ["ka\nto"])[0]
    assert not set(ids.values()) & set(tokenizer.special_ids)


def test_text_of_a_user_defined_mask_stays_text(tmp_path):
    path = train(tmp_path, model_type="bpe", user_defined_symbols=["[MASK]"], **IDENTITY)
    tokenizer = load_tokenizer(path)
    assert tokenizer.special_tokens["mask"] == 3
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert 3 in processor.encode("ka[MASK]")  # control: SentencePiece gives the mask id
    assert 3 not in ids_of(tokenizer, ["ka[MASK]"])[0]


@pytest.mark.parametrize(
    ("settings", "ids"),
    [
        ({"model_type": "bpe"}, {"cls": 1, "sep": 2, "pad": -2, "mask": -1, "unk": 0}),  # Llama's layout
        (
            {"model_type": "unigram", "bos_id": -1, "eos_id": -1, "unk_id": 0},
            {"cls": -4, "pad": -3, "sep": -2, "unk": 0, "mask": -1},
        ),
    ],
)
def test_missing_special_tokens_are_added_after_the_vocabulary(tmp_path, settings, ids):
    tokenizer = load_tokenizer(train(tmp_path, **settings))
    assert tokenizer.special_tokens == {role: id_ % tokenizer.vocab_size for role, id_ in ids.items()}
    names = {"cls": "<s>", "sep": "</s>", "pad": "<pad>", "mask": "<mask>", "unk": "<unk>"}
    assert tokenizer.special_names == names


def test_names_of_the_model_and_of_bert_are_recognised(tmp_path):
    bert = train(tmp_path, control_symbols=["[CLS]", "[SEP]"], pad_id=0, unk_id=1, bos_id=-1, eos_id=-1)
    assert load_tokenizer(bert).special_names["cls"] == "[CLS]"
    gemma = train(tmp_path, bos_piece="<bos>", eos_piece="<eos>", unk_piece="<oov>")
    names = load_tokenizer(gemma).special_names
    assert (names["cls"], names["sep"], names["unk"]) == ("<bos>", "<eos>", "<oov>")


@pytest.mark.parametrize("kind", KINDS)
def test_saved_folder_has_the_same_fingerprint_and_ids_and_decodes(tmp_path, kind):
    tokenizer = load_tokenizer(train(tmp_path, **KINDS[kind]))
    tokenizer.save_tokenizer_files(tmp_path / "saved", model_max_length=16)
    loaded = load_tokenizer(tmp_path / "saved")
    texts = LINES[:20]
    assert loaded.fingerprint == tokenizer.fingerprint
    assert ids_of(loaded, texts) == ids_of(tokenizer, texts)
    assert [loaded.decode(ids) for ids in ids_of(loaded, texts)] == texts
