"""Read JSON lines and plain text.

orjson parses valid JSON. Other lines are parsed again with the standard library, which accepts NaN and numbers of any
size and reports precise errors. `data.text` is the key of this name or, if it does not exist, the key `text` in `data`.

A plain text file is one UTF-8 document, or several with a separator between them. Documents keep their white space.
"""

import io
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import cast

import orjson

from megatron_neobert.data.inputs.input_reader import Chunk, InputReader, file_size, named_errors, open_input
from megatron_neobert.data.inputs.records import RAW_BYTES, Fields, ReadSettings, Reason, RecordBatch
from megatron_neobert.text import parse_json

_LINE_BUFFER_BYTES = 64 << 10  # for finding line ends


def read_lines(chunk: Chunk, settings: ReadSettings) -> Iterator[RecordBatch]:
    """Yield batches of the texts in a chunk of JSON lines. Raise DamagedStream if the file is damaged.

    Malformed records raise no error: they are in the `rejected` of their batch. Blank lines are numbered, but skipped.
    """
    # Not per line: with short lines, this took 30 % of the time.
    text_key, keys, first_number, limit = settings.text_key, settings.record_keys, 1, settings.max_document_bytes
    with InputReader(chunk) as stream:
        for lines in read_records(stream, separator=b"\n", limit=limit):
            batch, last = RecordBatch(numbers=len(lines), progress=stream.progress), dict[str, object]()
            for number, line in enumerate(lines, first_number):
                if len(line) > limit:
                    batch.reject(Reason.TOO_LONG, number, f"more than {limit:,} bytes", line)
                    continue
                record = None
                try:
                    record = _parse_object(line)
                    if record is None:
                        continue
                    text, last = _look_up(record, text_key), record
                except ValueError as error:
                    batch.reject(Reason.MALFORMED_JSON, number, str(error), line)
                    continue
                except KeyError:
                    found = ", ".join(sorted(record or ())[:10]) or "none"
                    detail = f"no key '{text_key}'; keys found: {found}"
                    batch.reject(Reason.MISSING_KEY, number, detail, line)
                    continue
                if isinstance(text, str):
                    fields: Fields = dict.fromkeys(keys) if keys else {}
                    for key in keys:
                        with suppress(KeyError):
                            fields[key] = _look_up(record, key)
                    batch.add_text(text, number, fields)
                elif text is None:
                    batch.reject(Reason.NULL_TEXT, number, "null", line)
                else:
                    batch.reject(Reason.NOT_A_STRING, number, f"found {type(text).__name__}", line)
            batch.field_names = list(last)
            first_number += len(lines)
            yield batch


def _parse_object(line: bytes) -> dict[str, object] | None:
    """Return the object in a JSON line, or None for a blank line. Raise ValueError if the line is not an object."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        if not line or line.isspace():
            return None
        record = parse_json(line.decode(errors="replace"))
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, found {type(record).__name__}")
    return record


def _look_up(record: dict[str, object], key: str) -> object:
    """Return `record[key]` or, if the key `a.b` is missing, `record["a"]["b"]`. Raise KeyError if neither exists."""
    if key in record:
        return record[key]
    first, dot, rest = key.partition(".")
    inner = record[first]
    if not dot or not isinstance(inner, dict):
        raise KeyError(key)
    return _look_up(inner, rest)


def read_text(chunk: Chunk, settings: ReadSettings) -> Iterator[RecordBatch]:
    """Yield the documents of plain text in batches. Without --text-separator, the file is one document.

    A document of more than `max_document_bytes` is in `rejected`. Documents of only white space are numbered, but
    skipped.
    """
    limit, number, separator = settings.max_document_bytes, 0, settings.text_separator
    with InputReader(chunk) as stream:
        groups: Iterable[list[bytes]]
        if separator is None:
            content = b""
            # The read at the end raises DamagedStream if the content is incomplete.
            while len(content) <= limit and (block := stream.read(limit + 1 - len(content))):
                content += block
            groups = [[content]]
        else:
            groups = read_records(stream, separator=separator.encode(), limit=limit)
        for documents in groups:
            batch = RecordBatch(numbers=len(documents), progress=stream.progress)
            for document in documents:
                number += 1
                if len(document) > limit:
                    batch.reject(Reason.TOO_LONG, number, f"more than {limit:,} bytes", document)
                    continue
                text = document.decode(errors="replace")
                if text and not text.isspace():
                    batch.add_text(text, number, dict.fromkeys(settings.record_keys))
            yield batch


def read_records(stream: InputReader, *, separator: bytes, limit: int) -> Iterator[list[bytes]]:
    """Yield the records between the separators in groups. An empty record at the end of the stream is left out.

    A record of more than `limit` bytes is cut while it is read, which bounds the memory. The yielded beginning is
    still longer than `limit`, so callers can reject the record. Raise DamagedStream if the stream is damaged.
    """
    kept_bytes = max(limit + 1, RAW_BYTES)  # of a record that is too long
    rest = b""  # beginning of the next record
    # Beginning of a record that is too long. Meanwhile `rest` has only the bytes that may begin its separator.
    head = b""
    partial_bytes = len(separator) - 1  # longest part of a separator at the end of a block
    while block := stream.read():
        *records, rest = (rest + block).split(separator)
        group = [record[:kept_bytes] for record in records]
        if head and group:
            group[0], head = head, b""
        if not head and len(rest) - partial_bytes > limit:
            head = rest[: len(rest) - partial_bytes][:kept_bytes]
        if head:
            rest = rest[max(0, len(rest) - partial_bytes) :]
        if group:
            yield group
    if head or rest:
        yield [head or rest[:kept_bytes]]


def find_cuts(path: str, *, chunk_bytes: int) -> list[int]:
    """Return byte positions at which to cut an uncompressed file: line starts, about `chunk_bytes` apart."""
    cuts: list[int] = []
    with named_errors(path), open_input(path) as raw:
        size, file = file_size(raw, path), io.BufferedReader(cast(io.RawIOBase, raw), _LINE_BUFFER_BYTES)
        while (target := (cuts[-1] if cuts else 0) + chunk_bytes) < size:
            file.seek(target - 1)
            while (line := file.readline(_LINE_BUFFER_BYTES)) and not line.endswith(b"\n"):
                pass
            if file.tell() >= size:
                break
            cuts.append(file.tell())
    return cuts
