"""What Megatron-LM has written becomes a corpus where it lies: its documents without separators, and no copy."""

import os
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run_forked
from unit.data.small_corpus import numbered_tokenizer, random_documents

from megatron_neobert.data.corpus import adoption
from megatron_neobert.data.corpus.adoption import adopt
from megatron_neobert.data.corpus.reader import Corpus, check_content
from megatron_neobert.errors import DataError, OutputError
from megatron_neobert.runtime.atomic_files import sha256_of

indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")

VOCAB_SIZE, SEP = 100, 3
LENGTHS = [3, 70, 1, 12, 5]
TOKENIZER = numbered_tokenizer(VOCAB_SIZE)
DOCUMENTS = [document.tolist() for document in random_documents(LENGTHS, VOCAB_SIZE)]


def write_as_megatron(prefix, documents, *, sentence_tokens=None, eod_id=None, dtype=np.uint16):
    """By megatron-core's builder, in the calls of Megatron-LM's tools/preprocess_data.py; [] is an empty document."""
    builder = indexed_dataset.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        ids = document + ([eod_id] if document and eod_id is not None else [])
        step = sentence_tokens or max(1, len(ids))
        lengths = [len(document[at : at + step]) for at in range(0, len(document), step)]
        if lengths:
            lengths[-1] = len(ids) - sum(lengths[:-1])
        builder.add_document(torch.tensor(ids, dtype=torch.int64), lengths)
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32], ids=["uint16", "int32"])
@pytest.mark.parametrize("eod_id", [None, SEP, VOCAB_SIZE + 7], ids=["no eod", "sep", "outside the vocabulary"])
@pytest.mark.parametrize("sentence_tokens", [None, 4], ids=["whole", "sentences"])
@pytest.mark.parametrize("empty", [0, 2])
def test_documents_are_those_that_megatron_was_given(tmp_path, dtype, eod_id, sentence_tokens, empty):
    given = [*DOCUMENTS[:2], *[[]] * empty, *DOCUMENTS[2:]]
    prefix = write_as_megatron(tmp_path / "M", given, sentence_tokens=sentence_tokens, eod_id=eod_id, dtype=dtype)
    before = {end: sha256_of(tmp_path / f"M.{end}") for end in ("bin", "idx")}
    adopted = adopt(prefix, TOKENIZER)
    in_place = eod_id is None and sentence_tokens is None and not empty
    assert adopted.prefix == (prefix if in_place else f"{prefix}_documents")

    corpus = Corpus(adopted.prefix)
    check_content(corpus)
    assert [corpus.document(number).tolist() for number in range(len(corpus))] == DOCUMENTS
    everything = np.arange(len(DOCUMENTS))
    gathered = corpus.gather(everything, 0 * everything, np.array(LENGTHS))
    assert gathered.tolist() == [id_ for document in DOCUMENTS for id_ in document]
    manifest = corpus.manifest
    assert (manifest.documents, manifest.tokens, manifest.records) == (5, sum(LENGTHS), 5 + empty)
    assert manifest.dropped == ({"no tokens": 2} if empty else {})

    assert {end: sha256_of(tmp_path / f"M.{end}") for end in ("bin", "idx")} == before
    assert (tmp_path / "M.bin").samefile(f"{adopted.prefix}.bin"), "it is no copy"
    again = indexed_dataset.IndexedDataset(adopted.prefix)
    assert [again[number].tolist() for number in range(len(again))] == DOCUMENTS
    assert not adopted.already and adopt(prefix, TOKENIZER) == adopted._replace(already=True)


@pytest.mark.parametrize("chunk", [4, 6, 8, 1 << 20])
def test_a_wrong_id_is_found_among_the_separators_in_chunks_of_any_size(tmp_path, monkeypatch, chunk):
    prefix = write_as_megatron(tmp_path / "M", DOCUMENTS, eod_id=SEP)
    monkeypatch.setattr("megatron_neobert.data.corpus.volumes._SCANNED_BYTES", chunk)
    adopt(prefix, TOKENIZER)
    Corpus(f"{prefix}_documents")
    ends = [2 * (end + number) for number, end in enumerate(accumulate(LENGTHS))]  # bytes
    for offset, wrong, what in (
        (ends[1], 9, f"byte {ends[1]}: expected 3, the end of a document, found 9 .token 70 of document 1."),
        (ends[1] - 2, SEP, f"byte {ends[1] - 2}: expected no special token, found 3 .token 69 of document 1."),
    ):
        with Path(f"{prefix}.bin").open("r+b") as stream:
            stream.seek(offset)
            kept = stream.read(2)
            stream.seek(offset)
            stream.write(bytes([wrong, 0]))
        with pytest.raises(DataError, match=what):
            check_content(Corpus(f"{prefix}_documents"))
        with Path(f"{prefix}.bin").open("r+b") as stream:
            stream.seek(offset)
            stream.write(kept)
    check_content(Corpus(f"{prefix}_documents"))


def only_some_end(prefix):
    write_as_megatron(prefix, [[*DOCUMENTS[0], SEP], DOCUMENTS[1]])


def one_of_a_single_token(prefix):
    write_as_megatron(prefix, [[*DOCUMENTS[0], SEP], [7]])


def boundaries_fall(prefix):
    write_as_megatron(prefix, DOCUMENTS)
    content = np.fromfile(f"{prefix}.idx", np.uint8)
    content[-32:].view("<i8")[:] = [3, 2, 4, 5]
    content.tofile(f"{prefix}.idx")


def bin_is_short(prefix):
    write_as_megatron(prefix, DOCUMENTS)
    os.truncate(f"{prefix}.bin", 100)


@pytest.mark.parametrize(
    ("make", "vocab_size", "message"),
    [
        (only_some_end, VOCAB_SIZE, "expected 3, the end of a document, found "),
        (one_of_a_single_token, VOCAB_SIZE, "but another has one token alone"),
        (boundaries_fall, VOCAB_SIZE, "expected document boundaries that never fall"),
        (bin_is_short, VOCAB_SIZE, "expected 182 bytes, as in M.idx, found 100"),
        (lambda prefix: write_as_megatron(prefix, DOCUMENTS), 30, "--tokenizer-model is not the one"),
    ],
    ids=["eod of some", "single token", "boundaries", "bin", "tokenizer"],
)
def test_what_cannot_be_a_corpus_is_refused_and_leaves_nothing(tmp_path, make, vocab_size, message):
    make(tmp_path / "M")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=message):
        adopt(str(tmp_path / "M"), numbered_tokenizer(vocab_size))
    assert sorted(tmp_path.iterdir()) == before


def test_what_a_killed_call_has_left_is_replaced_and_files_of_others_are_not(tmp_path, monkeypatch):
    prefix = write_as_megatron(tmp_path / "M", DOCUMENTS, eod_id=SEP)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(adoption, "write_manifest", raise_interrupt)
        adopt(prefix, TOKENIZER)
    assert (tmp_path / "M_documents.idx").exists()
    with pytest.raises(DataError, match=r"M_documents\.json missing"):
        Corpus(f"{prefix}_documents")
    adopt(prefix, TOKENIZER)
    check_content(Corpus(f"{prefix}_documents"))

    other = write_as_megatron(tmp_path / "N", DOCUMENTS, eod_id=SEP)
    for end in ("bin", "idx"):
        theirs = tmp_path / f"N_documents.{end}"
        theirs.write_text("precious")
        with pytest.raises(OutputError, match=rf"N_documents\.{end} is not of N\.bin; move it away"):
            adopt(other, TOKENIZER)
        assert theirs.read_text() == "precious"
        theirs.unlink()


def raise_interrupt(*arguments):
    raise KeyboardInterrupt


def test_every_reader_names_the_command_that_makes_a_corpus_of_such_files(tmp_path, tiny_corpus):
    documents = [document.tolist() for document in map(Corpus(tiny_corpus.prefix).document, range(3))]
    prefix = write_as_megatron(tmp_path / "M", documents)
    refused = run_forked("inspect data", prefix)
    command = f"neobert adopt {prefix} --tokenizer-model TOKENIZER"
    assert refused.refused(65) and command in refused.output
    code, output = run_forked("adopt", prefix, "--tokenizer-model", tiny_corpus.tokenizer)
    assert code == 0, output
    assert "M is a corpus: 3 documents, one sequence each, nothing at their end, 0 empty ones besides" in output
    assert run_forked("validate", prefix, "--full").code == 0
    assert run_forked("adopt", tmp_path / "none", "--tokenizer-model", tiny_corpus.tokenizer).refused(66)
