"""Compressed input files: all output of the compressors is read, and damage is never mistaken for the end."""

import gzip
import json

import pytest
from backports import zstd
from unit.data.inputs.reading import COMPRESS, TEXTS, peak_memory, read, texts_of

from megatron_neobert.data.inputs.input_reader import Chunk
from megatron_neobert.data.inputs.recognise import read_chunk, recognise
from megatron_neobert.data.inputs.records import ReadSettings
from megatron_neobert.errors import DataError

LINES = [json.dumps({"content": text}).encode() + b"\n" for text in TEXTS]
MANY = [json.dumps({"content": f"{number} " * 50}).encode() + b"\n" for number in range(20_000)]
SKIPPABLE_FRAME = b"\x53\x2a\x4d\x18\x04\x00\x00\x00meta"  # zstd's tools write it before and between frames


@pytest.fixture(params=COMPRESS)
def compression(request):
    return request.param


@pytest.mark.parametrize("format", ["jsonl", "text", "warc", None])
def test_error_of_the_disk_names_the_input(format):
    unreadable = "/proc/self/mem"  # reading the first page fails
    with pytest.raises(OSError, match=f"Input/output error: '{unreadable}'") as caught:
        list(read_chunk(Chunk(unreadable, format), ReadSettings())) if format else recognise(unreadable, ReadSettings())
    assert caught.value.filename == unreadable


def test_line_may_span_members_and_zeros_after_gzip_are_padding(tmp_path, compression):
    content = b"".join(LINES)
    members = [COMPRESS[compression](content[start : start + 9]) for start in range(0, len(content), 9)]
    (tmp_path / "input").write_bytes(b"".join(members) + bytes(700_000 if compression == "gzip" else 0))
    assert texts_of(tmp_path / "input") == TEXTS


def test_frames_without_content_are_skipped(tmp_path):
    frames = (SKIPPABLE_FRAME, zstd.compress(LINES[0]), SKIPPABLE_FRAME, zstd.compress(b""), zstd.compress(LINES[1]))
    (tmp_path / "input").write_bytes(b"".join(frames))
    assert texts_of(tmp_path / "input") == TEXTS[:2]


def test_zstd_stream_with_a_window_above_the_default_limit_is_read(tmp_path):
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 28})
    compressed = compressor.compress(b"".join(LINES)) + compressor.flush()
    with pytest.raises(zstd.ZstdError, match="too much memory"):  # control: the default
        zstd.ZstdDecompressor().decompress(compressed)
    (tmp_path / "input").write_bytes(compressed)
    assert texts_of(tmp_path / "input") == TEXTS


def flip_the_middle(compressed):
    middle = len(compressed) // 2
    return compressed[:middle] + bytes([compressed[middle] ^ 0xFF]) + compressed[middle + 1 :]


DAMAGE = {
    "truncated": lambda compressed: compressed[: len(compressed) // 2],
    "last byte missing": lambda compressed: compressed[:-1],
    "flipped": flip_the_middle,
    "other data behind": lambda compressed: compressed + b"other data",
    "second of three members": lambda compressed: compressed + flip_the_middle(compressed) + compressed,
    "header of the second member": lambda compressed: compressed + b"\0" + compressed[1:],
    "head only": lambda compressed: compressed[:8],
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_stream_is_refused_with_the_last_good_line(tmp_path, compression, kind):
    (tmp_path / "input").write_bytes(DAMAGE[kind](COMPRESS[compression](b"".join(MANY))))
    message = " is " if kind == "head only" else r" .* after line \d+ "
    with pytest.raises(DataError, match=rf"input: the {compression} stream{message}.*fetch the file again"):
        read(tmp_path / "input")


def test_memory_does_not_grow_with_the_file(tmp_path):
    content = b"".join(MANY)
    peaks = []
    for repetitions in (1, 6):
        (tmp_path / "input").write_bytes(gzip.compress(content, 1) * repetitions)
        batches = read_chunk(Chunk(str(tmp_path / "input"), "jsonl", "gzip"), ReadSettings())
        peak, read_texts = peak_memory(len(batch.texts) for batch in batches)
        peaks.append(peak)
        assert sum(read_texts) == repetitions * len(MANY)
    assert peaks[1] < 1.2 * peaks[0] < 16 << 20  # of 35 MB
