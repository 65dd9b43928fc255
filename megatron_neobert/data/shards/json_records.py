"""Texts out of JSON objects: JSON lines, and files that are arrays of objects or pretty-printed objects.

orjson reads what is faultless; everything else is read again by the standard library, which tells precisely what is
wrong and forgives more (NaN, numbers of any size). A key `data.text` names the key of that spelling or, where there is
none, `text` within `data`.
"""

import json
from collections.abc import Iterator
from functools import partial
from operator import itemgetter

import orjson

from megatron_neobert.data.shards.json_values import read_values
from megatron_neobert.data.shards.recognise import says_json
from megatron_neobert.data.shards.records import (
    MALFORMED_JSON,
    MISSING_KEY,
    TOO_LONG,
    ReadSettings,
    RecordBatch,
    ShardPart,
)
from megatron_neobert.data.shards.separated import Records, read_records
from megatron_neobert.data.shards.streams import PartStream
from megatron_neobert.data.shards.texts import BYTE_ORDER_MARK, add_value, decode, reject, utf8_size


def read_json_lines(part: ShardPart, settings: ReadSettings) -> Iterator[RecordBatch]:
    number = 1
    is_guess = settings.input_format == "auto" and part.start == 0 and not says_json(part.path)
    with PartStream(part) as stream:
        for lines in read_records(stream, separator=b"\n", limit=settings.max_document_bytes):
            if number == 1 and part.start == 0 and lines.whole:
                lines.whole[0] = lines.whole[0].removeprefix(BYTE_ORDER_MARK)
            batch = read_objects(lines, number, settings)
            batch.progress = stream.progress
            if is_guess and number == 1:
                _add_hint(batch)
            number += batch.numbers
            yield batch


def _add_hint(batch: RecordBatch) -> None:
    """Where the first line of a shard is malformed, JSON lines may have been a wrong guess."""
    if batch.rejected and (first := batch.rejected[0]).number == 1 and first.reason == MALFORMED_JSON:
        batch.rejected[0] = first._replace(detail=f"{first.detail} (if this is plain text: --input-format text)")


def read_json_values(part: ShardPart, settings: ReadSettings) -> Iterator[RecordBatch]:
    """The objects of arrays, or objects of several lines.

    Raises:
        DamagedStream: The file ends within an object or an array.
    """
    number = 1
    with PartStream(part) as stream:
        for values in read_values(stream, limit=settings.max_document_bytes):
            batch = read_objects(values, number, settings)
            batch.progress = stream.progress
            number += batch.numbers
            yield batch


def read_objects(records: Records, first_number: int, settings: ReadSettings) -> RecordBatch:
    """The texts of some JSON objects, given as bytes; blank ones are no records but have numbers."""
    batch = RecordBatch(numbers=len(records.whole))
    key, texts, size = settings.text_key, batch.texts, 0
    take = partial(_look_up, key=key) if "." in key else itemgetter(key)
    for number, line in enumerate(records.whole, first_number):
        try:
            text = take(orjson.loads(line))
        except (orjson.JSONDecodeError, KeyError, TypeError):
            _read_object(batch, line, number, key)
            continue
        if text.__class__ is str and text and not text.isspace():
            texts.append(text)
            size += utf8_size(text)
        else:
            add_value(batch, text, number, raw=line)
    batch.utf8_bytes += size
    if records.too_long is not None:
        number = first_number + batch.numbers
        batch.numbers += 1
        detail = f"more than {settings.max_document_bytes:,} bytes"
        reject(batch, TOO_LONG, number, detail, records.too_long)
    return batch


def _read_object(batch: RecordBatch, line: bytes, number: int, key: str) -> None:
    if not line or line.isspace():
        return None
    decoded, repaired = decode(line)
    try:
        record = json.loads(decoded)
    except json.JSONDecodeError as error:
        return reject(batch, MALFORMED_JSON, number, f"column {error.colno}: {error.msg}", line)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of nested brackets
        return reject(batch, MALFORMED_JSON, number, str(error), line)
    if not isinstance(record, dict):
        return reject(batch, MALFORMED_JSON, number, f"expected an object, found {type(record).__name__}", line)
    try:
        value = _look_up(record, key)
    except KeyError:
        found = ", ".join(sorted(_keys(record))[:10]) or "none"
        return reject(batch, MISSING_KEY, number, f"no key '{key}'; keys found: {found}", line)
    return add_value(batch, value, number, raw=line, repaired=repaired)


def _look_up(record: dict[str, object], key: str) -> object:
    if key in record:
        return record[key]
    first, dot, rest = key.partition(".")
    inner = record[first]
    if not dot or not isinstance(inner, dict):
        raise KeyError(key)
    return _look_up(inner, rest)


def _keys(record: dict[str, object]) -> Iterator[str]:
    """Its keys, and those of the objects within it; of what is deeper, there may be thousands of levels."""
    for key, value in record.items():
        if isinstance(value, dict) and value:
            yield from (f"{key}.{inner}" for inner in value)
        else:
            yield key
