"""Mutated tokenizer files: refused with an error of ours, or a tokenizer that gives legal ids.

The fingerprint decides whether a corpus may be used: equal fingerprints must mean equal ids.
"""

import shutil

import pytest
from bad_inputs.fuzzing import examples, mutated_file
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


def try_files(place, contents):
    """Loads a folder of these files and none besides."""
    folder, _ = place
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
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


@pytest.mark.parametrize(
    "name", ["vocab.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model"]
)
@examples(250)
@given(data=st.data())
def test_mutated_file_is_refused_or_gives_legal_ids(place, name, data):
    files = place[1]
    beside = {"vocab.txt": files["vocab.txt"]} if name.endswith(("config.json", "map.json")) else {}
    sound = try_files(place, beside or {name: files[name]})
    assert sound is not None
    found = try_files(place, {**beside, name: data.draw(mutated_file(name, files[name]))})
    assert found is None or (found[0] == sound[0]) <= (found[1] == sound[1])
