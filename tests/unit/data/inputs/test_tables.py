"""Rows of parquet and Arrow tables in, texts and accounted rejects out."""

from contextlib import contextmanager
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from unit.data.inputs.reading import TEXTS, read, texts_of

from megatron_neobert.data.inputs.recognise import read_chunk, split_into_chunks
from megatron_neobert.data.inputs.records import EMPTY_TEXT, NULL_TEXT, TOO_LONG, ReadSettings
from megatron_neobert.data.inputs.stream import Chunk
from megatron_neobert.errors import DataError


def write_parquet(path, table, rows=None):
    pq.write_table(table, path, row_group_size=rows)


def write_arrow_stream(path, table, rows=None):
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, rows)


def write_arrow_file(path, table, rows=None):
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, rows)


@pytest.fixture(params=[write_parquet, write_arrow_stream, write_arrow_file], ids=lambda write: write.__name__[6:])
def write(request):
    return request.param


def texts_table(values, arrow_type=None):
    return pa.table({"content": pa.array(values, arrow_type), "n": list(range(len(values)))})


def mixed_table():
    """300 rows, every tenth with something wrong, three row groups' worth."""
    texts = [None if row % 30 == 7 else "" if row % 30 == 17 else f"text {row} " * (row % 13) for row in range(300)]
    return texts_table(texts)


@pytest.mark.parametrize(
    "arrow_type",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.binary_view(),
        pa.dictionary(pa.int32(), pa.string()),
    ],
    ids=str,
)
def test_every_arrow_type_that_holds_text_is_read(tmp_path, write, arrow_type):
    values = [text.encode() for text in TEXTS] if "binary" in str(arrow_type) else TEXTS
    write(tmp_path / "shard", texts_table(values, arrow_type))
    assert texts_of(tmp_path / "shard") == TEXTS
    write(tmp_path / "shard", texts_table([*values, None], arrow_type))
    reading = read(tmp_path / "shard")
    assert (reading.texts, reading.faults) == (TEXTS, [(NULL_TEXT, 3)])


def test_bad_row_is_rejected_with_its_row_counted_from_zero(tmp_path, write):
    write(tmp_path / "shard", texts_table(["a", None, "", " \u00a0", "long" * 5, "b"]), 2)
    reading = read(tmp_path / "shard", max_document_bytes=19)
    assert (reading.texts, reading.dropped, reading.numbers) == (["a", "b"], {EMPTY_TEXT: 2}, 6)
    null, long = reading.rejected
    assert (null.reason, null.number, null.raw) == (NULL_TEXT, 1, b"")
    assert (long.reason, long.number, long.raw, long.detail) == (TOO_LONG, 4, b"long" * 5, "20 bytes")


@pytest.mark.parametrize("arrow_type", [pa.string(), pa.binary()], ids=str)
def test_invalid_utf8_is_replaced(tmp_path, write, arrow_type):
    offsets, content = pa.py_buffer(b"\0\0\0\0\3\0\0\0\5\0\0\0"), pa.py_buffer(b"a\xffbok")
    write(tmp_path / "shard", pa.table({"content": pa.Array.from_buffers(arrow_type, 2, [None, offsets, content])}))
    reading = read(tmp_path / "shard")
    assert (reading.texts, reading.repaired) == (["a\ufffdb", "ok"], 1)


# --- which column


@pytest.mark.parametrize("action", ["plan", "read"])
def test_missing_column_is_refused_with_the_text_columns_there_are(tmp_path, write, action):
    inner = pa.array([{"body": "x", "deep": {"er": "y"}, "n": 1}])
    write(tmp_path / "shard", pa.table({"content": ["x"], "data": inner, "n": [1]}))
    part = split_into_chunks(str(tmp_path / "shard"), ReadSettings())[0]
    settings = ReadSettings(text_key="text")
    with pytest.raises(
        DataError,
        match=r"no column 'text'; its text columns: content, data\.body, data\.deep\.er; choose one with --text-key",
    ):
        split_into_chunks(part.path, settings) if action == "plan" else list(read_chunk(part, settings))


@pytest.mark.parametrize(
    ("key", "arrow_type"), [("n", "int64"), ("data", r"struct<body: string.*>"), ("tags", "list<.*string>")]
)
def test_column_of_something_else_is_refused_with_its_type(tmp_path, write, key, arrow_type):
    table = {"content": ["x"], "n": [1], "data": [{"body": "x"}], "tags": [["x"]]}
    write(tmp_path / "shard", pa.table(table))
    with pytest.raises(
        DataError, match=f"column '{key}' holds {arrow_type}, not strings; its text columns: content, data.body"
    ):
        read(tmp_path / "shard", text_key=key)


def test_nested_column_is_read_and_a_missing_struct_is_a_null(tmp_path, write):
    data = pa.array([{"text": "x", "more": {"text": "deep"}}, None, {"text": None, "more": None}])
    write(tmp_path / "shard", pa.table({"id": [1, 2, 3], "data": data}))
    for key, text in (("data.text", "x"), ("data.more.text", "deep")):
        reading = read(tmp_path / "shard", text_key=key)
        assert (reading.texts, reading.faults) == ([text], [(NULL_TEXT, 1), (NULL_TEXT, 2)])


def test_column_with_a_dot_in_its_name_comes_before_the_nested_one(tmp_path, write):
    literal, nested = pa.array(["literal"]), pa.array([{"text": "nested"}])
    for columns in ({"data.text": literal, "data": nested}, {"data": nested, "data.text": literal}):
        write(tmp_path / "shard", pa.table(columns))
        assert texts_of(tmp_path / "shard", text_key="data.text") == ["literal"]
    write(tmp_path / "shard", pa.table({"data": nested}))
    assert texts_of(tmp_path / "shard", text_key="data.text") == ["nested"]


# --- parts, batches, memory


@pytest.mark.parametrize("rows", [7, 100])
def test_parts_of_a_table_give_the_records_of_the_whole(tmp_path, rows):
    write_parquet(tmp_path / "shard", mixed_table(), rows)
    whole = read(tmp_path / "shard")
    assert len(whole.parts) == 1
    assert [record.number for record in whole.rejected] == list(range(7, 300, 30))
    assert whole.numbers == 300 == len(whole.texts) + len(whole.rejected) + whole.dropped.total()
    for chunk_bytes in (1000, 3000):
        split = read(tmp_path / "shard", chunk_bytes=chunk_bytes)
        assert len(split.parts) > 2
        assert split.texts == whole.texts
        assert split.rejected == whole.rejected  # with the same numbers
        assert split.dropped == whole.dropped


def test_large_row_group_is_streamed_not_loaded(tmp_path):
    values = [f"{number} " + "x" * 10_000 for number in range(4000)]
    path = tmp_path / "shard"
    pq.write_table(texts_table(values), path, compression="none", use_dictionary=False)
    size = path.stat().st_size  # 40 MB in one row group
    before = pa.total_allocated_bytes()
    batches = read_chunk(Chunk(str(path), "parquet"), ReadSettings())
    next(batches)
    held = pa.total_allocated_bytes() - before
    batches.close()
    with pq.ParquetFile(path) as shard:  # control: pyarrow's defaults hold the whole column chunk
        before = pa.total_allocated_bytes()
        next(shard.iter_batches(1, columns=["content"]))
        held_by_default = pa.total_allocated_bytes() - before
    assert held < 0.5 * size < 0.9 * size < held_by_default  # measured: 12, 40 and 40 MB; 10 of a group of 313 MB


# --- shards that are small, and would not be


LONG = 700_000  # bytes of a value that all rows share
SHARED_ROWS = 300


def shared_by_a_dictionary():
    indices = pa.array(np.zeros(SHARED_ROWS, dtype=np.int32))
    return pa.DictionaryArray.from_arrays(indices, pa.array(["x" * LONG]))


def shared_by_views():
    one = pa.array(["x" * LONG], pa.string_view())
    views = pa.py_buffer(one.buffers()[1].to_pybytes()[:16] * SHARED_ROWS)
    return pa.Array.from_buffers(pa.string_view(), SHARED_ROWS, [None, views, one.buffers()[2]])


def write_bomb(path, name):
    compressed = pa.ipc.IpcWriteOptions(compression="zstd")
    if name == "parquet":
        column = pa.table({"content": shared_by_a_dictionary()})
        return pq.write_table(column, path, compression="zstd", store_schema=False)
    if name == "parquet dictionary":
        return pq.write_table(pa.table({"content": shared_by_a_dictionary()}), path, compression="zstd")
    if name == "parquet prefixes":
        column, encoding = pa.table({"content": ["x" * LONG] * SHARED_ROWS}), {"content": "DELTA_BYTE_ARRAY"}
        return pq.write_table(column, path, compression="zstd", use_dictionary=False, column_encoding=encoding)
    column = shared_by_views() if name == "Arrow views" else shared_by_a_dictionary()
    with pa.ipc.new_stream(path, pa.schema({"content": column.type}), options=compressed) as writer:
        return writer.write_batch(pa.record_batch({"content": column}))


@contextmanager
def arrow_memory():
    """Its `max_memory()` is the most that Arrow has held meanwhile."""
    pool, before = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        yield pool
    finally:
        pa.set_memory_pool(before)


@pytest.mark.parametrize(
    "name", ["parquet", "parquet dictionary", "parquet prefixes", "Arrow dictionary", "Arrow views"]
)
def test_long_value_that_all_rows_share_is_decoded_for_few_of_them_at_a_time(tmp_path, name):
    write_bomb(tmp_path / "shard", name)
    assert (tmp_path / "shard").stat().st_size < 5000
    (part,) = split_into_chunks(str(tmp_path / "shard"), ReadSettings())
    with arrow_memory() as pool:
        texts = [text for batch in islice(read_chunk(part, ReadSettings()), 30) for text in batch.texts]
    assert [len(text) for text in texts] == [LONG] * 30
    assert pool.max_memory() < 40 * LONG < 256 * LONG  # measured: 3 to 33; 256 rows at once are 256 and more


# --- damage


def test_truncated_table_is_refused(tmp_path, write):
    write(tmp_path / "shard", texts_table(TEXTS * 100), 50)
    content = (tmp_path / "shard").read_bytes()
    (tmp_path / "shard").write_bytes(content[:-20])
    with pytest.raises(DataError, match=r"damaged (parquet|Arrow) file .*fetch the file again"):
        read(tmp_path / "shard")


def test_arrow_stream_cut_between_two_batches_is_refused(tmp_path):
    write_arrow_stream(tmp_path / "shard", texts_table(TEXTS))
    content = (tmp_path / "shard").read_bytes()
    (tmp_path / "shard").write_bytes(content[:-8])
    with pa.memory_map(str(tmp_path / "shard")) as source:  # control: pyarrow takes this for a whole stream
        assert pa.ipc.open_stream(source).read_all().num_rows == 3
    with pytest.raises(DataError, match=r"damaged Arrow file .the mark of its end is missing"):
        read(tmp_path / "shard")


@pytest.mark.parametrize(
    "arrow_type", [pa.string(), pa.large_binary(), pa.dictionary(pa.int32(), pa.string())], ids=str
)
def test_arrow_column_that_points_outside_of_itself_is_refused(tmp_path, arrow_type):
    """Taken as it is, it would end the process."""
    values = [chr(97 + number) * 1000 for number in range(9)]
    table = texts_table(values, arrow_type)
    write_arrow_stream(tmp_path / "shard", table)
    content = (tmp_path / "shard").read_bytes()
    chunk = table["content"].chunk(0)
    numbers = (chunk.indices if pa.types.is_dictionary(arrow_type) else chunk).buffers()[1].to_pybytes()
    assert content.count(numbers) == 1
    damaged = numbers[:-1] + b"\x70"
    (tmp_path / "shard").write_bytes(content.replace(numbers, damaged))
    with pytest.raises(DataError, match="damaged Arrow file"):
        read(tmp_path / "shard")


def test_parquet_page_with_flipped_bytes_is_refused(tmp_path):
    pq.write_table(texts_table([f"{number} text" for number in range(1000)]), tmp_path / "shard")
    content = bytearray((tmp_path / "shard").read_bytes())
    content[100:200] = bytes(100)
    (tmp_path / "shard").write_bytes(content)
    with pytest.raises(DataError, match="damaged parquet file"):
        read(tmp_path / "shard")
