"""Parquet and Arrow tables: every row gives a text or a counted reject, within a bounded memory."""

from contextlib import contextmanager
from functools import partial
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from pyarrow import feather
from unit.data.inputs.reading import TEXTS, read, texts_of, write_table

from megatron_neobert.data.inputs.input_reader import Chunk
from megatron_neobert.data.inputs.recognise import read_chunk, split_into_chunks
from megatron_neobert.data.inputs.records import ReadSettings, Reason
from megatron_neobert.errors import DataError

WRITERS = {"parquet": pq.ParquetWriter, "arrow stream": pa.ipc.new_stream, "arrow file": pa.ipc.new_file}


@pytest.fixture(params=WRITERS)
def write(request):
    return partial(write_table, WRITERS[request.param])


def texts_table(values, arrow_type=None):
    return pa.table({"content": pa.array(values, arrow_type), "n": list(range(len(values)))})


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
def test_every_arrow_type_of_text_is_read(tmp_path, write, arrow_type):
    values = [text.encode() for text in TEXTS] if "binary" in str(arrow_type) else TEXTS
    write(tmp_path / "input", texts_table(values, arrow_type))
    assert texts_of(tmp_path / "input") == TEXTS
    write(tmp_path / "input", texts_table([*values, None], arrow_type))
    reading = read(tmp_path / "input")
    assert (reading.texts, reading.rejections) == (TEXTS, [(Reason.NULL_TEXT, 3)])


def test_bad_row_is_rejected_with_its_row_number_from_zero(tmp_path, write):
    write(tmp_path / "input", texts_table(["a", None, "", " \u00a0", "long" * 5, "b"]), 2)
    reading = read(tmp_path / "input", max_document_bytes=19)
    assert (reading.texts, reading.dropped, reading.numbers) == (["a", "b"], {Reason.EMPTY_TEXT: 2}, 6)
    null, long = reading.rejected
    assert (null.reason, null.number, null.raw) == (Reason.NULL_TEXT, 1, b"")
    assert (long.reason, long.number, long.raw, long.detail) == (Reason.TOO_LONG, 4, b"long" * 5, "20 bytes")


@pytest.mark.parametrize("arrow_type", [pa.string(), pa.binary()], ids=str)
def test_invalid_utf8_is_replaced(tmp_path, write, arrow_type):
    offsets, content = pa.py_buffer(b"\0\0\0\0\3\0\0\0\5\0\0\0"), pa.py_buffer(b"a\xffbok")
    write(tmp_path / "input", pa.table({"content": pa.Array.from_buffers(arrow_type, 2, [None, offsets, content])}))
    reading = read(tmp_path / "input")
    assert reading.texts == ["a\ufffdb", "ok"]


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("text", "has no column 'text'"),
        ("contant", "has no column 'contant'; did you mean 'content'"),
        ("n", ": column 'n' has type int64, not string"),
        ("data", ": column 'data' has type struct<body: string.*>, not string"),
        ("tags", ": column 'tags' has type list<.*string>, not string"),
    ],
)
def test_missing_column_and_wrong_type_are_refused_with_the_names_of_text_columns(tmp_path, write, key, problem):
    data = pa.array([{"body": "x", "deep": {"er": "y"}, "n": 1}])
    write(tmp_path / "input", pa.table({"content": ["x"], "data": data, "n": [1], "tags": [["x"]]}))
    message = rf"{problem}[;?] its text columns: content, data\.body, data\.deep\.er; choose one with --text-key"
    with pytest.raises(DataError, match=message):
        split_into_chunks(str(tmp_path / "input"), ReadSettings(text_key=key))


def test_nested_column_is_read_unless_a_column_has_the_whole_name_and_a_missing_struct_is_a_null(tmp_path, write):
    data = pa.array([{"text": "x", "more": {"text": "deep"}}, None, {"text": None, "more": None}])
    write(tmp_path / "input", pa.table({"id": [1, 2, 3], "data": data}))
    for key, text in (("data.text", "x"), ("data.more.text", "deep")):
        reading = read(tmp_path / "input", text_key=key)
        assert (reading.texts, reading.rejections) == ([text], [(Reason.NULL_TEXT, 1), (Reason.NULL_TEXT, 2)])
    write(tmp_path / "input", pa.table({"data": data, "data.text": ["literal"] * 3}))
    assert texts_of(tmp_path / "input", text_key="data.text") == ["literal"] * 3


@pytest.mark.parametrize(
    ("names", "keys", "problem"),
    [
        (["content", "url", "content"], ("url",), "2 columns 'content'"),
        (["lang", "content", "lang", "lang"], ("lang",), "3 columns 'lang'"),
        (["content", "meta", "meta"], ("meta.lang",), "2 columns 'meta'"),
        (["content", "twice"], ("twice.lang",), "2 columns 'twice.lang'"),
        (["lang", "content", "lang"], ("url",), None),
    ],
    ids=str,
)
def test_a_key_of_several_columns_is_refused_by_name_and_other_repeated_columns_do_not_matter(
    tmp_path, write, names, keys, problem
):
    pair = pa.array([{"lang": "en"}])
    twice = pa.StructArray.from_arrays([pa.array(["en"]), pa.array(["de"])], ["lang", "lang"])
    columns = [{"meta": pair, "twice": twice}.get(name, pa.array([f"{name} of {n}"])) for n, name in enumerate(names)]
    write(tmp_path / "input", pa.Table.from_arrays(columns, names))
    if problem is None:
        assert texts_of(tmp_path / "input", record_keys=keys) == ["content of 1"]
        return
    with pytest.raises(DataError, match=f"input has {problem}, as joins of tables write them; rename or remove"):
        split_into_chunks(str(tmp_path / "input"), ReadSettings(record_keys=keys))


def test_large_row_group_is_streamed(tmp_path):
    values = [f"{number} " + "x" * 10_000 for number in range(4000)]
    path = tmp_path / "input"
    pq.write_table(texts_table(values), path, compression="none", use_dictionary=False)
    size = path.stat().st_size  # 40 MB in one row group
    before = pa.total_allocated_bytes()
    batches = read_chunk(Chunk(str(path), "parquet"), ReadSettings())
    next(batches)
    held = pa.total_allocated_bytes() - before
    batches.close()
    with pq.ParquetFile(path) as file:  # control: pyarrow's defaults load the whole column chunk
        before = pa.total_allocated_bytes()
        next(file.iter_batches(1, columns=["content"]))
        held_by_default = pa.total_allocated_bytes() - before
    assert held < 0.5 * size < 0.9 * size < held_by_default  # measured: 12, 40 and 40 MB; 10 of a group of 313 MB


# --- small files whose values are large when decoded


LONG = 700_000  # bytes of a value that all rows share
SHARED_ROWS = 300


def shared_by_a_dictionary():
    indices = pa.array(np.zeros(SHARED_ROWS, dtype=np.int32))
    return pa.DictionaryArray.from_arrays(indices, pa.array(["x" * LONG]))


def shared_by_views():
    one = pa.array(["x" * LONG], pa.string_view())
    views = pa.py_buffer(one.buffers()[1].to_pybytes()[:16] * SHARED_ROWS)
    return pa.Array.from_buffers(pa.string_view(), SHARED_ROWS, [None, views, one.buffers()[2]])


@contextmanager
def arrow_memory():
    """Yield a memory pool whose `max_memory()` is Arrow's peak memory within the block."""
    pool, before = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        yield pool
    finally:
        pa.set_memory_pool(before)


PREFIXES = {"use_dictionary": False, "column_encoding": {"content": "DELTA_BYTE_ARRAY"}}


@pytest.mark.parametrize(
    ("build_column", "write_file", "options"),
    [
        (shared_by_a_dictionary, pq.write_table, {"store_schema": False}),
        (shared_by_a_dictionary, pq.write_table, {}),
        (lambda: ["x" * LONG] * SHARED_ROWS, pq.write_table, PREFIXES),
        (shared_by_a_dictionary, feather.write_feather, {}),
        (shared_by_views, feather.write_feather, {}),
    ],
    ids=["parquet", "parquet dictionary", "parquet prefixes", "Arrow dictionary", "Arrow views"],
)
def test_long_value_that_all_rows_share_is_decoded_for_few_rows_at_a_time(tmp_path, build_column, write_file, options):
    path = tmp_path / "input"
    write_file(pa.table({"content": build_column()}), path, compression="zstd", **options)
    assert path.stat().st_size < 5000
    (chunk,) = split_into_chunks(str(path), ReadSettings())
    with arrow_memory() as pool:
        texts = [text for batch in islice(read_chunk(chunk, ReadSettings()), 30) for text in batch.texts]
    assert [len(text) for text in texts] == [LONG] * 30
    assert pool.max_memory() < 40 * LONG < 256 * LONG  # measured: 1 to 17; 256 rows at once are 256 and more


def test_truncated_table_is_refused(tmp_path, write):
    write(tmp_path / "input", texts_table(TEXTS * 100), 50)
    content = (tmp_path / "input").read_bytes()
    (tmp_path / "input").write_bytes(content[:-20])
    with pytest.raises(DataError, match=r"damaged (parquet|Arrow) file .*fetch the file again"):
        read(tmp_path / "input")


def test_arrow_stream_cut_between_two_batches_is_refused(tmp_path):
    write_table(pa.ipc.new_stream, tmp_path / "input", texts_table(TEXTS))
    content = (tmp_path / "input").read_bytes()
    (tmp_path / "input").write_bytes(content[:-8])
    with pa.memory_map(str(tmp_path / "input")) as source:  # control: pyarrow reads it as a complete stream
        assert pa.ipc.open_stream(source).read_all().num_rows == 3
    with pytest.raises(DataError, match=r"damaged Arrow file .the end-of-stream mark is missing"):
        read(tmp_path / "input")


@pytest.mark.parametrize("arrow_type", [pa.string(), pa.large_binary(), pa.dictionary(pa.int32(), pa.string())])
def test_arrow_column_that_points_outside_its_buffers_is_refused(tmp_path, arrow_type):
    values = [chr(97 + number) * 1000 for number in range(9)]
    table = texts_table(values, arrow_type)
    write_table(pa.ipc.new_stream, tmp_path / "input", table)
    content = (tmp_path / "input").read_bytes()
    chunk = table["content"].chunk(0)
    numbers = (chunk.indices if pa.types.is_dictionary(arrow_type) else chunk).buffers()[1].to_pybytes()
    assert content.count(numbers) == 1
    (tmp_path / "input").write_bytes(content.replace(numbers, numbers[:-1] + b"\x70"))
    with pytest.raises(DataError, match="damaged Arrow file"):
        read(tmp_path / "input")


@pytest.mark.parametrize("error", [TimeoutError(), RuntimeError("status 503")], ids=repr)
@pytest.mark.parametrize("method", [(MemoryFileSystem, "open"), (MemoryFile, "read")], ids=["open", "read"])
@pytest.mark.parametrize("file_format", ["parquet", "arrow"])
def test_failure_of_the_network_is_not_damage(monkeypatch, file_format, error, method):
    def fail(*args, **kwargs):
        raise error

    MemoryFileSystem().pipe("/network/input", b"PAR1" * 9)
    monkeypatch.setattr(*method, fail, raising=False)
    with pytest.raises(OSError):
        list(read_chunk(Chunk("memory://network/input", file_format), ReadSettings()))
