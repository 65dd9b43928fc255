"""Records between separators, in one piece or cut into parts at any byte, and plain text files."""

import gzip
import itertools
import random
import tracemalloc

import pytest
from unit.data.shards.reading import Drip, read, texts_of

from megatron_neobert.data.shards.parts import read_part, split_into_parts
from megatron_neobert.data.shards.records import BATCH_BYTES, EMPTY_TEXT, RAW_BYTES, TOO_LONG, ReadSettings, ShardPart
from megatron_neobert.data.shards.text_files import TooLong, read_records


@pytest.mark.parametrize("separator", ["\n", "\n\n", "aa", "aba", "<|end|>"])
def test_parts_of_any_size_give_the_records_of_the_whole(tmp_path, separator):
    rng = random.Random(separator)
    path = tmp_path / "shard"
    more_than_one = 0
    for _ in range(300):
        content = "".join(rng.choices(["a", "b", "\n", "x y", separator], k=rng.randint(1, 40)))
        path.write_text(content, newline="")
        settings = {"input_format": "text", "text_separator": separator}
        whole = read(path, **settings)
        assert len(whole.parts) == 1
        assert whole.texts == [text for text in content.split(separator) if text.strip()]
        for part_bytes in (1, 2, 5, 17):
            split = read(path, part_bytes=part_bytes, **settings)
            assert split.texts == whole.texts
            assert split.numbers == whole.numbers
            edges = [(part.start, part.end) for part in split.parts]
            assert [end for _, end in edges[:-1]] == [start for start, _ in edges[1:]]
            more_than_one += len(edges) > 1
    assert more_than_one > 600  # or the test would have shown nothing


@pytest.mark.parametrize("separator", [b"\n", b"\n\n", b"aba"])
def test_records_are_the_same_wherever_the_blocks_end(separator):
    rng = random.Random(0)
    for _ in range(300):
        content = b"".join(rng.choices([b"a", b"b", b"\n", b"0123456789", separator], k=rng.randint(0, 30)))
        limit = rng.choice([1, 4, 15, 1000])
        expected = content.split(separator)
        if not expected[-1]:
            expected.pop()  # nothing follows the last separator
        for width in (1, 2, 3, 11, 1000):
            found = []
            for records in read_records(Drip(content, width), separator=separator, limit=limit):
                found += [(each.head, True) if isinstance(each, TooLong) else (each, False) for each in records]
            assert len(found) == len(expected)
            for (record, too_long), whole in zip(found, expected, strict=True):
                assert too_long == (len(whole) > limit)
                assert whole.startswith(record) if too_long else whole == record


def test_record_is_rejected_in_a_part_with_its_number_in_the_shard(tmp_path):
    lines = [f'{{"content": "text {number}"}}\n' for number in range(100)]
    lines[60] = "\n"
    lines[77] = "broken\n"
    (tmp_path / "shard").write_text("".join(lines))
    whole, split = read(tmp_path / "shard"), read(tmp_path / "shard", part_bytes=300)
    assert len(split.parts) == 8  # 2,252 bytes; a part ends with the line of its 300th byte
    assert whole.faults == split.faults == [("malformed JSON", 78)]
    assert whole.rejected == split.rejected
    assert whole.texts == split.texts


def test_compressed_shard_is_one_part(tmp_path):
    (tmp_path / "shard").write_bytes(gzip.compress(b'{"content": "text"}\n' * 100))
    assert len(split_into_parts(str(tmp_path / "shard"), ReadSettings(), part_bytes=10)) == 1


def test_too_long_line_is_rejected_with_its_beginning_and_the_others_are_kept(tmp_path):
    long = b'{"content": "' + b"x" * 200_000 + b'"}'
    short = b'{"content": "short"}'
    for place, ending in itertools.product(range(3), (b"\n", b"")):
        lines = [short, short]
        lines.insert(place, long)
        (tmp_path / "shard").write_bytes(b"\n".join(lines) + ending)
        reading = read(tmp_path / "shard", max_document_bytes=len(long) - 1)
        assert reading.texts == ["short", "short"]
        (rejected,) = reading.rejected
        assert (rejected.reason, rejected.number, rejected.raw) == (TOO_LONG, place + 1, long[:RAW_BYTES])
        assert rejected.detail == f"more than {len(long) - 1:,} bytes"
        assert len(read(tmp_path / "shard", max_document_bytes=len(long)).texts) == 3  # control: as long as allowed


def test_too_long_line_is_never_held(tmp_path):
    with (tmp_path / "shard").open("wb") as stream:
        stream.write(b'{"content": "')
        for _ in range(64):
            stream.write(b"x" * (1 << 20))
        stream.write(b'"}\n{"content": "short"}\n')
    part = ShardPart(str(tmp_path / "shard"), "jsonl")
    peaks = []
    for limit in (2 << 20, 100 << 20):
        tracemalloc.start()
        batches = list(read_part(part, ReadSettings(max_document_bytes=limit)))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert batches[-1].texts[-1] == "short"
    assert peaks[0] < 12 << 20 < 64 << 20 < peaks[1]  # control: the same line where it is allowed


def test_batches_have_about_a_mebibyte_and_a_long_document_comes_alone(tmp_path):
    sizes = [1000] * 3000 + [3 * BATCH_BYTES] + [1000] * 3000 + [100, 2 * BATCH_BYTES, 100]
    (tmp_path / "shard").write_text("".join(f'{{"content": "{"x" * size}"}}\n' for size in sizes))
    reading = read(tmp_path / "shard")
    assert [len(text) for text in reading.texts] == sizes
    assert [batch.utf8_bytes for batch in reading.batches if batch.utf8_bytes > BATCH_BYTES] == [sizes[3000], sizes[-2]]
    assert len(reading.batches) <= 12  # of 6 MiB in short documents, which the long ones interrupt


# --- plain text


def test_file_is_one_document_exactly_as_it_is(tmp_path):
    text = "  Title\r\n\r\nÜber 東京 🚀.\n{not json}\n"
    (tmp_path / "shard.txt").write_bytes(text.encode())
    assert texts_of(tmp_path / "shard.txt") == [text]
    (tmp_path / "shard.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert texts_of(tmp_path / "shard.txt") == [text]
    (tmp_path / "shard.txt").write_bytes(gzip.compress(text.encode()))
    assert texts_of(tmp_path / "shard.txt") == [text]


def test_file_that_is_asked_to_be_text_and_is_blank_is_dropped(tmp_path):
    for content in (b"", b" \n\n"):
        (tmp_path / "shard").write_bytes(content)
        assert read(tmp_path / "shard", input_format="text").dropped == {EMPTY_TEXT: 1}


def test_file_above_the_limit_is_rejected(tmp_path):
    content = b"word " * 100_000
    (tmp_path / "shard").write_bytes(content)
    assert len(texts_of(tmp_path / "shard", max_document_bytes=500_000)) == 1
    (rejected,) = read(tmp_path / "shard", max_document_bytes=499_999).rejected
    assert (rejected.reason, rejected.number, rejected.raw) == (TOO_LONG, 1, content[:RAW_BYTES])
    assert rejected.detail == "more than 499,999 bytes"


@pytest.mark.parametrize("separator", ["\n", "\n\n", "<|endoftext|>", "—"])
def test_separator_cuts_a_file_into_documents(tmp_path, separator):
    documents = ["First.", " second one ", "\u3000", "", "Third 東京"]
    for end in ("", separator, separator + "\n"):
        (tmp_path / "shard").write_bytes(b"\xef\xbb\xbf" + (separator.join(documents) + end).encode())
        assert texts_of(tmp_path / "shard", text_separator=separator) == ["First.", " second one ", "Third 東京"]


def test_documents_are_numbered_as_they_stand_in_the_file(tmp_path):
    (tmp_path / "shard").write_bytes(b"a\n\n" + b"x" * 100 + b"\nb\xff\n")
    reading = read(tmp_path / "shard", text_separator="\n", max_document_bytes=50)
    assert (reading.texts, reading.repaired, reading.numbers) == (["a", "b\ufffd"], 1, 4)
    assert reading.faults == [(TOO_LONG, 3)]
