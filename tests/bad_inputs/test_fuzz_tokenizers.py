"""Mutated tokenizer files: refused with an error of ours, or a tokenizer that gives legal ids.

The fingerprint decides whether a corpus may be used: equal fingerprints must mean equal ids.
"""

import json
import shutil

import pytest
from bad_inputs.fuzzing import examples, mutated, mutated_json
from bad_inputs.refusals import bounded
from bad_inputs.small_sentencepiece import write_model
from hypothesis import given
from hypothesis import strategies as st
from unit.data.small_corpus import write_vocabulary

from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.errors import NeoBERTError

pytestmark = pytest.mark.slow

TEXTS = [
    "a b ab [MASK] hello",
    "",
    "\u00e9\u0301 \ufb01 \u4e2d\u6587",
    "x" * 200,
    "A\0\u200bb </s><mask>",
    "\u2581a  b ",
]
PIECES = [*"abhelox", "##a", "##b", "##l", "he", "##llo", "[", "]", "mask"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder for spoilt files, and the sound ones by name."""
    folder = tmp_path_factory.mktemp("tokenizers")
    write_vocabulary(folder / "vocab.txt", PIECES)
    load_tokenizer(folder / "vocab.txt").save_tokenizer_files(folder / "sound", model_max_length=16)
    write_model(folder / "sound" / "tokenizer.model")
    files = {path.name: path.read_bytes() for path in (folder / "sound").iterdir()}
    return folder / "spoilt", files


def ids_of(tokenizer):
    batch = tokenizer.encode_batch(TEXTS)
    return batch.ids.tolist(), batch.lengths.tolist()


def try_files(place, **contents):
    """Loads a folder of these files and none besides."""
    folder, _ = place
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in contents.items():
        (folder / name.replace("_txt", ".txt").replace("_json", ".json").replace("_model", ".model")).write_bytes(
            content
        )
    try:
        with bounded():
            tokenizer = load_tokenizer(folder)
            ids, _ = found = ids_of(tokenizer)
            fingerprint = tokenizer.fingerprint
    except NeoBERTError:
        return None
    never = {*tokenizer.special_ids} - {tokenizer.unk_id}
    assert all(0 <= id_ < tokenizer.vocab_size and id_ not in never for id_ in ids)
    return fingerprint, found


def load_sound(place, **contents):
    sound = try_files(place, **contents)
    assert sound is not None
    return sound


@examples(250)
@given(data=st.data())
def test_mutated_vocabulary_is_refused_or_gives_legal_ids(place, data):
    _, files = place
    sound = load_sound(place, vocab_txt=files["vocab.txt"])
    found = try_files(place, vocab_txt=data.draw(mutated(files["vocab.txt"])))
    assert found is None or (found[0] == sound[0]) <= (found[1] == sound[1])


@examples(400)
@given(data=st.data())
def test_mutated_tokenizer_json_is_refused_or_gives_legal_ids(place, data):
    _, files = place
    content = files["tokenizer.json"]
    sound = load_sound(place, tokenizer_json=content)
    spoilt = data.draw(st.one_of(mutated_json(json.loads(content)), mutated(content)))
    found = try_files(place, tokenizer_json=spoilt)
    assert found is None or (found[0] == sound[0]) <= (found[1] == sound[1])


@examples(250)
@given(data=st.data())
def test_mutated_configuration_is_refused_or_gives_legal_ids(place, data):
    _, files = place
    name = data.draw(st.sampled_from(["tokenizer_config.json", "special_tokens_map.json"]))
    spoilt = data.draw(st.one_of(mutated_json(json.loads(files[name])), mutated(files[name])))
    sound = load_sound(place, vocab_txt=files["vocab.txt"])
    found = try_files(place, vocab_txt=files["vocab.txt"], **{name.replace(".json", "_json"): spoilt})
    assert found is None or (found[0] == sound[0]) <= (found[1] == sound[1])


@examples(400)
@given(data=st.data())
def test_mutated_sentencepiece_model_is_refused_or_gives_legal_ids(place, data):
    _, files = place
    content = files["tokenizer.model"]
    sound = load_sound(place, tokenizer_model=content)
    found = try_files(place, tokenizer_model=data.draw(mutated(content)))
    assert found is None or (found[0] == sound[0]) <= (found[1] == sound[1])
