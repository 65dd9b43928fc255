"""Read tables of examples from local files: Parquet, JSON lines, CSV, CoNLL text and saved data sets.

References in files are never followed: not to other folders, pipes or the network.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

import datasets
import msgspec
import pyarrow
import yaml
from huggingface_hub import DatasetCard
from pyarrow import csv, parquet

from megatron_neobert.errors import ConfigError, DataError, MissingInputError, NeoBERTError, short_reason, yaml_reason
from megatron_neobert.runtime.atomic_files import read_text
from megatron_neobert.text import parse_json

_CARDS = ("README.md", ".huggingface.yaml")  # files whose data_files `datasets` follows
_TABLES = (".parquet", ".jsonl", ".csv")
_TAGGED = ("", ".txt", ".conll", ".bio", ".iob", ".iob2", ".tsv")
_ROWS_PER_HASH = 10_000
# Split -> its names in CoNLL's tasks, on the Hub and elsewhere.
SPLIT_NAMES = {
    "train": ("train", "eng.train"),
    "validation": ("validation", "valid", "dev", "testa", "eng.testa"),
    "test": ("test", "testb", "eng.testb"),
}


# --- safety


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Check that the files in `path` refer to no data elsewhere, then run the `with` block.

    The data files that README.md, .huggingface.yaml and state.json name must be relative paths without `..`. Raises
    DataError for any other name, and if `path` is or contains a pipe, a socket or a device. A path that does not exist
    is accepted. A NeoBERTError in the block is not changed. Every other exception becomes a DataError.
    """
    try:
        for entry in (path, *sorted(path.rglob("*"))):
            if entry.exists() and not (entry.is_file() or entry.is_dir()):
                raise DataError(f"{entry} is a pipe, a socket or a device; data is read from files. Remove it.")
        for card in (card for name in _CARDS for card in path.rglob(name)):
            text = read_text(card)
            content = DatasetCard(text).data.to_dict() if card.suffix == ".md" else yaml.safe_load(text)
            configs = content.get("configs") if isinstance(content, dict) else None
            _check_names(card, [config.get("data_files") for config in configs or [] if isinstance(config, dict)])
        for state in path.rglob("state.json"):
            _check_names(state, parse_json(read_text(state)).get("_data_files"))
        yield
    except NeoBERTError:
        raise
    except Exception as error:  # damaged Parquet, Arrow or JSON makes the libraries raise almost anything
        raise DataError(f"{path} cannot be read ({short_reason(error)}); fetch it again.") from error


def _check_names(file: Path, value: Any) -> None:
    """Raise DataError if a string in `value`, at any depth, is a URL, begins with / or ~, or contains `..`."""
    if isinstance(value, str) and (
        "://" in value or value.startswith(("/", "~")) or ".." in PurePosixPath(value).parts
    ):
        raise DataError(f"{file}: names {value!r:.80} as data, which is not a file of its folder. Remove the entry.")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_names(file, inner)


def read_yaml(flag: str, path: Path, type_: Any, *, remedy: str) -> Any:
    """Return the content of a YAML file as `type_`. Numbers may be written as strings: YAML 1.1 reads 1e-3 as a string.

    Raises MissingInputError if the file does not exist, and ConfigError if its content is not of this type. The
    messages begin with `flag` or the path, and end with `remedy`.
    """
    if not path.is_file():
        raise MissingInputError(f"{flag} {path}: no such file (working folder {Path.cwd()}); {remedy}.")
    try:
        return msgspec.convert(yaml.safe_load(read_text(path)), type_, strict=False)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # msgspec.ValidationError is a ValueError
        raise ConfigError(f"{path}: {yaml_reason(error)}; {remedy}.") from None


# --- tables


def read_split(
    folder: Path, names: Sequence[str], columns: Sequence[str], *, texts: Sequence[str] = (), tagged: bool = False
) -> datasets.Dataset | None:
    """Return one split of a data set, or None if the folder does not exist or does not have the split.

    The names are tried in order. The first file that exists is read: NAME.parquet, NAME.jsonl, NAME.csv with a header,
    or a folder NAME that `datasets` saved. Files NAME-00000-of-00002.parquet and so on are joined. If none exists, the
    split is read from `folder` itself, provided that `datasets` saved all splits there. Raises DataError if a file is
    damaged, has two columns with the same name, is a pipe, a socket or a device, or refers to files elsewhere.

    Args:
        names: Names under which the split may be stored, the preferred one first.
        columns: Columns that are used. All other columns of JSON lines and CSV files are returned empty.
        texts: Columns that are read as strings from JSON lines (with `to_text`) and from CSV. Columns of Parquet files
            and saved data sets keep their types.
        tagged: Instead of CSV, read CoNLL text from NAME, NAME.txt, .conll, .bio, .iob, .iob2 or .tsv.
    """
    if not folder.is_dir():
        return None
    with reading(folder):
        for name in names:
            for ending in _TABLES[: 2 if tagged else None]:
                pattern = re.compile(rf"{re.escape(name)}(-\d+-of-\d+)?{re.escape(ending)}")
                if files := sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name)):
                    tables = [_read_table(path, columns, texts) for path in files]
                    return datasets.Dataset(pyarrow.concat_tables(tables, promote_options="default"))
            if tagged and (file := next((p for end in _TAGGED if (p := folder / f"{name}{end}").is_file()), None)):
                return _read_tagged_text(file)
            if (folder / name / "dataset_info.json").is_file():
                return datasets.load_from_disk(str(folder / name))
        if (folder / "dataset_dict.json").is_file():
            saved = datasets.load_from_disk(str(folder))
            return next((saved[name] for name in names if name in saved), None)
    return None


def _read_table(path: Path, columns: Sequence[str], texts: Sequence[str]) -> pyarrow.Table:
    with reading(path):
        if path.suffix == ".parquet":
            table = parquet.ParquetFile(path).read()
        elif path.suffix == ".jsonl":
            rows = list(read_json_lines(path))
            names = dict.fromkeys(name for row in rows for name in row)
            cells = {name: [row.get(name) if name in columns else None for row in rows] for name in names}
            cells |= {name: [to_text(cell) for cell in cells[name]] for name in texts if name in cells}
            table = pyarrow.table(cells)
        else:
            types = csv.ConvertOptions(column_types=dict.fromkeys(texts, pyarrow.string()))
            table = csv.read_csv(path, parse_options=csv.ParseOptions(newlines_in_values=True), convert_options=types)
            for number, name in enumerate(table.column_names):
                if name not in columns:  # its type may differ between files
                    table = table.set_column(number, name, pyarrow.nulls(len(table)))
        if repeated := [name for name, count in Counter(table.column_names).items() if count > 1]:
            raise DataError(
                f"{path} has several columns {repeated[0]!r:.80}, as joins of tables write them; rename or remove all "
                "but one."
            )
        return table


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON object in each line. Values keep their JSON types: a string that looks like a date is a string.

    Empty lines are skipped. Raises DataError, with the line number, if a line is not a JSON object or not UTF-8.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = parse_json(line.decode("utf-8-sig")) if line.strip() else None
            except ValueError as error:
                raise DataError(
                    f"{path}, line {number}: cannot be read ({short_reason(error)}); write one JSON object."
                ) from error
            if isinstance(row, dict):
                yield row
            elif line.strip():
                raise DataError(f"{path}, line {number}: {row!r:.80} is not a JSON object; write one.")


def to_text(value: Any) -> str:
    """Return a cell as text: "1" for 1 and 1.0, "true" for True, and "" for None, NaN, lists and dicts."""
    if value is None or isinstance(value, (list, dict)) or value != value:  # NaN
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def columns_of(rows: datasets.Dataset, names: Sequence[str], where: str) -> list[list[Any]]:
    """Return the values of columns: one list per name, in the order of `names`.

    Raises DataError if a column is missing, or there are no rows. `where` is the file or split, for the message.
    """
    if missing := [name for name in names if name not in rows.column_names]:
        raise DataError(
            f"{where} has the columns {', '.join(rows.column_names)}, but no {', '.join(missing)}; rename its columns."
        )
    if not len(rows):
        raise DataError(f"{where} has no rows; fetch it again.")
    return [rows.data.column(name).to_pylist() for name in names]


def _read_tagged_text(path: Path) -> datasets.Dataset:
    """Return one row per sentence of a CoNLL file: tokens are the lines' first fields, ner_tags the last fields.

    Empty lines, and lines that begin with -DOCSTART- or `# id `, separate sentences. Raises DataError if another line
    has only one field, or the file is not UTF-8.
    """
    try:
        # str.splitlines would also split at line separators inside words.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, byte {error.start}: not UTF-8; convert it.") from error
    pairs: list[tuple[str, str] | None] = []  # word and tag; None between sentences
    for number, line in enumerate((line.strip(" \r") for line in lines), 1):
        fields = line.split("\t") if "\t" in line else line.split(" ")
        if not line.strip() or line.startswith(("-DOCSTART-", "# id ")):
            pairs.append(None)
        elif len(fields) < 2:
            raise DataError(
                f"{path}, line {number}: {line!r:.80} is one field; a line must begin with a word and end with its tag."
            )
        else:
            pairs.append((fields[0], fields[-1]))
    sentences = [list(filter(None, group)) for is_sentence, group in groupby(pairs, key=bool) if is_sentence]
    words = [[word for word, _ in sentence] for sentence in sentences]
    tags = [[tag for _, tag in sentence] for sentence in sentences]
    strings = datasets.Sequence(datasets.Value("string"))
    features = datasets.Features({"tokens": strings, "ner_tags": strings})
    return datasets.Dataset.from_dict({"tokens": words, "ner_tags": tags}, features=features)


# --- rows


@dataclass(frozen=True)
class Rows:
    """Texts and labels of the rows of one split."""

    texts: list[list[Any]]  # by column, then by row: a string, or the words of a sentence
    labels: list[Any]  # by row: a name, an index or a score, or the tags of a sentence
    digest: str  # of all values

    def select(self, limit: int | None) -> "Rows":
        """Return at most `limit` rows (None: all), evenly spaced because files are often sorted by source."""
        count = len(self.labels)
        if limit is None or count <= limit:
            return self
        *texts, labels = (
            [column[number * count // limit] for number in range(limit)] for column in (*self.texts, self.labels)
        )
        return replace(self, texts=texts, labels=labels)


def digest_of(rows: datasets.Dataset, names: Sequence[str]) -> str:
    """Return 16 hex digits of a hash over column names and ordered rows. The split into files has no effect."""
    digest = hashlib.sha256(json.dumps(list(names)).encode())
    table = rows.with_format("arrow")
    for start in range(0, len(rows), _ROWS_PER_HASH):
        block = table[start : start + _ROWS_PER_HASH].select(names)
        # `take` copies: a slice shares buffers with its table, and equal slices may differ in bytes outside of them.
        for batch in block.take(pyarrow.array(range(len(block)))).combine_chunks().to_batches():
            digest.update(batch.serialize())
    return digest.hexdigest()[:16]
