"""Fast back ends give the ids of the reference, and a difference in a verified document is detected."""

import importlib.metadata
import json
import pickle
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import tokenizers
from tokenizers import models
from unit.data.small_corpus import ROBERTA, SPECIAL, byte_level_backend, write_vocabulary

from megatron_neobert.data.tokenizer import fast_backends
from megatron_neobert.data.tokenizer.fast_backends import BackendMismatch, Encoder, _build_nanotoken, open_encoder
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer, load_tokenizer, train_wordpiece
from megatron_neobert.errors import ConfigError, install_command

pytest.importorskip("nanotoken", reason="nanotoken is not installed")

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
PIECES = ["hello", "world", "odd", *LETTERS, *(f"##{letter}" for letter in LETTERS), *"[].,!?'\"#<>/|-", "é", "字"]


def wordpiece(folder, pieces: Sequence[str] = PIECES) -> Tokenizer:
    return load_tokenizer(write_vocabulary(folder / "vocab.txt", pieces))


def roberta(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(backend, dict(zip(("cls", "pad", "sep", "unk", "mask"), ROBERTA, strict=True)))


@pytest.fixture
def two_tokenizers(tmp_path):
    """A tokenizer, and another one in which the ids of "odd" and "world" are swapped."""
    (tmp_path / "other").mkdir()
    swapped = ["odd" if piece == "world" else "world" if piece == "odd" else piece for piece in PIECES]
    return wordpiece(tmp_path), wordpiece(tmp_path / "other", swapped)


def test_probe_has_words_at_the_limit_of_own_vocabularies():
    trained = train_wordpiece(["ab"], vocab_size=200, lowercase=True, min_frequency=2)
    assert {"a" * 499, "a" * 500, "a" * 501} <= {*fast_backends.probe_strings(trained)}
    assert not open_encoder(trained, "fast").is_reference
    assert len(_build_nanotoken(trained)(["a" * 500]).ids) == 500


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_text_of_special_tokens_stays_text_with_every_back_end(tmp_path, backend):
    byte_level = byte_level_backend()
    byte_level.add_special_tokens(ROBERTA)
    for tokenizer in (wordpiece(tmp_path), roberta(byte_level)):
        encoder = open_encoder(pickle.loads(pickle.dumps(tokenizer)), backend)
        text = " ".join(["hello", *tokenizer.special_names.values(), *ROBERTA, *SPECIAL])
        control = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
        assert set(control.encode(text, add_special_tokens=False).ids) >= set(tokenizer.special_ids)
        assert not set(encoder.encode_batch([text]).ids.tolist()) & (set(tokenizer.special_ids) - {tokenizer.unk_id})


def test_text_of_a_special_token_without_brackets_is_unknown_with_every_back_end(tmp_path):
    path = write_vocabulary(tmp_path / "vocab.txt", PIECES)
    path.write_text(path.read_text().replace("[MASK]", "mask"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"mask_token": "mask", "do_lower_case": True}))
    tokenizer = load_tokenizer(path)
    for backend in ("fast", "reference"):
        batch = open_encoder(tokenizer, backend).encode_batch(["hello mask masks"])
        names = [tokenizer.backend.id_to_token(int(id_)) for id_ in batch.ids]
        assert names == ["hello", "[UNK]", "[UNK]", "##s"]


@pytest.mark.parametrize(
    ("number", "is_detected"),
    [(0, True), (63, True), (64, False), (1999, False), (2000, True), (2001, False), (4000, True)],
)
def test_wrong_ids_are_detected_in_the_first_64_documents_and_in_every_2000th(two_tokenizers, number, is_detected):
    right, wrong = two_tokenizers
    encoder = Encoder(right, name="fast 1.0", fast=_build_nanotoken(wrong))
    texts = ["hello"] * 4100
    texts[number] = "hello odd worlds"
    message = r"fast 1\.0 differs from tokenizers .*'hello odd worlds'.* gives \[\d+"
    with pytest.raises(BackendMismatch, match=message) if is_detected else nullcontext() as caught:
        for start in range(0, len(texts), 37):
            encoder.encode_batch(texts[start : start + 37])
    if caught is not None:
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # workers send the exception


def test_panic_of_a_rust_back_end_is_a_mismatch_and_ctrl_c_is_not(tmp_path):
    tokenizer = wordpiece(tmp_path)
    broken = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    broken.normalizer = tokenizers.normalizers.Replace("b", "")
    broken.add_tokens([tokenizers.AddedToken("b", normalized=True)])  # its normalised text is empty: a panic

    def panic(texts):
        return broken.encode("é")

    def interrupt(texts):
        raise KeyboardInterrupt

    with pytest.raises(BaseException, match="bad split") as caught:
        panic([])
    assert not isinstance(caught.value, Exception)  # control: `except Exception` does not catch it
    with pytest.raises(BackendMismatch, match=r"fast 1\.0 failed \(PanicException: AddedVocabulary bad split\)"):
        Encoder(tokenizer, name="fast 1.0", fast=panic).encode_batch(["a"])
    with pytest.raises(KeyboardInterrupt):
        Encoder(tokenizer, name="fast 1.0", fast=interrupt).encode_batch(["a"])


def test_model_without_fast_back_end_falls_back_with_a_note_or_is_refused():
    unigram = models.Unigram([*((name, 0.0) for name in ROBERTA), ("a", -1.0)], unk_id=3)
    tokenizer = roberta(tokenizers.Tokenizer(unigram))
    encoder = open_encoder(tokenizer, "auto")
    assert encoder.is_reference and encoder.name == f"tokenizers {tokenizers.__version__}"
    assert encoder.note == "nanotoken does not support a Unigram model with this normalizer and pre-tokenizer"
    assert encoder.encode_batch(["aa"]).ids.tolist() == [5, 5]
    with pytest.raises(ConfigError, match=r"--tokenizer-backend fast: nanotoken does not support a Unigram model"):
        open_encoder(tokenizer, "fast")


def test_missing_package_falls_back_with_its_remedy(tmp_path, monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    encoder = open_encoder(wordpiece(tmp_path), "auto")
    assert encoder.is_reference and "nanotoken is not installed, and this takes" in encoder.note
    assert encoder.note.endswith(install_command("fast"))


def test_backend_that_fails_the_probe_is_not_used(two_tokenizers, monkeypatch):
    right, wrong = two_tokenizers
    monkeypatch.setattr(fast_backends, "_build_nanotoken", lambda tokenizer: _build_nanotoken(wrong))
    assert open_encoder(right, "auto", probe=False).is_reference is False  # control: without the probe
    encoder = open_encoder(right, "auto")
    assert encoder.is_reference and "differs from tokenizers" in (encoder.note or "")
