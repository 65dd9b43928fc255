"""Parts of evaluation texts planted in documents are found, and nothing else."""

import numpy as np
import pytest
from commands import run_forked
from unit.data.small_corpus import documents_in, numbered_tokenizer, random_documents, write_corpus

from megatron_neobert.commands.find_overlaps import Overlaps, OverlapSettings, list_overlaps
from megatron_neobert.data.corpus.drop_list import read_drop_list
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.deduplication import search

VOCABULARY, NGRAM = 1000, 13


@pytest.fixture
def planted(tmp_path):
    """Write 500 documents and 60 evaluation texts, 10 of which are short.

    Fifty documents have 13 tokens of a text, fifty others have 12 of a text.
    """
    generator = np.random.default_rng(0)
    texts = random_documents([*generator.integers(13, 100, 50).tolist(), *range(3, 13)], VOCABULARY)
    documents = random_documents(generator.integers(30, 200, 500).tolist(), VOCABULARY, seed=1)
    sources = generator.integers(0, 30, 100).tolist()  # texts 30 to 49 occur nowhere
    for number, source in enumerate(sources):
        size = NGRAM if number < 50 else NGRAM - 1
        start = generator.integers(0, len(texts[source]) - size + 1)
        at = generator.integers(0, len(documents[number]) - size + 1)
        documents[number][at : at + size] = texts[source][start : start + size]
    tokenizer = numbered_tokenizer(VOCABULARY)
    write_corpus(tmp_path / "C", documents, tokenizer)
    write_corpus(tmp_path / "E", texts, tokenizer)
    return tmp_path, documents, texts


def ngrams(tokens):
    return {tuple(tokens[at : at + NGRAM].tolist()) for at in range(len(tokens) - NGRAM + 1)}


@pytest.mark.parametrize(("workers", "range_documents"), [(1, 1000), (2, 37)])
def test_exactly_the_documents_with_thirteen_tokens_of_a_text_are_listed(
    planted, monkeypatch, workers, range_documents
):
    folder, documents, texts = planted
    monkeypatch.setattr(search, "RANGE_DOCUMENTS", range_documents)
    settings = OverlapSettings(
        prefixes=(str(folder / "C"),), against=(str(folder / "E"),), output=folder / "list", workers=workers
    )
    ((corpus,), (evaluated,)) = list_overlaps(settings)
    all_texts = set().union(*map(ngrams, texts))
    expected = [number for number, document in enumerate(documents) if ngrams(document) & all_texts]
    assert set(range(50)) <= set(expected) and len(expected) < 55, "planted, and few by chance"
    _, bits = read_drop_list(folder / "list", Corpus(folder / "C"))
    assert documents_in(bits, 500) == expected
    all_documents = set().union(*map(ngrams, documents))
    found = sum(bool(ngrams(text) & all_documents) for text in texts)
    assert (corpus.prefix, corpus.documents, corpus.dropped_documents) == (str(folder / "C"), 500, len(expected))
    assert evaluated == Overlaps(str(folder / "E"), 60, found, 10) and 0 < found <= 30
    assert not list(folder.glob("list.partial*"))


def test_summary_names_shares_and_short_texts_and_a_complete_list_is_resumed_and_never_replaced(planted):
    folder, _, texts = planted
    search = ("find-overlaps", folder / "C", "--output", folder / "list", "--resume", "--against")
    write_corpus(folder / "other", texts, numbered_tokenizer(VOCABULARY + 1))
    assert run_forked(*search, folder / "other").refused(65), "texts of another tokenizer"
    code, output = run_forked(*search, folder / "E")
    assert code == 0
    assert f"{folder / 'C'}: 50 of 500 documents share 13 tokens (10.00 %)" in output
    assert "10 are shorter and were not searched for" in output
    assert run_forked(*search, folder / "E") == (0, f"{folder / 'list'} is complete; nothing to do\n")
    assert "list exists already" in run_forked(*search, folder / "E", "--ngram", 12).output
