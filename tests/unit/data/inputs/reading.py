"""Read an input file as preprocessing does: split it into chunks and collect the batches of all chunks."""

import bz2
import gzip
import json
import lzma
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from backports import zstd

from megatron_neobert.data.inputs.input_reader import Chunk
from megatron_neobert.data.inputs.recognise import CHUNK_BYTES, read_chunk, split_into_chunks
from megatron_neobert.data.inputs.records import ReadSettings, Rejected

TEXTS = ["first text", "Grüße 東京 🚀", "third\nwith two lines"]
JSON_LINES = "".join(json.dumps({"content": text, "url": "u"}) + "\n" for text in TEXTS).encode()


def compress_zstd(content: bytes) -> bytes:
    """Compress with a checksum, as the command line tool does."""
    return zstd.compress(content, options={zstd.CompressionParameter.checksum_flag: 1})


COMPRESS = {"gzip": gzip.compress, "zstd": compress_zstd, "bzip2": bz2.compress, "xz": lzma.compress}


def write_table(open_writer: Callable[..., Any], target: Any, table: pa.Table, rows: int | None = None) -> None:
    """Write a table with pq.ParquetWriter, pa.ipc.new_stream or pa.ipc.new_file, in groups of `rows` rows."""
    with open_writer(target, table.schema) as writer:
        writer.write_table(table, rows)


@dataclass
class Reading:
    """Sum of all batches of an input file."""

    chunks: list[Chunk]
    texts: list[str] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)  # numbered from the beginning of the file
    dropped: Counter[str] = field(default_factory=Counter)
    numbers: int = 0

    @property
    def rejections(self) -> list[tuple[str, int]]:
        return [(record.reason, record.number) for record in self.rejected]


def read(path: Path | str, *, chunk_bytes: int = CHUNK_BYTES, **settings) -> Reading:
    """Read an input file, and assert the properties of every reader: correct sizes, and a progress that ends at 1."""
    settings = ReadSettings(**settings)
    reading = Reading(split_into_chunks(str(path), settings, chunk_bytes=chunk_bytes))
    for chunk in reading.chunks:
        numbers_before = reading.numbers if chunk.numbers_are_relative else 0
        progress = 0.0
        for batch in read_chunk(chunk, settings):
            reading.texts += batch.texts
            reading.rejected += [record._replace(number=record.number + numbers_before) for record in batch.rejected]
            reading.dropped += batch.dropped
            reading.numbers += batch.numbers
            assert batch.utf8_bytes == sum(len(text.encode()) for text in batch.texts)
            assert batch.numbers >= len(batch.texts) + len(batch.rejected) + batch.dropped.total()
            assert progress <= batch.progress <= 1
            progress = batch.progress
        # 0 is a chunk without records. The end of an Arrow stream is unknown before it is read.
        assert progress in (0, 1) or chunk.format == "arrow"
    return reading


def peak_memory(results: Iterable[Any]) -> tuple[int, list[Any]]:
    """Return the largest size of Python's memory in bytes while `results` is iterated over, and the results."""
    tracemalloc.start()
    results = list(results)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, results


def texts_of(path: Path | str, **settings) -> list[str]:
    """Return the texts of an input file, and assert that no record is rejected or dropped."""
    reading = read(path, **settings)
    assert not reading.rejected, reading.rejected
    assert not reading.dropped
    return reading.texts
