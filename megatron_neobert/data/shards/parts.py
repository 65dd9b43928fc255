"""From a shard to its parts, and from a part to its records. A further format is one more reader in the table below."""

from collections.abc import Callable, Iterator
from itertools import pairwise

from megatron_neobert.data.shards.json_objects import read_json
from megatron_neobert.data.shards.recognise import recognise
from megatron_neobert.data.shards.records import PART_BYTES, Format, ReadSettings, RecordBatch, ShardPart
from megatron_neobert.data.shards.separated import find_cuts, read_text
from megatron_neobert.data.shards.streams import DamagedStream
from megatron_neobert.data.shards.tables import RowGroup, read_column, row_groups
from megatron_neobert.data.shards.web_archives import read_archive
from megatron_neobert.errors import DataError

_READERS: dict[Format, Callable[[ShardPart, ReadSettings], Iterator[RecordBatch]]] = {
    "parquet": read_column,
    "arrow": read_column,
    "jsonl": read_json,
    "json": read_json,
    "text": read_text,
    "warc": read_archive,
}


def split_into_parts(path: str, settings: ReadSettings, *, part_bytes: int = PART_BYTES) -> list[ShardPart]:
    """The parts of one shard in order: about `part_bytes` of text each, where the format lets one begin in the middle.

    Raises:
        DataError: The format is none that is read here, the shard is damaged, or its schema has no such text column.
    """
    whole = recognise(path, settings)
    edges = [0, *_cuts(whole, settings, part_bytes), None]
    return [ShardPart(path, whole.format, whole.compression, start or 0, end) for start, end in pairwise(edges)]


def _cuts(whole: ShardPart, settings: ReadSettings, part_bytes: int) -> list[int]:
    """Where to cut a shard: rows of a table, bytes of uncompressed lines or separated texts."""
    if whole.format in ("parquet", "arrow"):
        return row_cuts(row_groups(whole, settings.text_key), part_bytes=part_bytes)
    separator = {"jsonl": "\n", "text": settings.text_separator}.get(whole.format)
    if whole.compression is not None or separator is None:
        return []
    return find_cuts(whole.path, separator.encode(), part_bytes=part_bytes)


def row_cuts(groups: list[RowGroup], *, part_bytes: int) -> list[int]:
    """Rows at which to cut: between row groups, and inside those that are too large themselves."""
    cuts, row, held = [], 0, 0  # held: bytes since the latest cut
    for group in groups:
        if held and held + group.text_bytes > part_bytes:
            cuts.append(row)
            held = 0
        pieces = max(1, min(-(-group.text_bytes // part_bytes), group.rows))
        cuts += [row + group.rows * piece // pieces for piece in range(1, pieces)]
        held = group.text_bytes // pieces + (held if pieces == 1 else 0)
        row += group.rows
    return cuts


def read_part(part: ShardPart, settings: ReadSettings) -> Iterator[RecordBatch]:
    """All records of one part, in order.

    Raises:
        DataError: The shard is damaged, or a parquet or Arrow shard has no text column of that name.
        ConfigError: A package that the address needs is not installed.
        ModuleNotFoundError: One that the format needs is not.
    """
    numbers = 0
    try:
        for batch in _READERS[part.format](part, settings):
            numbers += batch.numbers
            yield batch
    except DamagedStream as damage:
        stream = f"{part.compression} stream" if part.compression else f"{part.format} file"
        position = f"{part.unit} {numbers}" if numbers else "the beginning"
        raise DataError(
            f"{part.path}: the {stream} breaks off or is damaged after {position} ({damage}); "
            "how many documents are lost is unknown: fetch the shard again, or leave it out"
        ) from damage
