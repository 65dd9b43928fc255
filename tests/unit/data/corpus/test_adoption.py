"""What Megatron-LM has written becomes a corpus where it lies: its documents without separators, and no copy."""

import os

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
def test_documents_are_those_that_megatron_was_given(tmp_path, monkeypatch, dtype, eod_id, sentence_tokens, empty):
    monkeypatch.setattr(adoption, "_CHUNK", 2 if empty else 1 << 14)
    given = [*DOCUMENTS[:2], *[[]] * empty, *DOCUMENTS[2:]]
    prefix = write_as_megatron(tmp_path / "M", given, sentence_tokens=sentence_tokens, eod_id=eod_id, dtype=dtype)
    before = {end: sha256_of(tmp_path / f"M.{end}") for end in ("bin", "idx")}
    corpus, _ = adopt(prefix, TOKENIZER)
    check_content(corpus)
    assert [corpus.document(number).tolist() for number in range(len(corpus))] == DOCUMENTS
    manifest = corpus.manifest
    assert (manifest.documents, manifest.tokens, manifest.records) == (5, sum(LENGTHS), 5 + empty)
    assert manifest.dropped == ({"no tokens": 2} if empty else {})
    assert manifest.inputs["M.bin"].sha256 == before["bin"]

    assert {end: sha256_of(tmp_path / f"M.{end}") for end in ("bin", "idx")} == before
    assert (tmp_path / "M.bin").samefile(f"{prefix}_documents.bin") == (eod_id is None), "it is no copy"
    again = indexed_dataset.IndexedDataset(f"{prefix}_documents")
    assert [again[number].tolist() for number in range(len(again))] == DOCUMENTS
    assert adopt(prefix, TOKENIZER)[0].manifest == manifest, "it is there already"


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
        (only_some_end, VOCAB_SIZE, "ends with the special token 3, but document 1 does not"),
        (one_of_a_single_token, VOCAB_SIZE, "but document 1 does not, or has no other token"),
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


def test_files_of_others_are_not_replaced(tmp_path):
    prefix = write_as_megatron(tmp_path / "N", DOCUMENTS, eod_id=SEP)
    theirs = tmp_path / "N_documents.idx"
    theirs.write_text("precious")
    with pytest.raises(OutputError, match=r"N_documents\.idx has no manifest beside it; move it away"):
        adopt(prefix, TOKENIZER)
    assert theirs.read_text() == "precious"


def test_every_reader_names_the_command_that_makes_a_corpus_of_such_files(tmp_path, tiny_corpus):
    documents = [document.tolist() for document in map(Corpus(tiny_corpus.prefix).document, range(3))]
    prefix = write_as_megatron(tmp_path / "M", documents)
    refused = run_forked("inspect data", prefix)
    command = f"neobert adopt {prefix} --tokenizer-model TOKENIZER"
    assert refused.refused(65) and command in refused.output
    code, output = run_forked("adopt", prefix, "--tokenizer-model", tiny_corpus.tokenizer)
    assert code == 0, output
    assert "M_documents is a corpus: 3 documents\n" in output
    assert run_forked("validate", f"{prefix}_documents", "--full").code == 0
    assert run_forked("adopt", tmp_path / "none", "--tokenizer-model", tiny_corpus.tokenizer).refused(66)
