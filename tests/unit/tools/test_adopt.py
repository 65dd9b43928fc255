"""Corpora made from files that Megatron-LM wrote: the same documents, without separators and without a copy."""

from functools import partial

import numpy as np
import pytest
import torch
from commands import run_forked
from unit.data.child_processes import count_changes
from unit.data.small_corpus import cut, damage, numbered_tokenizer, put, random_documents

from megatron_neobert.commands import adopt
from megatron_neobert.commands.adopt import adopt_corpus
from megatron_neobert.data.corpus.reader import Corpus, check_content
from megatron_neobert.errors import DataError
from megatron_neobert.runtime.atomic_files import sha256_of

indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")

VOCAB_SIZE, SEP = 100, 3
LENGTHS = [3, 70, 1, 12, 5]
TOKENIZER = numbered_tokenizer(VOCAB_SIZE)
DOCUMENTS = [document.tolist() for document in random_documents(LENGTHS, VOCAB_SIZE)]


def write_as_megatron(prefix, documents, *, sentence_tokens=None, eod_id=None, dtype=np.uint16):
    """Write files as Megatron-LM's tools/preprocess_data.py does, with megatron-core's builder."""
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
def test_documents_are_those_that_megatron_wrote(tmp_path, monkeypatch, dtype, eod_id, sentence_tokens, empty):
    monkeypatch.setattr(adopt, "_STEP", 2 if empty else 1 << 14)
    documents = [*DOCUMENTS[:2], *[[]] * empty, *DOCUMENTS[2:]]
    prefix = write_as_megatron(tmp_path / "M", documents, sentence_tokens=sentence_tokens, eod_id=eod_id, dtype=dtype)
    before = {end: sha256_of(tmp_path / f"M.{end}") for end in ("bin", "idx")}
    corpus, _ = adopt_corpus(prefix, TOKENIZER)
    check_content(corpus)
    assert [corpus.document(number).tolist() for number in range(len(corpus))] == DOCUMENTS
    manifest = corpus.manifest
    assert (manifest.documents, manifest.tokens, manifest.records) == (5, sum(LENGTHS), 5 + empty)
    assert manifest.dropped == ({"no tokens": 2} if empty else {})
    assert manifest.inputs["M.bin"].sha256 == before["bin"]

    assert {end: sha256_of(tmp_path / f"M.{end}") for end in ("bin", "idx")} == before
    assert (tmp_path / "M.bin").samefile(f"{prefix}_documents.bin") == (eod_id is None), "a hard link where possible"
    adopted = indexed_dataset.IndexedDataset(f"{prefix}_documents")
    assert [adopted[number].tolist() for number in range(len(adopted))] == DOCUMENTS
    assert adopt_corpus(prefix, TOKENIZER)[0].manifest == manifest, "a second call finds the corpus"


@pytest.mark.parametrize(
    ("documents", "change", "vocab_size", "message"),
    [
        ([[*DOCUMENTS[0], SEP], DOCUMENTS[1]], None, 100, "ends with the special token 3, but document 1 does not"),
        ([[*DOCUMENTS[0], SEP], [7]], None, 100, "but document 1 does not, or has no other token"),
        (DOCUMENTS, ("idx", put("<4q", -32, 3, 2, 4, 5)), 100, "expected ascending document boundaries"),
        (DOCUMENTS, ("bin", cut(100)), 100, "expected 182 bytes for 91 tokens of uint"),
        (DOCUMENTS, None, 30, "or give the --tokenizer-model with which the files were written"),
    ],
    ids=["eod of some", "single token", "boundaries", "bin", "tokenizer"],
)
def test_files_that_cannot_become_a_corpus_are_refused_without_output(tmp_path, documents, change, vocab_size, message):
    prefix = write_as_megatron(tmp_path / "M", documents)
    if change:
        damage(tmp_path / f"M.{change[0]}", change[1])
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=message):
        adopt_corpus(prefix, numbered_tokenizer(vocab_size))
    assert sorted(tmp_path.iterdir()) == before


def test_call_after_a_kill_at_any_point_finishes_the_corpus(tmp_path):
    write_as_megatron(tmp_path / "M", DOCUMENTS, eod_id=SEP)
    for at in range(1, 1 + count_changes(partial(adopt_corpus, str(tmp_path / "M"), TOKENIZER))):
        prefix = write_as_megatron(tmp_path / f"M{at}", DOCUMENTS, eod_id=SEP)
        assert not count_changes(partial(adopt_corpus, prefix, TOKENIZER), killed_at=at)
        check_content(adopt_corpus(prefix, TOKENIZER)[0])
    assert at > 3


def test_reader_of_megatron_files_names_the_command_that_adopts_them(tmp_path, tiny_corpus):
    documents = [document.tolist() for document in map(Corpus(tiny_corpus.prefix).document, range(3))]
    prefix = write_as_megatron(tmp_path / "M", documents)
    refused = run_forked("inspect data", prefix)
    command = f"neobert adopt {prefix} --tokenizer-model TOKENIZER"
    assert refused.refused(65) and command in refused.output
    code, output = run_forked("adopt", prefix, "--tokenizer-model", tiny_corpus.tokenizer)
    assert code == 0, output
    assert "M_documents is a corpus: 3 documents\n" in output
    assert "tokenized by       another program\n" in output
    assert run_forked("validate", f"{prefix}_documents", "--full").code == 0
    assert run_forked("adopt", tmp_path / "none", "--tokenizer-model", tiny_corpus.tokenizer).refused(66)
