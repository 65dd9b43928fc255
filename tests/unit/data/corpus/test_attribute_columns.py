"""Attribute columns of chunks, joined: one type per record key, and the rows of the documents in the corpus."""

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_neobert.data.corpus import attribute_columns
from megatron_neobert.data.corpus.attribute_columns import attribute_name, check_record_keys, join_columns, pack_columns


def join(folder, *chunks, is_chosen=None):
    paths = [folder / f"{number}.attributes" for number in range(len(chunks))]
    for path, columns in zip(paths, chunks, strict=True):
        path.write_bytes(pack_columns(columns))
    sizes = [len(next(iter(columns.values()))) for columns in chunks]
    join_columns(folder / "joined.parquet", paths, is_chosen or [np.ones(size, dtype=np.bool_) for size in sizes])
    return pq.read_table(folder / "joined.parquet")


@pytest.mark.parametrize(
    ("first", "second", "arrow_type", "expected"),
    [
        ([1, None], [2], pa.int64(), [1, None, 2]),
        ([1, 2.5], [None], pa.float64(), [1.0, 2.5, None]),
        ([1], [2.5], pa.float64(), [1.0, 2.5]),
        ([2**70], [1], pa.float64(), [2.0**70, 1.0]),
        ([2**60], [0.5], pa.float64(), [2.0**60, 0.5]),
        ([10**400], [1], pa.string(), ["1" + "0" * 400, "1"]),
        ([float("nan"), 1.0], [], pa.float64(), [None, 1.0]),
        ([True, None], [False], pa.bool_(), [True, None, False]),
        (["a", None], ["b"], pa.string(), ["a", None, "b"]),
        ([None], [None], pa.null(), [None, None]),
        ([None], ["x"], pa.string(), [None, "x"]),
        ([1, "a", True, 2.5], [None], pa.string(), ["1", "a", "true", "2.5", None]),
        ([1], ["a"], pa.string(), ["1", "a"]),
        ([1, 2.5], ["a"], pa.string(), ["1", "2.5", "a"]),
        ([1.0, "a"], [1.0, 1e300], pa.string(), ["1", "a", "1", "1e+300"]),
        ([True], [1], pa.string(), ["true", "1"]),
        ([[1], {"a": 1}, 3], [], pa.int64(), [None, None, 3]),
        ([datetime.date(2024, 1, 31), b"a\xff", "\ud800"], [], pa.string(), ["2024-01-31", "a\ufffd", "?"]),
        (["x" * 2000], [], pa.string(), ["x" * 1000]),
    ],
)
def test_record_key_has_one_type_in_all_chunks(tmp_path, first, second, arrow_type, expected):
    column = join(tmp_path, {"a.b-c": first}, {"a.b-c": second})["a_b_c"]
    assert (column.type, column.to_pylist()) == (arrow_type, expected)


def test_rows_are_those_of_the_chosen_documents_in_row_groups_of_one_size(tmp_path, monkeypatch):
    monkeypatch.setattr(attribute_columns, "_ROW_GROUP", 100)
    generator = np.random.default_rng(0)
    sizes = [0, 7, 350, 120, 99]
    is_chosen = [generator.random(size) < 0.7 for size in sizes]
    values = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    table = join(tmp_path, *({"n": value.tolist()} for value in values), is_chosen=is_chosen)
    expected = np.concatenate(values)[np.concatenate(is_chosen)]
    assert table["n"].to_pylist() == expected.tolist()
    metadata = pq.read_metadata(tmp_path / "joined.parquet")
    row_groups = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    assert row_groups == [100] * (len(expected) // 100) + [len(expected) % 100]


@pytest.mark.parametrize("keys", [["2nd"], ["a.b", "a-b"], ["from", "from_"], [""]])
def test_record_keys_without_a_unique_attribute_name_are_refused(keys):
    assert not list(check_record_keys(["score", "data.lang", "WARC-Date", "_x"]))
    assert next(check_record_keys(keys)).startswith(f"--record-key {keys[0]} would be the attribute")


def test_record_keys_that_are_reserved_in_expressions_get_another_name():
    names = [attribute_name(key) for key in ("length", "input", "class", "meta.from", "WARC-Date")]
    assert names == ["length_", "input_", "class_", "meta_from", "WARC_Date"]
