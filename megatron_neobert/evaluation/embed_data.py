"""Datasets of contrastive fine-tuning: a YAML file that describes them, and rows of a query, a positive and negatives.

Everything about a dataset is data: where it comes from, which columns hold the texts, its share of the batch and its
instruction. `neobert fetch contrastive` writes DATA_DIR/KEY.parquet with the columns query, positive and negatives.
Training reads that file, or KEY.jsonl, through the cache of `datasets` (HF_DATASETS_CACHE), from where rows are mapped
into memory.
"""

import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import datasets
import msgspec
import yaml
from msgspec import Meta, Struct, field

from megatron_neobert.errors import (
    ConfigError,
    DataError,
    MissingInputError,
    NeoBERTError,
    short_reason,
    yaml_reason,
)
from megatron_neobert.evaluation.data import reading
from megatron_neobert.runtime.atomic_files import sha256_of

_Count = Annotated[int, Meta(ge=1)]
_Positive = Annotated[float, Meta(gt=0)]
_Columns = str | tuple[str, ...]


class TrainingSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section `training`. examples/configs/evaluation/contrastive.yaml names the sources of the values."""

    steps: _Count = 2000
    batch_size: _Count = 128  # pairs per process and step, before a dataset's divisor
    alpha: Annotated[float, Meta(ge=0)] = 0.5
    temperature: _Positive = 0.07
    learning_rate: _Positive = 1e-4
    warmup_ratio: Annotated[float, Meta(ge=0, lt=1)] = 0.1  # of the steps
    weight_decay: Annotated[float, Meta(ge=0)] = 0.01
    clip_grad: _Positive = 1.0
    max_length: _Count = 1024  # tokens
    instructions: Literal["query", "both", "none"] = "query"
    separator: str = " "
    log_interval: _Count = 10  # steps
    save_interval: _Count = 250  # steps


class DatasetSource(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One dataset. A column is a path: `a`, `a.0` (first of a list), `a.b` (entry), `a.*` (all of a list)."""

    divisor: _Count
    instruction: str
    hub: str | None = None
    configs: tuple[str, ...] = ()
    split: str = "train"
    query: _Columns = ()  # the first that a row has
    positive: _Columns = ()
    negatives: _Columns = ()  # all of them
    score: str | None = None
    above: float = 0.0
    retrieval: bool = False
    default: bool = True

    def __post_init__(self) -> None:
        if self.retrieval and (self.query or self.positive or self.negatives or self.configs or self.score):
            raise ValueError("retrieval: true has fixed columns; name no columns, configs or score")
        if self.hub is not None and not self.retrieval and not (self.query and self.positive):
            raise ValueError(f"hub {self.hub} without query and positive; name the columns")

    def batch_size(self, target: int) -> int:
        """Return the pairs per step. With one pair there would be no negative in the batch."""
        return max(2, target // self.divisor)


class ContrastiveConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file; datasets in its order. A key is the name of a file, and of a prompt in the final folder."""

    datasets: Annotated[dict[Annotated[str, Meta(pattern="^[A-Za-z0-9_-]+$")], DatasetSource], Meta(min_length=1)]
    training: TrainingSettings = field(default_factory=TrainingSettings)


def read_config(path: Path) -> ContrastiveConfig:
    """Read and check a file.

    Raises:
        MissingInputError: There is no such file.
        ConfigError: It is not YAML, or holds something that is unknown or impossible.
    """
    if not path.is_file():
        raise MissingInputError(f"--config {path}: no such file (looked from {Path.cwd()}).")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
        return msgspec.convert(content, ContrastiveConfig, strict=False)  # "1e-3" is a text in YAML 1.1
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also msgspec's ValidationError
        raise ConfigError(f"{path}: {yaml_reason(error)}; compare it with the recipe evaluation/contrastive.") from None


# --- local files


_TEXT = datasets.Value("string")
_FEATURES = datasets.Features({"query": _TEXT, "positive": _TEXT, "negatives": [_TEXT]})


def find_local(data_dir: Path, keys: Sequence[str]) -> dict[str, Path]:
    """Return the path of each dataset, in the order of the names, so that a run does not depend on that of the file.

    Raises:
        MissingInputError: Datasets are missing.
    """
    paths = [data_dir / f"{key}{ending}" for key in sorted(keys) for ending in (".jsonl", ".parquet")]
    found = {path.stem: path for path in paths if path.exists()}
    if missing := sorted(set(keys) - set(found)):
        raise MissingInputError(
            f"--data-dir {data_dir} has no data for {', '.join(missing)}: expected KEY.parquet or KEY.jsonl. On a "
            f"machine with network: neobert fetch contrastive --config FILE --data-dir {data_dir} "
            f"--datasets {' '.join(missing)}. To train on the others, write default: false into FILE."
        )
    return found


def load_pairs(path: Path, *, limit: int | None = None) -> datasets.Dataset:
    """Return the rows of a file: query and positive are texts, negatives a list of texts.

    Rows without query or positive are left out, and so are a row's negatives that are empty or there twice.

    Raises:
        DataError: The file cannot be read, lacks columns, or has no row with a query and a positive.
    """
    if not sys.stderr.isatty():  # in a log each of their updates stays
        datasets.disable_progress_bars()
    with reading(path):
        read = datasets.Dataset.from_parquet if path.suffix == ".parquet" else datasets.Dataset.from_json
        # Keyed by content: the library's own key is the name, size and time of a file, which a copy may keep.
        cache = Path(datasets.config.HF_DATASETS_CACHE) / "pairs" / sha256_of(path)
        rows: Any = read(str(path), cache_dir=str(cache))
        if missing := {"query", "positive"} - set(rows.column_names):
            raise DataError(
                f"{path} has the columns {', '.join(rows.column_names)}, but no {', '.join(sorted(missing))}."
            )
        pairs = rows.map(_clean, remove_columns=rows.column_names, features=_FEATURES)
        pairs = pairs.filter(_is_pair, input_columns=["query", "positive"])
    if len(pairs) < len(rows):
        print(f"{path.stem}: {len(rows) - len(pairs):,} of {len(rows):,} rows left out", file=sys.stderr)
    if not len(pairs):
        raise DataError(f"{path} has no row with a query and a positive.")
    return pairs if limit is None else pairs.select(range(min(limit, len(pairs))))


def _clean(row: dict[str, Any]) -> dict[str, Any]:
    query, positive = ((row[name] or "").strip() for name in ("query", "positive"))
    texts = [text.strip() for text in row.get("negatives") or () if text is not None]
    negatives = list(dict.fromkeys(text for text in texts if text not in ("", query, positive)))
    return {"query": query, "positive": positive, "negatives": negatives}


def _is_pair(query: str, positive: str) -> bool:
    return bool(query and positive)


# --- fetching


def fetch_pairs(key: str, source: DatasetSource) -> datasets.Dataset:
    """Return the rows of one dataset from the Hub; `source.hub` may be a folder.

    Raises:
        DataError: The dataset cannot be read, or lacks the columns.
    """
    try:
        given = {"key": key, "source": source}
        return datasets.Dataset.from_generator(_rows, features=_FEATURES, gen_kwargs=given)
    except datasets.exceptions.DatasetGenerationError as error:
        cause = error.__cause__ or error
        if isinstance(cause, NeoBERTError):
            raise cause from None
        raise DataError(f"{key}: {source.hub} cannot be read ({short_reason(cause)}).") from error


def _rows(key: str, source: DatasetSource) -> Iterator[dict[str, Any]]:
    where, kept = f"{key} ({source.hub})", 0
    streams = (_stream(source, config, source.split) for config in source.configs or (None,))
    for row in _join_retrieval(source) if source.retrieval else itertools.chain.from_iterable(streams):
        if source.score is not None:
            scores = _values(row, source.score, where)
            if not scores or not float(scores[0]) > source.above:
                continue
        texts = {"query": _first_text(row, source.query or "query", where)}
        texts["positive"] = _first_text(row, source.positive or "positive", where)
        lists = [_texts(row, path, where) for path in _paths(source.negatives)]
        pair = _clean({**texts, "negatives": [text for found in lists for text in found]})
        if _is_pair(pair["query"], pair["positive"]):
            kept += 1
            yield pair
    if not kept:
        raise DataError(f"{where} has no row with a query and a positive.")


def _stream(source: DatasetSource, config: str | None, split: str) -> Any:
    return datasets.load_dataset(source.hub, config, split=split, streaming=True)


def _join_retrieval(source: DatasetSource) -> Iterator[dict[str, Any]]:
    """Yield pairs of a query and a relevant document; titles are dropped, as in the released code.

    The judgements are read first, so that of the corpus (millions of texts) only what they name is kept in memory.
    """
    judged = [
        (str(row["query-id"]), str(row["corpus-id"]))
        for row in _stream(source, "default", source.split)
        if row["score"] > 0
    ]
    wanted = {document for _, document in judged}
    queries = {str(row["_id"]): row["text"] for row in _stream(source, "queries", "queries")}
    corpus = {str(row["_id"]): row["text"] for row in _stream(source, "corpus", "corpus") if str(row["_id"]) in wanted}
    for query, document in judged:
        yield {"query": queries.get(query), "positive": corpus.get(document)}


def _paths(columns: _Columns) -> tuple[str, ...]:
    return (columns,) if isinstance(columns, str) else columns


def _first_text(row: dict[str, Any], columns: _Columns, where: str) -> str | None:
    present = [path for path in _paths(columns) if path.split(".")[0] in row]
    if not present:
        raise DataError(
            f"{where} has the columns {', '.join(map(str, row))}, but neither {' nor '.join(_paths(columns))}; name "
            "its columns in the YAML file."
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
    return values


def _values(row: dict[str, Any], path: str, where: str) -> list[Any]:
    """Return the values at a path: nothing beyond the end of a list."""
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
