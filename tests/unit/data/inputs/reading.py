"""A shard read as preprocessing reads it: split into parts, and all their batches together."""

import bz2
import gzip
import json
import lzma
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from backports import zstd

from megatron_neobert.data.inputs.recognise import CHUNK_BYTES, read_chunk, split_into_chunks
from megatron_neobert.data.inputs.records import ReadSettings, RecordBatch, Rejected
from megatron_neobert.data.inputs.stream import BATCH_BYTES, Chunk

TEXTS = ["first text", "Grüße 東京 🚀", "third\nwith two lines"]
JSON_LINES = "".join(json.dumps({"content": text, "url": "u"}) + "\n" for text in TEXTS).encode()


def compress_zstd(content: bytes) -> bytes:
    return zstd.compress(content, options={zstd.CompressionParameter.checksum_flag: 1})  # as the command line tool does


COMPRESS = {"gzip": gzip.compress, "zstd": compress_zstd, "bzip2": bz2.compress, "xz": lzma.compress}


class Drip:
    """A stream that gives a few bytes at a time, so that blocks end anywhere."""

    def __init__(self, content: bytes, width: int) -> None:
        self._content, self._width = content, width

    def read(self, size: int = BATCH_BYTES) -> bytes:
        block = self._content[: min(self._width, size)]
        self._content = self._content[len(block) :]
        return block


class Reading(NamedTuple):
    texts: list[str]
    rejected: list[Rejected]  # numbered from the beginning of the shard
    dropped: Counter[str]
    repaired: int
    numbers: int
    batches: list[RecordBatch]
    parts: list[Chunk]

    @property
    def faults(self) -> list[tuple[str, int]]:
        return [(record.reason, record.number) for record in self.rejected]


def read(path: Path | str, *, chunk_bytes: int = CHUNK_BYTES, **settings) -> Reading:
    """Checks on the way what every reader owes: sizes that are right, and progress that ends at 1."""
    settings = ReadSettings(**settings)
    parts = split_into_chunks(str(path), settings, chunk_bytes=chunk_bytes)
    reading = Reading([], [], Counter(), 0, 0, [], parts)
    for part in parts:
        before = reading.numbers if part.numbers_are_relative else 0
        progress = 0.0
        for batch in read_chunk(part, settings):
            reading = reading._replace(
                texts=reading.texts + batch.texts,
                rejected=reading.rejected + [each._replace(number=each.number + before) for each in batch.rejected],
                dropped=reading.dropped + batch.dropped,
                repaired=reading.repaired + batch.repaired,
                numbers=reading.numbers + batch.numbers,
                batches=[*reading.batches, batch],
            )
            assert batch.utf8_bytes == sum(len(text.encode()) for text in batch.texts)
            assert batch.numbers >= len(batch.texts) + len(batch.rejected) + batch.dropped.total()
            assert progress <= batch.progress <= 1
            progress = batch.progress
        # 0: a part without a record. The end of an Arrow stream is not known until it is there.
        assert progress in (0, 1) or part.format == "arrow"
    return reading


def peak_of(results: Iterable[Any]) -> tuple[int, list[Any]]:
    """The most bytes that Python has held meanwhile, and the results."""
    tracemalloc.start()
    found = list(results)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, found


def texts_of(path: Path | str, **settings) -> list[str]:
    """The texts of a shard that has nothing else."""
    reading = read(path, **settings)
    assert not reading.rejected, reading.rejected
    assert not reading.dropped
    return reading.texts
