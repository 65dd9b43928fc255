"""Attribute columns of chunks, joined: one type per record key, and the rows of the documents in the corpus."""

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_neobert.data.corpus.attribute_columns import attribute_name, check_record_keys, join_columns, pack_columns


def join(folder, *chunks):
    paths = [folder / f"{number}.attributes" for number in range(len(chunks))]
    for path, columns in zip(paths, chunks, strict=True):
        path.write_bytes(pack_columns(columns))
    join_columns(folder / "joined.parquet", paths)
    return pq.read_table(folder / "joined.parquet")


@pytest.mark.parametrize(
    ("first", "second", "arrow_type", "expected"),
    [
        ([1, None], [2], pa.int64(), [1, None, 2]),
        ([1, 2.5], [None], pa.float64(), [1.0, 2.5, None]),
        # Integers never change: beyond 64 bits or beside fractions they become texts, beside whole floats they stay.
        ([2**63 + 1025], [1], pa.string(), [str(2**63 + 1025), "1"]),
        ([2**63 - 1, -(2**63)], [1], pa.int64(), [2**63 - 1, -(2**63), 1]),
        ([2**60 + 1, 2.0], [3], pa.int64(), [2**60 + 1, 2, 3]),
        ([2**60 + 1], [2.0, None], pa.int64(), [2**60 + 1, 2, None]),
        ([2.0, None], [-(2**63)], pa.int64(), [2, None, -(2**63)]),
        ([2**60 + 1], [2.5], pa.string(), [str(2**60 + 1), "2.5"]),
        ([2**60 + 1], [1e300], pa.string(), [str(2**60 + 1), "1e+300"]),
        ([2**53, 1], [2.5, float("inf")], pa.float64(), [2.0**53, 1.0, 2.5, float("inf")]),
        ([2**53 + 1, 2.5], [], pa.string(), [str(2**53 + 1), "2.5"]),
        ([np.float32(0.7), np.float16(0.1)], [], pa.float64(), [0.7, 0.1]),
        ([True, None], [np.bool_(False)], pa.bool_(), [True, None, False]),
        ([np.float32(0.5), np.float64(2), np.nan], [np.int64(3)], pa.float64(), [0.5, 2.0, None, 3.0]),
        (["a", None], ["b"], pa.string(), ["a", None, "b"]),
        ([None], [None], pa.null(), [None, None]),
        ([1, "a", True, 2.5], [None], pa.string(), ["1", "a", "true", "2.5", None]),
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


@pytest.mark.parametrize("keys", [["2nd"], ["a.b", "a-b"], ["from", "from_"], [""]])
def test_record_keys_without_a_unique_attribute_name_are_refused(keys):
    names = {"length": "length_", "class": "class_", "meta.from": "meta_from", "WARC-Date": "WARC_Date", "_x": "_x"}
    assert not list(check_record_keys([*names]))
    assert {key: attribute_name(key) for key in names} == names
    assert next(check_record_keys(keys)).startswith(f"--record-key {keys[0]} would be the attribute")
