"""Texts of text files: JSON lines and plain text.

orjson reads valid JSON; any other line is read again by the standard library, which reports precisely what is wrong and
accepts more (NaN, numbers of any size). A key `data.text` names the key of that spelling or, if there is none, `text`
within `data`.

A plain text file is one UTF-8 document, or many with a separator between them. A text stays as it is, white space at
its ends included.
"""

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import NamedTuple, cast

import orjson

from megatron_neobert.data.inputs.records import (
    MALFORMED_JSON,
    MISSING_KEY,
    RAW_BYTES,
    TOO_LONG,
    Origin,
    ReadSettings,
    RecordBatch,
    add_text,
    add_value,
    decode,
    reject,
    utf8_size,
)
from megatron_neobert.data.inputs.stream import (
    Chunk,
    ChunkStream,
    InputDigest,
    file_size,
    named_errors,
    open_input,
)
from megatron_neobert.text import parse_json

_READ_BYTES = 64 << 10  # at a time, in search of line ends


class TooLong(NamedTuple):
    """Placeholder for a record above the limit."""

    head: bytes  # its first RAW_BYTES


Records = list[bytes | TooLong]


def read_lines(chunk: Chunk, settings: ReadSettings, digest: InputDigest | None = None) -> Iterator[RecordBatch]:
    """Read the objects of JSON lines."""
    number = 1
    with ChunkStream(chunk, digest) as stream:
        for records in read_records(stream, separator=b"\n", limit=settings.max_document_bytes):
            batch = _read_objects(records, number, settings)
            batch.progress = stream.progress
            number += batch.numbers
            yield batch


def _read_objects(records: Records, first_number: int, settings: ReadSettings) -> RecordBatch:
    """Read the texts of some JSON objects, given as bytes; blank ones are no records but have numbers."""
    batch = RecordBatch(numbers=len(records))
    key, texts, size = settings.text_key, batch.texts, 0
    keys = settings.record_keys
    take = partial(_look_up, key=key) if "." in key else itemgetter(key)
    for number, line in enumerate(records, first_number):
        try:
            record = orjson.loads(line)  # type: ignore[arg-type]  # a TooLong is as malformed as other bytes
            text = take(record)
        except (orjson.JSONDecodeError, KeyError, TypeError):
            _read_object(batch, line, number, settings)
            continue
        if text.__class__ is str and text and not text.isspace():
            texts.append(text)
            size += utf8_size(text)
            if keys is not None:
                batch.origins.append(_origin(record, number, keys))
        else:
            add_value(batch, text, number, raw=line)  # type: ignore[arg-type]  # which is never a text
    batch.utf8_bytes += size
    return batch


def _read_object(batch: RecordBatch, line: bytes | TooLong, number: int, settings: ReadSettings) -> None:
    """Add what the standard library reads, or why it is no text."""
    if isinstance(line, TooLong):
        return reject(batch, TOO_LONG, number, f"more than {settings.max_document_bytes:,} bytes", line.head)
    if not line or line.isspace():
        return None
    decoded, repaired = decode(line)
    try:
        record = parse_json(decoded)
    except json.JSONDecodeError as error:
        return reject(batch, MALFORMED_JSON, number, f"column {error.colno}: {error.msg}", line)
    except ValueError as error:
        return reject(batch, MALFORMED_JSON, number, str(error), line)
    if not isinstance(record, dict):
        return reject(batch, MALFORMED_JSON, number, f"expected an object, found {type(record).__name__}", line)
    try:
        value = _look_up(record, settings.text_key)
    except KeyError:
        # Two levels deep: of what is deeper, there may be thousands.
        inner = {key: value if isinstance(value, dict) else {} for key, value in record.items()}
        found = sorted(f"{key}.{name}" if name else key for key, names in inner.items() for name in names or [""])
        detail = f"no key '{settings.text_key}'; keys found: {', '.join(found[:10]) or 'none'}"
        return reject(batch, MISSING_KEY, number, detail, line)
    origin = None if settings.record_keys is None else _origin(record, number, settings.record_keys)
    return add_value(batch, value, number, raw=line, repaired=repaired, origin=origin)


def _origin(record: dict[str, object], number: int, keys: Sequence[str]) -> Origin:
    fields: dict[str, object] = dict.fromkeys(keys)
    for key in keys:
        with suppress(KeyError):
            fields[key] = _look_up(record, key)
    return Origin(number, fields)


def _look_up(record: dict[str, object], key: str) -> object:
    if key in record:
        return record[key]
    first, dot, rest = key.partition(".")
    inner = record[first]
    if not dot or not isinstance(inner, dict):
        raise KeyError(key)
    return _look_up(inner, rest)


def read_text(chunk: Chunk, settings: ReadSettings, digest: InputDigest | None = None) -> Iterator[RecordBatch]:
    """Read plain text. What is blank between two separators is no record, just as a blank line among JSON lines."""
    limit, number, separator = settings.max_document_bytes, 0, settings.text_separator
    with ChunkStream(chunk, digest) as stream:
        groups: Iterable[Records]
        if separator is None:
            content = stream.read(limit + 1)
            is_whole = len(content) <= limit and not stream.read(1)  # which raises what broke it off
            groups = [[content if is_whole else TooLong(content[:RAW_BYTES])]]
        else:
            groups = read_records(stream, separator=separator.encode(), limit=limit)
        for documents in groups:
            batch = RecordBatch(numbers=len(documents), progress=stream.progress)
            for document in documents:
                number += 1
                if isinstance(document, TooLong):
                    reject(batch, TOO_LONG, number, f"more than {limit:,} bytes", document.head)
                    continue
                text, repaired = decode(document)
                if text and not text.isspace():
                    origin = (
                        None if settings.record_keys is None else Origin(number, dict.fromkeys(settings.record_keys))
                    )
                    add_text(batch, text, repaired=repaired, origin=origin)
            yield batch


def read_records(stream: ChunkStream, *, separator: bytes, limit: int) -> Iterator[Records]:
    """Yield what is between the separators, in groups; the rest after the last separator is a record unless empty.

    No record of more than `limit` bytes is held for longer than a block.
    """
    rest = b""
    head: bytes | None = None  # of a record that is too long; then `rest` is what may be the beginning of its separator
    begun = len(separator) - 1  # bytes at the end of `rest` that may belong to a separator
    while block := stream.read():
        *records, rest = (rest + block).split(separator)
        group: Records = [TooLong(each[:RAW_BYTES]) if len(each) > limit else each for each in records]
        if head is not None and group:
            group[0], head = TooLong(head), None
        if head is None and len(rest) - begun > limit:
            head = rest[: len(rest) - begun][:RAW_BYTES]
        if head is not None:
            rest = rest[max(0, len(rest) - begun) :]
        if group:
            yield group
    if head is not None:
        yield [TooLong(head)]
    elif rest:
        yield [TooLong(rest[:RAW_BYTES]) if len(rest) > limit else rest]


def find_cuts(path: str, *, chunk_bytes: int) -> list[int]:
    """Return the bytes of an uncompressed file at which to cut it: where lines begin, about `chunk_bytes` apart."""
    cuts: list[int] = []
    with named_errors(path), open_input(path) as raw:
        size, file = file_size(raw, path), io.BufferedReader(cast(io.RawIOBase, raw), _READ_BYTES)
        while (target := (cuts[-1] if cuts else 0) + chunk_bytes) < size:
            file.seek(target - 1)
            while (line := file.readline(_READ_BYTES)) and not line.endswith(b"\n"):
                pass
            if file.tell() >= size:
                break
            cuts.append(file.tell())
    return cuts
