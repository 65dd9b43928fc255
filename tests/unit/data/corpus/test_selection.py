"""Documents chosen by length and by drop lists, one bit per document: the same as a list of them, without the list."""

import json
import pickle

import numpy as np
import pytest
from unit.data.corpus.memory_corpus import MemoryCorpus
from unit.data.small_corpus import cut, numbered_tokenizer, random_documents, replaced, write_corpus

from megatron_neobert.data.corpus.drop_list import DropList, write_drop_list
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.corpus.selection import KeptDocuments
from megatron_neobert.errors import DataError, MissingInputError


class Volumes:
    """Lengths in several arrays, as a corpus of several volumes has them."""

    def __init__(self, *volumes: np.ndarray) -> None:
        self.volumes = volumes

    def length_arrays(self) -> list[np.ndarray]:
        return list(self.volumes)


def lengths_of(documents: int, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 1000, documents).astype(np.int32)


def listed(lengths: np.ndarray, documents: range, minimum: int, maximum: int | None) -> list[int]:
    return [
        number for number in documents if lengths[number] >= minimum and (maximum is None or lengths[number] <= maximum)
    ]


@pytest.mark.parametrize("cuts", [[], [1000], [1, 257, 258, 1024], [256, 512, 5000]])
@pytest.mark.parametrize(
    "documents", [range(6000), range(300, 5900), range(256, 512), range(1000, 1001), range(77, 77)]
)
@pytest.mark.parametrize(
    ("minimum", "maximum"), [(1, None), (500, None), (990, None), (1, 20), (400, 450), (1000, None)]
)
def test_kept_documents_are_those_of_a_plain_search(cuts, documents, minimum, maximum):
    lengths = lengths_of(6000)
    kept = KeptDocuments(Volumes(*np.split(lengths, cuts)), documents, minimum=minimum, maximum=maximum)
    expected = listed(lengths, documents, minimum, maximum)
    assert len(kept) == len(expected)
    assert kept.numbers(np.arange(len(kept))).tolist() == expected


def test_a_block_all_of_whose_documents_are_kept_is_counted_in_full():
    """256 does not fit 8 bits."""
    kept = KeptDocuments(MemoryCorpus(np.full(1024, 9)), range(1024), minimum=9, maximum=9)
    assert kept.numbers(np.array([0, 255, 256, 1023])).tolist() == [0, 255, 256, 1023]


# --- drop lists


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Of 1,500 and 3 documents; the first in volumes whose ends fall between bytes."""
    folder = tmp_path_factory.mktemp("corpora")
    lengths = lengths_of(1500) // 50 + 1
    write_corpus(folder / "A", random_documents(lengths, 100), numbered_tokenizer(100), shard_bytes=9000)
    write_corpus(folder / "B", random_documents([3, 4, 5], 100), numbered_tokenizer(100))
    return Corpus(folder / "A"), Corpus(folder / "B")


@pytest.fixture
def drop_list(corpora, tmp_path):
    """The file, and which documents of the first corpus it drops."""
    dropped = np.random.default_rng(0).random(1500) < 0.3
    masks = [(corpora[0], dropped), (corpora[1], np.array([False, True, False]))]
    entries = [(str(corpus.prefix), corpus.manifest, mask, 0) for corpus, mask in masks]
    write_drop_list(tmp_path / "list", entries, {"threshold": 0.8})
    return tmp_path / "list", dropped


def test_first_line_describes_the_list_and_each_corpus_finds_its_own_bits(corpora, drop_list):
    path, dropped = drop_list
    header = json.loads(path.read_bytes().split(b"\n", 1)[0])
    assert header["threshold"] == 0.8
    assert [entry["dropped_documents"] for entry in header["corpora"]] == [dropped.sum(), 1]
    first, second = (DropList(path, corpus.manifest, corpus.prefix) for corpus in corpora)
    assert np.array_equal(first.drops(np.array([0]), 1500)[0], dropped)
    assert np.array_equal(first.drops(np.array([5, 13]), 100), [dropped[5:105], dropped[13:113]])
    assert second.drops(np.array([0]), 3).tolist() == [[False, True, False]]
    assert path.stat().st_size == len(json.dumps(header)) + 1 + 188 + 1, "a bit each"


@pytest.mark.parametrize("documents", [range(1500), range(300, 1400), range(255, 257)])
@pytest.mark.parametrize(("minimum", "maximum"), [(1, None), (5, 15)])
def test_documents_that_are_kept_are_those_of_a_plain_search(corpora, drop_list, documents, minimum, maximum):
    corpus, (path, dropped) = corpora[0], drop_list
    assert len(corpus.volumes) > 2 and any(len(volume.lengths) % 8 for volume in corpus.volumes[:-1])
    kept = KeptDocuments(corpus, documents, minimum=minimum, maximum=maximum, drop=str(path))
    lengths = corpus.lengths[np.arange(1500)]
    chosen = listed(lengths, documents, minimum, maximum)
    assert kept.numbers(np.arange(len(kept))).tolist() == [number for number in chosen if not dropped[number]]
    assert len(pickle.dumps(kept)) < 1000
    again = pickle.loads(pickle.dumps(kept))
    assert again.numbers(np.arange(len(kept))).tolist() == kept.numbers(np.arange(len(kept))).tolist()


def test_list_of_another_corpus_or_of_one_written_anew_is_refused(corpora, drop_list, tmp_path):
    other = write_corpus(tmp_path / "A", random_documents([3, 4, 6], 100), numbered_tokenizer(100))
    with pytest.raises(DataError) as caught:
        DropList(drop_list[0], other, tmp_path / "A")
    message = str(caught.value)
    assert f"B ({corpora[1].manifest.documents_sha256[:12]})" in message
    assert f"but {tmp_path / 'A'} is {other.documents_sha256[:12]}: another corpus, or written anew since" in message


def test_same_tokens_cut_into_other_documents_are_another_corpus(tmp_path):
    one = write_corpus(tmp_path / "A", [[5, 6, 7], [8, 9]], numbered_tokenizer(100))
    other = write_corpus(tmp_path / "B", [[5, 6], [7, 8, 9]], numbered_tokenizer(100))
    copy = write_corpus(tmp_path / "C", [[5, 6, 7], [8, 9]], numbered_tokenizer(100))
    assert one.sha256 == other.sha256 and one.documents_sha256 != other.documents_sha256
    assert one.documents_sha256 == copy.documents_sha256


def flip_last(content):
    content[-5] ^= 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut(0), "is not a drop list that begins with a line of JSON"),
        (cut(100), "is not a drop list"),
        (replaced(b"drop list 1", b"drop list 9"), "is not a drop list .*'megatron_neobert drop list 9'"),
        (replaced(b'"documents": 1500', b'"documents": "aa"'), "is not a drop list"),
        (replaced(b'"documents": 1500', b'"documents": 9999'), "expected 1,[0-9,]+ bytes for 2 corpora, found"),
        (replaced(b'"prefix"', b'"perfix"'), "is not a drop list"),
        (cut(-1), "expected [0-9,]+ bytes for 2 corpora, found [0-9,]+; it is damaged"),
        (flip_last, "expected sha256 [0-9a-f]{64} of its bits; it is damaged"),
    ],
)
def test_what_is_no_whole_drop_list_is_refused_in_a_sentence(corpora, drop_list, damage, message):
    content = bytearray(drop_list[0].read_bytes())
    content = damage(content) or content
    drop_list[0].write_bytes(content)
    with pytest.raises(DataError, match=message):
        DropList(drop_list[0], corpora[0].manifest, corpora[0].prefix)
    with pytest.raises(MissingInputError, match=r"drop list nowhere: no such file; neobert find-duplicates writes"):
        DropList(drop_list[0].with_name("x").relative_to(drop_list[0].parent).with_name("nowhere"), None, None)
