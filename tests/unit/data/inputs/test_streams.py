"""Compressed shards: whatever the compressors write is read, and damage is never taken for an end."""

import gzip
import json
from pathlib import Path

import pytest
from backports import zstd
from unit.data.inputs.reading import COMPRESS, TEXTS, peak_of, read, texts_of

from megatron_neobert.data.inputs.recognise import read_chunk, recognise
from megatron_neobert.data.inputs.records import ReadSettings
from megatron_neobert.data.inputs.stream import Chunk
from megatron_neobert.errors import DataError

LINES = [json.dumps({"content": text}).encode() + b"\n" for text in TEXTS]
MANY = [json.dumps({"content": f"{number} " * 50}).encode() + b"\n" for number in range(20_000)]
SKIPPABLE_FRAME = b"\x53\x2a\x4d\x18\x04\x00\x00\x00meta"  # what zstd's tools put in front of or between frames


@pytest.fixture(params=COMPRESS)
def compression(request):
    return request.param


@pytest.mark.parametrize("form", ["jsonl", "text", "warc", None])
def test_error_of_the_disk_names_the_shard(form):
    broken = "/proc/self/mem"  # whose first page cannot be read
    if not Path(broken).exists():
        pytest.skip("there is no file here whose reading fails")
    with pytest.raises(OSError, match=f"Input/output error: '{broken}'") as caught:
        list(read_chunk(Chunk(broken, form), ReadSettings())) if form else recognise(broken, ReadSettings())
    assert caught.value.filename == broken


def test_line_may_go_on_in_the_next_member(tmp_path, compression):
    content = b"".join(LINES)
    pieces = [content[at : at + 9] for at in range(0, len(content), 9)]
    (tmp_path / "shard").write_bytes(b"".join(map(COMPRESS[compression], pieces)))
    assert texts_of(tmp_path / "shard") == TEXTS


def test_zeros_after_the_end_are_no_damage(tmp_path, compression):
    (tmp_path / "shard").write_bytes(COMPRESS[compression](b"".join(LINES)) + bytes(700_000))
    assert texts_of(tmp_path / "shard") == TEXTS


def test_frames_without_content_are_passed_over(tmp_path):
    frames = (SKIPPABLE_FRAME, zstd.compress(LINES[0]), SKIPPABLE_FRAME, zstd.compress(b""), zstd.compress(LINES[1]))
    (tmp_path / "shard").write_bytes(b"".join(frames))
    assert texts_of(tmp_path / "shard") == TEXTS[:2]


def test_zstd_stream_with_a_window_beyond_the_usual_limit_is_read(tmp_path):
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 28})
    packed = compressor.compress(b"".join(LINES)) + compressor.flush()
    with pytest.raises(zstd.ZstdError, match="too much memory"):  # control: what decompressors do by default
        zstd.ZstdDecompressor().decompress(packed)
    (tmp_path / "shard").write_bytes(packed)
    assert texts_of(tmp_path / "shard") == TEXTS


@pytest.mark.parametrize("damage", ["truncated", "flipped", "end cut off"])
def test_damaged_stream_is_refused_with_the_last_good_line(tmp_path, compression, damage):
    packed = bytearray(COMPRESS[compression](b"".join(MANY)))
    if damage == "truncated":
        del packed[len(packed) // 2 :]
    elif damage == "end cut off":
        del packed[-1:]
    else:
        packed[len(packed) // 2] ^= 0xFF
    (tmp_path / "shard").write_bytes(packed)
    with pytest.raises(DataError, match=rf"shard: the {compression} stream .* after line \d+ .*fetch the file again"):
        read(tmp_path / "shard")


def test_something_else_after_the_end_of_the_stream_is_damage(tmp_path, compression):
    (tmp_path / "shard").write_bytes(COMPRESS[compression](b"".join(LINES)) + b"something else")
    with pytest.raises(DataError, match=f"after line 3 .*what follows is not {compression}"):
        read(tmp_path / "shard")


def test_stream_that_is_damaged_from_its_beginning_is_refused(tmp_path, compression):
    packed = bytearray(COMPRESS[compression](b"".join(LINES)))
    (tmp_path / "shard").write_bytes(packed[:8])
    with pytest.raises(DataError, match=f"the {compression} stream (is|breaks off)"):
        read(tmp_path / "shard")


def test_memory_does_not_grow_with_the_shard(tmp_path):
    content = b"".join(MANY)
    peaks = []
    for repetitions in (1, 6):
        (tmp_path / "shard").write_bytes(gzip.compress(content, 1) * repetitions)
        batches = read_chunk(Chunk(str(tmp_path / "shard"), "jsonl", "gzip"), ReadSettings())
        peak, read_texts = peak_of(len(batch.texts) for batch in batches)
        peaks.append(peak)
        assert sum(read_texts) == repetitions * len(MANY)
    assert peaks[1] < 1.2 * peaks[0] < 16 << 20  # of 35 MB
