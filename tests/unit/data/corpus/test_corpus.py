"""The corpus on disk: Megatron's format byte for byte, and errors that name the damaged file and byte."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
from commands import ENVIRONMENT
from unit.data.small_corpus import cut, damage, numbered_tokenizer, put, random_documents, replaced, write_corpus

from megatron_neobert.data.corpus.format import token_dtype
from megatron_neobert.data.corpus.reader import Corpus, check_content, check_indexes
from megatron_neobert.data.corpus.shard_files import AllowedIds
from megatron_neobert.errors import DataError

LENGTHS = [3, 1, 4, 2]
HEADER_BYTES = 34
AT_LENGTHS = HEADER_BYTES
AT_POINTERS = AT_LENGTHS + 4 * len(LENGTHS)
AT_BOUNDARIES = AT_POINTERS + 8 * len(LENGTHS)
IDX_BYTES = AT_BOUNDARIES + 8 * (len(LENGTHS) + 1)
BIN_BYTES = 2 * sum(LENGTHS)


@pytest.fixture
def prefix(tmp_path, monkeypatch):
    """Four documents of 3, 1, 4 and 2 tokens as uint16, which are checked in steps of three items."""
    monkeypatch.setattr("megatron_neobert.data.corpus.shard_files._ITEMS_PER_STEP", 3)
    write_corpus(tmp_path / "small", random_documents(LENGTHS, 100))
    return tmp_path / "small"


@pytest.mark.parametrize("vocab_size", [100, 70_000])
def test_files_equal_those_of_megatrons_builder_byte_for_byte(tmp_path, vocab_size):
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    import torch

    documents = random_documents([5, 1, 300, 17], vocab_size)
    manifest = write_corpus(tmp_path / "ours", documents, numbered_tokenizer(vocab_size))
    dtype = indexed_dataset.DType.optimal_dtype(vocab_size)
    assert manifest.dtype == np.dtype(dtype).name == {100: "uint16", 70_000: "int32"}[vocab_size]
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for end in ("bin", "idx"):
        assert (tmp_path / f"ours.{end}").read_bytes() == (tmp_path / f"theirs.{end}").read_bytes()


@pytest.mark.parametrize(
    ("end", "change", "message"),
    [
        ("idx", put("<9s", 0, b"NOTANIDX1"), r"byte 0: expected magic b'MMIDIDX.*NOTANIDX1"),
        ("idx", put("<Q", 9, 7), "byte 9: expected version 1, found 7;"),
        ("idx", put("<B", 17, 9), r"byte 17: expected dtype code 8 \(uint16\) or 4 .*, found 9;"),
        ("idx", put("<B", 17, 4), f"expected 24 bytes for 6 tokens of int32, as in small.idx, found .* {BIN_BYTES}"),
        ("idx", cut(20), "byte 20: expected at least 34 bytes of header, found a file of 20"),
        ("idx", put("<QQ", 18, 1 << 40, (1 << 40) + 1), f"found a file of {IDX_BYTES} bytes"),
        ("idx", put("<Q", 26, 4), "byte 18: .* 4 sequences and 4 boundaries"),
        ("idx", put("<i", AT_LENGTHS + 4, -1), f"byte {AT_LENGTHS + 4}: .* document 1, found -1"),
        ("idx", put("<i", AT_LENGTHS, 4), f"byte {AT_POINTERS + 8}: .* 1 to be 8 bytes, .* found 6"),
        ("idx", put("<q", AT_POINTERS + 24, 99), "expected 103 bytes for 51 tokens of uint16"),
        ("idx", put("<q", AT_BOUNDARIES + 8, 2), f"byte {AT_BOUNDARIES + 8}: .* 1 .* 1, found 2"),
        ("bin", cut(-2), f"expected {BIN_BYTES} bytes .* of {BIN_BYTES - 2} bytes"),
        ("json", replaced(b'"documents": 4', b'"documents": 5'), "records 5, .* found 4"),
        (
            "json",
            replaced(b'"documents": 4', b'"documents": 5', b'"records": 4', b'"records": 5'),
            r"expected documents 4 as in small\.idx, found 5",
        ),
    ],
)
def test_check_of_the_indexes_finds_damage_and_names_the_byte_and_both_values(prefix, end, change, message):
    check_content(Corpus(prefix))
    path = prefix.with_suffix(f".{end}")
    damage(path, change)
    with pytest.raises(DataError, match=message) as caught:
        check_indexes(Corpus(prefix))
    assert path.name in str(caught.value)


@pytest.mark.parametrize(
    ("change", "wrong", "sound"),
    [
        (put("<i", AT_LENGTHS + 4, 2), 1, [0, 2, 3]),
        (put("<q", AT_POINTERS + 8, 1 << 40), 1, [2, 3]),
        (put("<qq", AT_POINTERS, -6, 0), 0, [2, 3]),
        (put("<q", AT_POINTERS + 16, 10), 2, [0, 3]),
        (put("<qq", AT_POINTERS + 8, 1 << 40, (1 << 40) + 2), 1, [3]),
        (put("<qq", AT_POINTERS + 8, (1 << 63) - 2, -1 << 63), 1, [3]),
    ],
)
def test_wrong_index_entry_is_found_when_its_document_is_read(tmp_path, change, wrong, sound):
    """The documents are the last four of eight, in a corpus shard of their own."""
    documents = random_documents(LENGTHS * 2, 100)
    write_corpus(tmp_path / "small", documents, shard_bytes=BIN_BYTES)
    damage(tmp_path / "small_00001.idx", change)
    corpus = Corpus(tmp_path / "small")
    for number in sound:
        assert corpus.document(4 + number).tolist() == documents[4 + number].tolist()
    assert corpus.lengths_of(4 + np.array(sound)).tolist() == [LENGTHS[number] for number in sound]
    numbers = np.array([4 + wrong])
    for read in (
        lambda: corpus.document(4 + wrong),
        lambda: corpus.lengths_of(numbers),
        lambda: corpus.gather(numbers, np.array([0]), np.array([1])),
    ):
        with pytest.raises(DataError, match=rf"small_00001\.idx, byte \d+: expected .* document {wrong}\b"):
            read()
    with pytest.raises(DataError, match=r"small_00001\.idx, byte \d+: expected "):
        check_indexes(corpus)


@pytest.mark.parametrize(
    ("vocab_size", "id_", "message"),
    [
        (100, 100, "expected an id below 100, found 100"),
        (70_000, -1, "expected an id below 70000, found -1"),
        (100, 4, "expected no special token, found 4"),
    ],
)
def test_forbidden_id_is_found_by_the_full_check_and_when_it_is_read(tmp_path, vocab_size, id_, message):
    documents = random_documents(LENGTHS, vocab_size)
    # Token 3 + 1 + 1 of the corpus.
    documents[2][1] = id_
    write_corpus(tmp_path / "corpus", documents, numbered_tokenizer(vocab_size))
    corpus = Corpus(tmp_path / "corpus")
    offset = 5 * corpus.dtype.itemsize
    with pytest.raises(DataError, match=rf"byte {offset}: {message} \(token 1 of document 2\)"):
        check_content(corpus)
    numbers, starts, lengths = np.array([3, 0, 2]), np.array([0, 1, 1]), np.array([2, 2, 3])
    with pytest.raises(DataError, match=rf"corpus: token 1 of document 2: {message}; the file is damaged"):
        corpus.gather(numbers, starts, lengths)
    starts[2], lengths[2] = 2, 2
    assert corpus.gather(numbers, starts, lengths).size == 6, "the control: the segments do not contain it"


@pytest.mark.parametrize("special_ids", [[0, 1, 2, 3, 4], [0, 50, 51, 97, 99], [95, 96, 97, 98, 99]])
def test_every_special_id_but_unk_is_forbidden_wherever_the_vocabulary_has_it(tmp_path, special_ids):
    unknown = special_ids[1]
    allowed = AllowedIds(special_ids, unknown=unknown, vocab_size=100)
    found = {id_ for id_ in range(120) if allowed.first_forbidden(np.array([7, id_], dtype=np.uint16)) is None}
    assert found == {*range(100)} - {*special_ids} | {unknown}


@pytest.mark.parametrize("vocab_size", [1000, 70_000])
@pytest.mark.parametrize(("shard_tokens", "shards"), [(1, 50), (150, 37), (1000, 5), (10_000, 1)])
def test_documents_are_read_from_any_number_of_shards(tmp_path, vocab_size, shard_tokens, shards):
    generator = np.random.default_rng(0)
    documents, dtype = random_documents(generator.integers(1, 200, 50), vocab_size), token_dtype(vocab_size)
    shard_bytes = shard_tokens * dtype.itemsize
    write_corpus(tmp_path / "corpus", documents, numbered_tokenizer(vocab_size), shard_bytes=shard_bytes)
    corpus = Corpus(tmp_path / "corpus")
    check_content(corpus)
    assert (len(corpus.shards), len(corpus)) == (shards, 50)
    all_lengths = corpus.lengths_of(np.arange(50))
    assert (all_lengths.dtype, all_lengths.tolist()) == (np.int32, list(map(len, documents)))
    assert corpus.lengths_between(7, 43).tolist() == all_lengths[7:43].tolist()
    for number in range(50):
        assert np.array_equal(corpus.document(number), documents[number])
    numbers = generator.integers(0, 50, 300)
    starts = generator.integers(0, all_lengths[numbers])
    lengths = generator.integers(0, all_lengths[numbers] - starts + 1)
    expected = [documents[d][s : s + n] for d, s, n in zip(numbers, starts, lengths, strict=True)]
    ids = corpus.gather(numbers, starts, lengths)
    assert ids.dtype == dtype
    assert np.array_equal(ids, np.concatenate(expected))
    assert corpus.gather(numbers[:0], starts[:0], lengths[:0]).size == 0
    pickled = pickle.dumps(corpus)
    assert len(pickled) < 1000, "another process maps the files itself"
    assert np.array_equal(pickle.loads(pickled).gather(numbers, starts, lengths), ids)


def test_limit_of_open_files_is_raised_for_many_shards(tmp_path):
    write_corpus(tmp_path / "corpus", random_documents([3] * 50, 100), shard_bytes=6)
    script = (
        "import resource, sys\n"
        "from megatron_neobert.data.corpus.reader import Corpus\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (60, 1000))\n"
        "print(len(Corpus(sys.argv[1])), 'documents')\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "corpus")]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert ended.stdout == "50 documents\n"
