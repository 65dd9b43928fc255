"""One reader of tables of examples from local files: Parquet, JSON lines, CSV, TSV, CoNLL text and saved data sets.

Nothing that a file names is followed: no other folders, no pipes, no network.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import datasets
import pyarrow
import yaml
from huggingface_hub import DatasetCard
from pyarrow import csv, parquet
from pyarrow import json as arrow_json

from megatron_neobert.errors import DataError, NeoBERTError, short_reason
from megatron_neobert.runtime.atomic_files import read_text
from megatron_neobert.text import parse_json

_CARDS = ("README.md", ".huggingface.yaml")  # whose data_files `datasets` obeys
_TABLES = (".parquet", ".jsonl", ".csv")
_TAGGED = ("", ".txt", ".conll", ".bio", ".iob", ".iob2", ".tsv")
_JSON_BLOCK_BYTES = 64 << 20  # also the longest line
_ROWS_OF_A_HASH = 10_000  # hashed at a time

T = TypeVar("T")


# --- safety


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Read a file or a folder of data in this block.

    Raises:
        DataError: The data cannot be read, or `check_data` refuses the folder.
    """
    try:
        check_data(path)
        yield
    except NeoBERTError:
        raise
    except Exception as error:  # damaged Parquet, Arrow or JSON makes the libraries raise almost anything
        raise DataError(f"{path} cannot be read ({short_reason(error)}); fetch it again.") from error


def check_data(path: Path) -> None:
    """Refuse a file or folder of data that names files elsewhere, or holds anything but files.

    Raises:
        DataError: The folder holds a pipe, a socket or a device; or a data set's card or state names a URL or a file
            outside of the folder.
    """
    for found in (path, *sorted(path.rglob("*"))):
        if found.exists() and not (found.is_file() or found.is_dir()):
            raise DataError(f"{found} is a pipe, a socket or a device; data is read from files. Remove it.")
    for name in _CARDS:
        for card in path.rglob(name):
            text = read_text(card)
            content = DatasetCard(text).data.to_dict() if card.suffix == ".md" else yaml.safe_load(text)
            configs = content.get("configs") if isinstance(content, dict) else None
            _check_names(card, [config.get("data_files") for config in configs or [] if isinstance(config, dict)])
    for state in path.rglob("state.json"):
        entries = parse_json(read_text(state)).get("_data_files") or []
        _check_names(state, [str(entry.get("filename")) for entry in entries])


def _check_names(file: Path, value: Any) -> None:
    """Check every text in nested lists and mappings."""
    if isinstance(value, str) and (
        "://" in value or value.startswith(("/", "~")) or ".." in PurePosixPath(value).parts
    ):
        raise DataError(f"{file}: names {value!r:.80} as data, which is not a file of its folder. Remove the entry.")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_names(file, inner)


# --- tables


def read_split(
    folder: Path, names: Sequence[str], *, texts: Sequence[str] = (), tagged: bool = False
) -> datasets.Dataset | None:
    """Return the rows of one split of a folder, or None if the folder has no such split.

    A split is NAME.parquet (or NAME-00000-of-00002.parquet and so on), .jsonl or .csv with a header, or what
    `datasets` saves.

    Args:
        names: What the split may be called.
        texts: Columns that hold text even if a CSV file has numbers there.
        tagged: Expect CoNLL text rather than CSV: a word first and its tag last on a line.

    Raises:
        DataError: A file is damaged, or names files elsewhere.
    """
    if not folder.is_dir():
        return None
    with reading(folder):
        for name in names:
            for ending in _TABLES[: 2 if tagged else None]:
                pattern = re.compile(rf"{re.escape(name)}(-\d+-of-\d+)?{re.escape(ending)}")
                if files := sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name)):
                    return read_tables(files, texts=texts)
            if tagged and (file := next((p for end in _TAGGED if (p := folder / f"{name}{end}").is_file()), None)):
                return _read_tagged_text(file)
            if (folder / name / "dataset_info.json").is_file():
                return datasets.load_from_disk(str(folder / name))
        if (folder / "dataset_dict.json").is_file():
            saved = datasets.load_from_disk(str(folder))
            return next((saved[name] for name in names if name in saved), None)
    return None


def read_tables(files: Sequence[Path], *, texts: Sequence[str] = ()) -> datasets.Dataset:
    """Return the rows of files of one form, in their order; see `read_split`."""
    return datasets.Dataset(pyarrow.concat_tables([_read_table(path, texts) for path in files]))


def _read_table(path: Path, texts: Sequence[str]) -> pyarrow.Table:
    if path.suffix == ".parquet":
        return parquet.read_table(path)
    if path.suffix == ".jsonl":
        return arrow_json.read_json(path, read_options=arrow_json.ReadOptions(block_size=_JSON_BLOCK_BYTES))
    is_tsv = path.suffix == ".tsv"
    return csv.read_csv(
        path,
        parse_options=csv.ParseOptions(
            delimiter="\t" if is_tsv else ",",
            quote_char=False if is_tsv else '"',  # in a TSV file a quote is a character of the text
            newlines_in_values=not is_tsv,
        ),
        convert_options=csv.ConvertOptions(column_types=dict.fromkeys(texts, pyarrow.string())),  # "1912" is a text
    )


def columns_of(rows: datasets.Dataset, names: Iterable[str], where: str) -> list[list[Any]]:
    """Return the values of columns.

    Raises:
        DataError: A column is missing, or there are no rows.
    """
    if missing := [name for name in names if name not in rows.column_names]:
        raise DataError(f"{where} has the columns {', '.join(rows.column_names)}, but no {', '.join(missing)}.")
    if not len(rows):
        raise DataError(f"{where} has no rows; fetch it again.")
    return [rows.data.column(name).to_pylist() for name in names]


def _read_tagged_text(path: Path) -> datasets.Dataset:
    """Return a sentence per row, with the columns tokens and ner_tags; an empty line ends a sentence."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # other line ends occur within words
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, byte {error.start}: not UTF-8; convert it.") from error
    rows: list[tuple[str, str] | None] = []
    for number, line in enumerate((line.strip(" \r") for line in lines), 1):
        fields = line.split("\t") if "\t" in line else line.split(" ")
        if not line.strip() or line.startswith(("-DOCSTART-", "# id ")):
            rows.append(None)
        elif len(fields) < 2:
            raise DataError(f"{path}, line {number}: {line!r:.80} is one field; a line has a word first, its tag last.")
        else:
            rows.append((fields[0], fields[-1]))
    sentences: dict[str, list[list[str]]] = {"tokens": [], "ner_tags": []}
    for is_sentence, group in groupby(rows, key=bool):
        if is_sentence:
            pairs = list(filter(None, group))
            sentences["tokens"].append([word for word, _ in pairs])
            sentences["ner_tags"].append([tag for _, tag in pairs])
    texts = datasets.Sequence(datasets.Value("string"))
    return datasets.Dataset.from_dict(sentences, features=datasets.Features({"tokens": texts, "ner_tags": texts}))


# --- rows


def spread(rows: Sequence[T], limit: int | None) -> Sequence[T]:
    """Return at most `limit` rows, evenly spread, because files are often sorted by source."""
    if limit is None or len(rows) <= limit:
        return rows
    return [rows[number * len(rows) // limit] for number in range(limit)]


def digest_of(rows: datasets.Dataset, names: Sequence[str]) -> str:
    """Return sixteen digits that change with any value of these columns, in whichever files they are."""
    digest = hashlib.sha256(json.dumps(list(names)).encode())
    table = rows.with_format("arrow")
    for start in range(0, len(rows), _ROWS_OF_A_HASH):
        block = table[start : start + _ROWS_OF_A_HASH].select(names)
        # A copy, because slices of equal values may differ in bytes that are not theirs.
        for batch in block.take(pyarrow.array(range(len(block)))).combine_chunks().to_batches():
            digest.update(batch.serialize())
    return digest.hexdigest()[:16]
