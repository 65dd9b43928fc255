"""Texts out of plain UTF-8 files: a file is one document, or many with a separator between them.

A text stays as it is, white space at its ends included.
"""

from collections.abc import Iterator

from megatron_neobert.data.shards.records import TOO_LONG, ReadSettings, RecordBatch, ShardPart
from megatron_neobert.data.shards.separated import read_records
from megatron_neobert.data.shards.streams import PartStream
from megatron_neobert.data.shards.texts import BYTE_ORDER_MARK, add_text, decode, reject


def read_text(part: ShardPart, settings: ReadSettings) -> Iterator[RecordBatch]:
    with PartStream(part) as stream:
        if settings.text_separator is None:
            yield _read_document(stream, settings.max_document_bytes)
        else:
            yield from _read_documents(stream, part, settings.text_separator.encode(), settings.max_document_bytes)


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


def _read_documents(stream: PartStream, part: ShardPart, separator: bytes, limit: int) -> Iterator[RecordBatch]:
    """What is blank between two separators is no record, just as a blank line among JSON lines is none."""
    first = part.start == 0
    number = 1
    for documents in read_records(stream, separator=separator, limit=limit):
        batch = RecordBatch(numbers=len(documents.whole), progress=stream.progress)
        for document in documents.whole:
            document = document.removeprefix(BYTE_ORDER_MARK) if first else document
            first = False
            text, repaired = decode(document)
            if text and not text.isspace():
                add_text(batch, text, repaired=repaired)
        if documents.too_long is not None:
            batch.numbers += 1
            detail = f"more than {limit:,} bytes"
            reject(batch, TOO_LONG, number + batch.numbers - 1, detail, documents.too_long)
        number += batch.numbers
        yield batch
