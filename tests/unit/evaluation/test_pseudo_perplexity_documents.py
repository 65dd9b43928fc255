"""Which documents are measured, and which of their positions are masked."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from unit.evaluation.pseudo_perplexity_models import make_texts, write_tokenizer

from megatron_neobert.evaluation.models import load_tokenizer
from megatron_neobert.evaluation.options import PerplexityOptions
from megatron_neobert.evaluation.pseudo_perplexity import draw_positions, select_documents

TEXTS = ["the cat sat", "a mat", "the cat sat on the mat . a cat", "cat"]  # of 3, 2, 9 and 1 tokens
ADDED = 2  # [CLS] and [SEP]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    (folder / "config.json").write_text('{"model_type": "bert"}')
    return load_tokenizer(folder)


@pytest.fixture
def select(tokenizer, tmp_path):
    """Return a function that selects from texts, or from the files of a folder."""

    def run(data, *, max_length=40, **options):
        if isinstance(data, list):
            path = tmp_path / "texts.jsonl"
            path.write_text("".join(json.dumps({"content": text}) + "\n" for text in data))
            data = path
        defaults = {"model": (), "output": "out", "data": (str(data),), "min_length": 1}
        return select_documents(PerplexityOptions(**{**defaults, **options}), tokenizer, max_length)

    return run


def lengths(documents):
    return [len(document.ids_s) for document in documents]


def test_tokens_added_by_the_tokenizer_are_never_masked_and_written_ones_are_plain_text(tokenizer, select):
    [document], _ = select(["cat [SEP] sat"])
    tokens = tokenizer.convert_ids_to_tokens(document.ids_s.tolist())
    assert tokens == ["[CLS]", "cat", "[", "sep", "]", "sat", "[SEP]"]
    assert (document.positions, document.scorable) == ((1, 2, 3, 4, 5), 5)


def test_documents_do_not_depend_on_the_format_the_order_and_the_number_of_files(select, tmp_path):
    def describe(data):
        documents, _ = select(data, positions_per_doc=2)
        return {(document.id, tuple(document.ids_s.tolist()), document.positions) for document in documents}

    texts = make_texts(20, longest=12)
    for name in ("table", "texts"):
        (tmp_path / name).mkdir()
    pq.write_table(pa.table({"content": texts[7:]}), tmp_path / "table" / "a.parquet")
    pq.write_table(pa.table({"content": texts[:7]}), tmp_path / "table" / "b.parquet")
    for number, text in enumerate(texts):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    expected = describe(texts)
    assert len(expected) == len(texts)
    assert describe(tmp_path / "table") == describe(tmp_path / "texts") == expected


def test_truncated_document_has_the_truncated_length(select):
    cut, whole = select(TEXTS[2:], max_length=6)[0]
    assert (len(cut.ids_s), cut.scorable, cut.positions, cut.truncated) == (6, 4, (1, 2, 3, 4), True)
    assert (len(whole.ids_s), whole.truncated) == (1 + ADDED, False)


@pytest.mark.parametrize(
    ("texts", "options", "tokens", "dropped"),
    [
        ([*TEXTS, TEXTS[0]], {}, [3, 2, 9, 1], {"met before": 1}),
        (TEXTS, {"min_length": 4}, [3, 2, 9], {"shorter than --min-length": 1}),
        (TEXTS, {"limit": 2}, [3, 2], {}),
    ],
)
def test_duplicates_and_short_documents_are_dropped_and_counted_up_to_the_limit(
    select, texts, options, tokens, dropped
):
    documents, counts = select(texts, **options)
    assert (lengths(documents), counts) == ([count + ADDED for count in tokens], dropped)


def test_drawn_positions_depend_on_document_and_seed_only():
    drawn = draw_positions("a document", range(1, 101), 10, seed=0)
    assert draw_positions("a document", range(1, 101), 10, seed=0) == drawn
    assert draw_positions("another", range(1, 101), 10, seed=0) != drawn
    assert draw_positions("a document", range(1, 101), 10, seed=1) != drawn
    assert list(drawn) == sorted(set(drawn))
    assert set(drawn) <= set(range(1, 101))
