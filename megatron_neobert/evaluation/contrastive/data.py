"""Datasets for contrastive fine-tuning: rows of a query, a positive and hard negatives, from files of any form.

A dataset KEY is DATA_DIR/KEY.parquet, KEY.jsonl (also .gz, .zst) or a folder KEY: what `save_to_disk` wrote, or a copy
of the hub's repository. Its columns are those that the YAML file names, or already query, positive and negatives. The
rows are normalised once into the cache of `datasets` (HF_DATASETS_CACHE), from where they are mapped into memory.
"""

import hashlib
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow.compute

from megatron_neobert.errors import DataError, MissingInputError, NeoBERTError, short_reason
from megatron_neobert.evaluation.contrastive.config import DatasetSource
from megatron_neobert.evaluation.local_data import check_data

PLAIN_COLUMNS = {"query", "positive", "negatives"}
_TEXT = datasets.Value("string")
_FEATURES = datasets.Features({"query": _TEXT, "positive": _TEXT, "negatives": [_TEXT]})
_PLAIN = DatasetSource(divisor=1, instruction="", query=("query",), positive=("positive",), negatives=("negatives.*",))
_DIGEST_ROWS = 1000  # evenly spaced
_FILES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst")


def find_local(data_dir: Path, keys: Sequence[str], *, skip_missing: bool) -> dict[str, Path]:
    """Where each dataset lies, in the order of the names, so that a run does not depend on that of the file.

    Those that are nowhere are left out if `skip_missing`.

    Raises:
        MissingInputError: Datasets are missing, or all of them are.
    """
    found = {}
    for key in sorted(keys):
        candidates = [data_dir / f"{key}{ending}" for ending in _FILES] + [data_dir / key]
        path = next((path for path in candidates if path.exists()), None)
        if path is not None:
            found[key] = path
    missing = sorted(set(keys) - set(found))
    if missing and not (skip_missing and found):
        raise MissingInputError(
            f"--data-dir {data_dir} has no data for {', '.join(missing)}: expected KEY.parquet, KEY.jsonl or a folder "
            f"KEY. On a machine with network: neobert fetch contrastive --config FILE --data-dir {data_dir} "
            f"--datasets {' '.join(missing)}. To train on the others, give --skip-missing."
        )
    return found


def load_pairs(key: str, source: DatasetSource, path: Path, *, limit: int | None = None) -> datasets.Dataset:
    """The rows of one dataset: query and positive are texts, negatives a list of texts.

    Rows without query or positive are left out, and so are a row's negatives that are empty or stand there twice.

    Raises:
        DataError: A file cannot be read, or lacks the columns.
    """
    check_data(path)
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    # A tuple: of a list, `datasets` would give each call of the generator a part, and call it for every file.
    stamps = tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    return _build(key, source, str(path), limit, stamps)


def digest_of(pairs: datasets.Dataset) -> str:
    """Twelve digits that change with the texts, wherever they lie and whenever they were read.

    Covers the number of texts and their bytes in every column, and 1,000 rows from first to last: reading tens of
    gigabytes at every start would cost more than it finds.
    """
    columns = {name: pairs.data.column(name) for name in ("query", "positive")}
    columns["negatives"] = pyarrow.compute.list_flatten(pairs.data.column("negatives"))
    sizes = [
        (len(texts), pyarrow.compute.sum(pyarrow.compute.binary_length(texts)).as_py()) for texts in columns.values()
    ]
    last, count = len(pairs) - 1, min(len(pairs), _DIGEST_ROWS)
    chosen = [pairs[number * last // max(1, count - 1)] for number in range(count)]
    return hashlib.sha256(json.dumps([sizes, chosen], sort_keys=True).encode()).hexdigest()[:12]


def fetch_pairs(key: str, source: DatasetSource) -> datasets.Dataset:
    """The same from the hub; `source.hub` may be a folder."""
    return _build(key, source, None, None, ())


def _build(key: str, source: DatasetSource, path: str | None, limit: int | None, stamps: Any) -> datasets.Dataset:
    # The arguments are hashed: another file, another limit or another column is another entry of the cache.
    given = {"key": key, "source": source, "path": path, "limit": limit, "stamps": stamps}
    if not sys.stderr.isatty():  # in a log each of their updates stays
        datasets.disable_progress_bars()
    try:
        return datasets.Dataset.from_generator(_rows, features=_FEATURES, gen_kwargs=given)
    except datasets.exceptions.DatasetGenerationError as error:
        cause = error.__cause__ or error
        if isinstance(cause, NeoBERTError):
            raise cause from None
        raise DataError(f"{key}: {path or source.hub} cannot be read ({short_reason(cause)}).") from error


def _rows(
    key: str, source: DatasetSource, path: str | None, limit: int | None, stamps: Sequence[Any]
) -> Iterator[dict[str, Any]]:
    """Normalised rows; `stamps` is for the cache alone."""
    place = path or source.hub
    assert place is not None, f"{key} has neither a local path nor a hub name"
    kept = left_out = 0
    joined = source.retrieval and not Path(place).is_file()
    # Configs can be named of the hub, or of a copy of what lies there.
    is_repository = not Path(place).exists() or (Path(place).is_dir() and not _was_saved(Path(place)))
    configs = source.configs if is_repository and source.configs else (None,)
    opened = itertools.chain.from_iterable(_open(place, config, source.split) for config in configs)
    for row in _join_retrieval(place, source.split) if joined else opened:
        used = _PLAIN if set(row) <= PLAIN_COLUMNS else source
        pair = _normalise(row, used, f"{key} ({place})")
        if pair is None:
            left_out += 1
            continue
        kept += 1
        yield pair
        if kept == limit:
            break
    if left_out:
        print(f"{key}: {left_out:,} of {kept + left_out:,} rows left out", file=sys.stderr)
    if not kept:
        raise DataError(f"{key}: {place} has no row with a query and a positive.")


def _was_saved(path: Path) -> bool:
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def _open(place: str, config: str | None, split: str) -> Iterable[dict[str, Any]]:
    """Rows as they are stored."""
    path = Path(place)
    if path.is_file():
        reader = "parquet" if path.suffix == ".parquet" else "json"
        return datasets.load_dataset(reader, data_files=place, split="train", streaming=True)
    if path.is_dir() and _was_saved(path):
        saved = datasets.load_from_disk(place)
        return saved[split] if isinstance(saved, datasets.DatasetDict) else saved
    return datasets.load_dataset(place, config, split=split, streaming=True)


def _join_retrieval(place: str, split: str) -> Iterator[dict[str, Any]]:
    """Pairs of a query and a relevant document; titles are dropped, as in the released code.

    The judgements are read first, so that of the corpus (millions of texts) only what they name is kept in memory.
    """
    judged = [
        (str(row["query-id"]), str(row["corpus-id"])) for row in _open(place, "default", split) if row["score"] > 0
    ]
    wanted = {document for _, document in judged}
    queries = {str(row["_id"]): row["text"] for row in _open(place, "queries", "queries")}
    corpus = {str(row["_id"]): row["text"] for row in _open(place, "corpus", "corpus") if str(row["_id"]) in wanted}
    for query, document in judged:
        yield {"query": queries.get(query), "positive": corpus.get(document)}


def _normalise(row: dict[str, Any], source: DatasetSource, where: str) -> dict[str, Any] | None:
    """The three columns, or None where there is no pair."""
    if source.score is not None:
        scores = _values(row, source.score, where)
        if not scores or not float(scores[0]) > source.above:
            return None
    query, positive = (_first_text(row, paths, where) for paths in (source.query, source.positive))
    if not query or not positive:
        return None
    # A plain file need not have negatives.
    paths = [path for path in source.negatives if source is not _PLAIN or "negatives" in row]
    texts = itertools.chain.from_iterable(_texts(row, path, where) for path in paths)
    negatives = list(dict.fromkeys(text for text in texts if text not in ("", query, positive)))
    return {"query": query, "positive": positive, "negatives": negatives}


def _first_text(row: dict[str, Any], paths: Sequence[str], where: str) -> str | None:
    present = [path for path in paths if path.split(".")[0] in row]
    if not present:
        raise DataError(
            f"{where} has the columns {', '.join(map(str, row))}, but neither {' nor '.join(paths) or 'query'}; name "
            "its columns in the YAML file, or call them query, positive and negatives."
        )
    # Of two configs in one file, a row has the columns of both, and nothing in those of the other.
    texts = itertools.chain.from_iterable(_texts(row, path, where) for path in present)
    return next((text for text in texts if text), None)


def _texts(row: dict[str, Any], path: str, where: str) -> list[str]:
    values = [value for value in _values(row, path, where) if value is not None]
    wrong = next((value for value in values if not isinstance(value, str)), None)
    if wrong is not None:
        remedy = f"; use {path}.0 or {path}.*" if isinstance(wrong, list) else ""
        raise DataError(f"{where}: {path} holds a {type(wrong).__name__} and not a text{remedy}.")
    return [value.strip() for value in values]


def _values(row: dict[str, Any], path: str, where: str) -> list[Any]:
    """What lies at a path: nothing beyond the end of a list."""
    values: list[Any] = [row]
    for part in path.split("."):
        if part == "*":
            values = [entry for value in values for entry in value or ()]
        elif part.isdigit() and all(value is None or isinstance(value, list) for value in values):
            values = [value[int(part)] for value in values if value is not None and len(value) > int(part)]
        elif all(value is None or (isinstance(value, dict) and part in value) for value in values):
            values = [value[part] for value in values if value is not None]
        else:
            raise DataError(f"{where} has no {path}: there is no {part!r}; name its columns in the YAML file.")
    return values
