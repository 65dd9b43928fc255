"""Records between separators: reading them, cutting a file between them, and plain text made of them.

A plain text file is one UTF-8 document, or many with a separator between them. A text stays as it is, white space at
its ends included.
"""

from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from megatron_neobert.data.shards.records import (
    BATCH_BYTES,
    BYTE_ORDER_MARK,
    RAW_BYTES,
    TOO_LONG,
    ReadSettings,
    RecordBatch,
    ShardPart,
    add_text,
    decode,
    reject,
)
from megatron_neobert.data.shards.streams import PartStream, file_size, named_errors, open_shard

_READ_BYTES = 64 << 10


class Records(NamedTuple):
    """Some consecutive records of a stream, then perhaps one that is too long."""

    whole: list[bytes]
    too_long: bytes | None = None  # its first RAW_BYTES


def read_text(part: ShardPart, settings: ReadSettings) -> Iterator[RecordBatch]:
    """What is blank between two separators is no record, just as a blank line among JSON lines is none."""
    limit, number, first = settings.max_document_bytes, 1, part.start == 0
    with PartStream(part) as stream:
        if settings.text_separator is None:
            yield _read_document(stream, limit)
            return
        for documents in read_records(stream, separator=settings.text_separator.encode(), limit=limit):
            batch = RecordBatch(numbers=len(documents.whole), progress=stream.progress)
            for document in documents.whole:
                text, repaired = decode(document.removeprefix(BYTE_ORDER_MARK) if first else document)
                first = False
                if text and not text.isspace():
                    add_text(batch, text, repaired=repaired)
            if documents.too_long is not None:
                detail = f"more than {limit:,} bytes"
                reject(batch, TOO_LONG, number + batch.numbers, detail, documents.too_long)
                batch.numbers += 1
            number += batch.numbers
            yield batch


def _read_document(stream: PartStream, limit: int) -> RecordBatch:
    batch = RecordBatch(numbers=1, progress=1.0)
    blocks: list[bytes] = []
    held = 0
    while held <= limit and (block := stream.read()):
        blocks.append(block)
        held += len(block)
    if held > limit:
        reject(batch, TOO_LONG, 1, f"more than {limit:,} bytes", blocks[0])
    else:
        text, repaired = decode(b"".join(blocks).removeprefix(BYTE_ORDER_MARK))
        add_text(batch, text, repaired=repaired)
    return batch


def read_records(stream: PartStream, *, separator: bytes, limit: int) -> Iterator[Records]:
    """What lies between the separators, in groups of about BATCH_BYTES; a long record comes alone.

    No record of more than `limit` bytes is held, and the rest after the last separator is a record unless empty.
    """
    rest = b""
    begun = len(separator) - 1  # bytes at the end of `rest` that may belong to a separator
    while block := stream.read(max(BATCH_BYTES, len(rest))):  # growing, or a long record would be copied too often
        *whole, rest = (rest + block).split(separator)
        if whole:
            yield from group_records(whole, limit)
        while len(rest) - begun > limit:
            head = rest[: len(rest) - begun][:RAW_BYTES]
            *whole, rest = _skip_record(stream, rest, separator).split(separator)
            yield Records([], head)
            if whole:
                yield from group_records(whole, limit)
    if rest:
        yield from group_records([rest], limit)


def _skip_record(stream: PartStream, rest: bytes, separator: bytes) -> bytes:
    """Reads on to the next separator; what has been read after it."""
    while block := stream.read():
        rest = rest[max(0, len(rest) - len(separator) + 1) :] + block
        _, found, after = rest.partition(separator)
        if found:
            return after
    return b""


def group_records(records: list[bytes], limit: int) -> Iterator[Records]:
    """The same in groups of about BATCH_BYTES; of those above `limit` bytes, their beginnings."""
    if sum(map(len, records)) <= min(2 * BATCH_BYTES, limit):
        yield Records(records)
        return
    group: list[bytes] = []
    held = 0
    for record in records:
        if group and held + len(record) > BATCH_BYTES:
            yield Records(group)
            group, held = [], 0
        if len(record) > limit:
            yield Records(group, record[:RAW_BYTES])
            group, held = [], 0
        else:
            group.append(record)
            held += len(record)
    if group:
        yield Records(group)


def find_cuts(path: str, separator: bytes, *, part_bytes: int) -> list[int]:
    """Bytes of a file at which records begin, about `part_bytes` apart, so that readers of the pieces agree.

    Separators may overlap (two line ends where there are three): only one that begins within no other is certain to
    be found by a reader that comes from the beginning.
    """
    width = len(separator)
    cuts: list[int] = []
    with open_shard(path) as file, named_errors(path):
        size = file_size(file, path)
        while (target := (cuts[-1] if cuts else 0) + part_bytes) < size:
            start = max(target - 2 * width, 0)
            file.seek(start)
            cut = _first_cut(file, separator, start, target)
            if cut is None or cut >= size:
                break
            cuts.append(cut)
    return cuts


def _first_cut(file: BinaryIO, separator: bytes, start: int, target: int) -> int | None:
    """The first byte from `target` on that follows a separator which overlaps no earlier one."""
    width = len(separator)
    window, latest = b"", -width  # latest: where the separator before began
    while block := file.read(_READ_BYTES):
        window += block
        at = -1
        while (at := window.find(separator, at + 1)) >= 0:
            if start + at >= latest + width and start + at + width >= target:
                return start + at + width
            latest = start + at
        keep = min(len(window), width - 1)
        start += len(window) - keep
        window = window[len(window) - keep :]
    return None
