"""Records between separators (line ends, or what the user says): reading them, and cutting a file between them."""

from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from megatron_neobert.data.shards.records import BATCH_BYTES, RAW_BYTES
from megatron_neobert.data.shards.streams import PartStream, file_size, named_errors, open_shard

_READ_BYTES = 64 << 10


class Records(NamedTuple):
    """Some consecutive records of a stream, then perhaps one that is too long."""

    whole: list[bytes]
    too_long: bytes | None = None  # its first RAW_BYTES


def read_records(stream: PartStream, *, separator: bytes, limit: int) -> Iterator[Records]:
    """What lies between the separators, in groups of about BATCH_BYTES; a long record comes alone.

    No record of more than `limit` bytes is held, and the rest after the last separator is a record unless empty.
    """
    rest = b""
    begun = len(separator) - 1  # bytes at the end of `rest` that may belong to a separator
    while block := stream.read(max(BATCH_BYTES, len(rest))):  # growing, or a long record would be copied too often
        *whole, rest = (rest + block).split(separator)
        if whole:
            yield from _group(whole, limit)
        while len(rest) - begun > limit:
            head = rest[: len(rest) - begun][:RAW_BYTES]
            *whole, rest = _skip_record(stream, rest, separator).split(separator)
            yield Records([], head)
            if whole:
                yield from _group(whole, limit)
    if rest:
        yield from _group([rest], limit)


def _skip_record(stream: PartStream, rest: bytes, separator: bytes) -> bytes:
    """Reads on to the next separator; what has been read after it."""
    while block := stream.read():
        rest = rest[max(0, len(rest) - len(separator) + 1) :] + block
        _, found, after = rest.partition(separator)
        if found:
            return after
    return b""


def _group(records: list[bytes], limit: int) -> Iterator[Records]:
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
