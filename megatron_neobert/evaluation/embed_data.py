"""Datasets of contrastive fine-tuning: the YAML file that describes them, downloads, and local files of pairs.

A pair is a query, a positive and any number of hard negatives. The YAML file names the source of each dataset, its
columns, its batch-size divisor and its instruction. `neobert fetch contrastive` writes DATA_DIR/KEY.parquet with the
columns query, positive and negatives. Training reads that file, or KEY.jsonl, through the memory-mapped cache of
`datasets` (HF_DATASETS_CACHE).
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

from megatron_neobert.errors import ConfigError, DataError, MissingInputError, short_reason, yaml_reason
from megatron_neobert.evaluation.data import read_json_lines, reading, to_text
from megatron_neobert.evaluation.options import SHORTEST_INPUT
from megatron_neobert.runtime.atomic_files import sha256_of

_Count = Annotated[int, Meta(ge=1)]
_Positive = Annotated[float, Meta(gt=0)]
_Columns = str | tuple[str, ...]

VALIDATION = "validation"  # file name of the held-out pairs


class TrainingSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `training` of the YAML file. configs/evaluation/contrastive.yaml cites the sources of the defaults."""

    steps: _Count = 2000
    batch_size: _Count = 128  # pairs per process and step, before the divisor of a dataset
    alpha: Annotated[float, Meta(ge=0)] = 0.5
    temperature: _Positive = 0.07
    learning_rate: _Positive = 1e-4
    warmup_ratio: Annotated[float, Meta(ge=0, lt=1)] = 0.1  # of the steps
    weight_decay: Annotated[float, Meta(ge=0)] = 0.01
    clip_grad: _Positive = 1.0
    max_length: Annotated[int, Meta(ge=SHORTEST_INPUT)] = 1024  # tokens
    instructions: Literal["query", "both", "none"] = "query"
    separator: str = " "  # between instruction and text
    matryoshka: tuple[_Count, ...] = ()  # the loss is also that of embeddings cut to these dimensions
    log_interval: _Count = 10  # steps
    save_interval: _Count = 250  # steps


class DatasetSource(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Source and settings of one dataset.

    Columns are paths: `a`, `a.0` (first entry of a list), `a.b` (value of a key), `a.*` (all entries of a list).
    """

    divisor: _Count  # of the batch size
    instruction: str
    hub: str | None = None  # name on the Hugging Face Hub, or a folder
    configs: tuple[str, ...] = ()
    split: str = "train"
    query: _Columns = ()  # the first column with a text is used
    positive: _Columns = ()  # the first column with a text is used
    negatives: _Columns = ()  # all columns are used
    score: str | None = None
    above: float = 0.0  # rows with this or a lower score are dropped
    retrieval: bool = False  # the source has queries, a corpus and relevance judgements
    default: bool = True  # False: not used

    def __post_init__(self) -> None:
        if self.retrieval and (self.query or self.positive or self.negatives or self.configs or self.score):
            raise ValueError("retrieval: true has fixed columns; remove query, positive, negatives, configs and score")
        if self.hub is not None and not self.retrieval and not (self.query and self.positive):
            raise ValueError(f"hub {self.hub} without query and positive; name the columns")

    def batch_size(self, target: int) -> int:
        """Return the pairs per batch: at least two, because a single pair has no in-batch negative."""
        return max(2, target // self.divisor)


class ContrastiveConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Content of the YAML file. Each dataset key is also a file name, and a prompt name of the final model."""

    datasets: Annotated[dict[Annotated[str, Meta(pattern="^[A-Za-z0-9_-]+$")], DatasetSource], Meta(min_length=1)]
    training: TrainingSettings = field(default_factory=TrainingSettings)

    def __post_init__(self) -> None:
        if VALIDATION in self.datasets:
            raise ValueError(f"datasets: {VALIDATION} is the name of the held-out pairs; rename the dataset")


def read_config(path: Path) -> ContrastiveConfig:
    """Read and validate the YAML file of contrastive fine-tuning.

    Raises MissingInputError if the file does not exist, and ConfigError if it is not YAML or has an invalid setting.
    """
    if not path.is_file():
        raise MissingInputError(f"--config {path}: no such file (working folder {Path.cwd()}); check the path.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
        # Not strict, because YAML 1.1 reads 1e-3 as a string.
        return msgspec.convert(content, ContrastiveConfig, strict=False)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # msgspec.ValidationError is a ValueError
        raise ConfigError(f"{path}: {yaml_reason(error)}; compare it with the recipe evaluation/contrastive.") from None


# --- local files


_TEXT = datasets.Value("string")
_FEATURES = datasets.Features({"query": _TEXT, "positive": _TEXT, "negatives": [_TEXT]})


def find_local(data_dir: Path, keys: Sequence[str]) -> dict[str, Path]:
    """Return {key: file}, sorted by key. The file is KEY.parquet in `data_dir`, or KEY.jsonl if that does not exist.

    Raises MissingInputError if a dataset has no file.
    """
    # Sorted, so that the order of the YAML file does not affect a run.
    candidates = [data_dir / f"{key}{suffix}" for key in sorted(keys) for suffix in (".jsonl", ".parquet")]
    paths = {path.stem: path for path in candidates if path.exists()}
    if missing := sorted(set(keys) - set(paths)):
        raise MissingInputError(
            f"--data-dir {data_dir} has no data for {', '.join(missing)}: expected KEY.parquet or KEY.jsonl. On a "
            f"machine with network: neobert fetch contrastive --config FILE --data-dir {data_dir} "
            f"--datasets {' '.join(missing)}. To train on the others, write default: false into FILE."
        )
    return paths


def load_pairs(path: Path, *, limit: int | None = None) -> datasets.Dataset:
    """Return the pairs of a Parquet or JSON Lines file, with the columns query, positive and negatives (a list).

    The file needs the columns query and positive; negatives is optional. Texts are stripped. Rows without query or
    positive are dropped, and their number is printed. Negatives are dropped if they are empty, repeated, or equal to
    query or positive. Then the first `limit` pairs (None: all) are returned. The rows are cached in HF_DATASETS_CACHE.
    Raises DataError if the file cannot be read, lacks columns, or has no row with a query and a positive.
    """
    if not sys.stderr.isatty():  # every update of a bar would be a line of the log
        datasets.disable_progress_bars()
    with reading(path):
        # Keyed by content, because the library's key (name, size and time of the file) may be equal for changed files.
        cache = Path(datasets.config.HF_DATASETS_CACHE) / "pairs" / sha256_of(path)
        if path.suffix == ".parquet":
            table: Any = datasets.Dataset.from_parquet(str(path), cache_dir=str(cache))
            _require_columns(path, table.column_names)
            rows: Any = table.map(_clean, remove_columns=table.column_names, features=_FEATURES)
        else:
            # Not the library's reader: it infers types from the first block, which later lists or dates do not fit.
            try:
                rows = datasets.Dataset.from_generator(
                    _read_json_pairs, features=_FEATURES, gen_kwargs={"path": path}, cache_dir=str(cache)
                )
            except datasets.exceptions.DatasetGenerationError as error:
                raise error.__cause__ or error from None
        pairs = rows.filter(lambda query, positive: bool(query and positive), input_columns=["query", "positive"])
    if len(pairs) < len(rows):
        print(f"{path.stem}: dropped {len(rows) - len(pairs):,} of {len(rows):,} rows without a pair", file=sys.stderr)
    if not len(pairs):
        raise DataError(f"{path} has no row with a query and a positive; fetch it again.")
    return pairs if limit is None else pairs.select(range(min(limit, len(pairs))))


def without_held_out(pairs: datasets.Dataset, held_out: datasets.Dataset, name: str) -> datasets.Dataset:
    """Return the pairs that have no query of the held-out pairs as query or positive; print how many were dropped.

    Documents may be shared, as in every retrieval corpus. Raises DataError if no pair is left; `name` is for messages.
    """
    queries = set(held_out["query"])
    kept = pairs.filter(
        lambda query, positive: query not in queries and positive not in queries, input_columns=["query", "positive"]
    )
    if dropped := len(pairs) - len(kept):
        print(f"{name}: dropped {dropped:,} of {len(pairs):,} pairs with a held-out query", file=sys.stderr)
    if not len(kept):
        raise DataError(f"{name}: every pair has a query of the file {VALIDATION}; use other pairs for validation.")
    return kept


def _read_json_pairs(path: Path) -> Iterator[dict[str, Any]]:
    names: dict[str, None] = {}
    for row in read_json_lines(path):
        names |= dict.fromkeys(row)
        yield _clean(row)
    _require_columns(path, list(names))


def _require_columns(path: Path, names: Sequence[str]) -> None:
    if missing := {"query", "positive"} - set(names):
        raise DataError(
            f"{path} has the columns {', '.join(names)}, but no {', '.join(sorted(missing))}; rename the columns."
        )


def _clean(row: dict[str, Any]) -> dict[str, Any]:
    query, positive = (to_text(row.get(name)).strip() for name in ("query", "positive"))
    negatives = row.get("negatives") or []
    if not isinstance(negatives, list):
        raise TypeError(f"negatives is {negatives!r:.80}, not a list of texts")
    texts = [to_text(text).strip() for text in negatives]
    negatives = list(dict.fromkeys(text for text in texts if text not in ("", query, positive)))
    return {"query": query, "positive": positive, "negatives": negatives}


# --- downloads


def fetch_pairs(key: str, source: DatasetSource) -> datasets.Dataset:
    """Download one dataset and return its pairs, with the columns query, positive and negatives (a list).

    Texts are stripped. Rows without query or positive, or with a score that is not above `source.above`, are dropped.
    Raises DataError if the dataset cannot be read, lacks columns, or has no pairs. `key` names it in the message.
    """
    try:
        return datasets.Dataset.from_generator(_read_source, features=_FEATURES, gen_kwargs={"source": source})
    except datasets.exceptions.DatasetGenerationError as error:
        raise DataError(
            f"{key}: {source.hub} cannot be read ({short_reason(error.__cause__ or error)}); check its columns in the "
            "YAML file, or try again."
        ) from error


def _read_source(source: DatasetSource) -> Iterator[dict[str, Any]]:
    is_empty = True
    streams = (_stream(source, config, source.split) for config in source.configs or (None,))
    for row in _join_retrieval(source) if source.retrieval else itertools.chain.from_iterable(streams):
        if source.score is not None and not row[source.score] > source.above:
            continue
        negatives = [text for path in _paths(source.negatives) for text in values_at(row, path)]
        query = _first_text(row, _paths(source.query or "query"))
        pair = _clean(
            {
                "query": query,
                "positive": _first_text(row, _paths(source.positive or "positive")),
                "negatives": negatives,
            }
        )
        if pair["query"] and pair["positive"]:
            is_empty = False
            yield pair
    if is_empty:
        raise ValueError("no row has a query and a positive")


def _stream(source: DatasetSource, config: str | None, split: str) -> Any:
    return datasets.load_dataset(source.hub, config, split=split, streaming=True)


def _join_retrieval(source: DatasetSource) -> Iterator[dict[str, Any]]:
    """Yield {"query": text, "positive": text} for each relevance judgement above 0. A text that is missing is None."""
    # Reading the judgements first keeps only relevant documents in memory; a corpus has millions of texts.
    judged = [
        (str(row["query-id"]), str(row["corpus-id"]))
        for row in _stream(source, "default", source.split)
        if row["score"] > 0
    ]
    relevant = {document for _, document in judged}
    queries = {str(row["_id"]): row["text"] for row in _stream(source, "queries", "queries")}
    documents = _stream(source, "corpus", "corpus")
    # Without titles, as in the released code.
    corpus = {str(row["_id"]): row["text"] for row in documents if str(row["_id"]) in relevant}
    for query, document in judged:
        yield {"query": queries.get(query), "positive": corpus.get(document)}


def _paths(columns: _Columns) -> tuple[str, ...]:
    return (columns,) if isinstance(columns, str) else columns


def _first_text(row: dict[str, Any], paths: tuple[str, ...]) -> str | None:
    """Return the first non-empty text of a row at the paths whose column the row has, or None."""
    # Rows of a dataset with two configs have the columns of one of them, or None in those of the other.
    present = [path for path in paths if path.split(".")[0] in row] or paths
    return next((text for path in present for text in values_at(row, path) if text), None)


def values_at(row: dict[str, Any], path: str) -> list[Any]:
    """Return the values of a row at a path: `a` (column), `a.b` (key), `a.0` (entry of a list) or `a.*` (all entries).

    None, or an index beyond the end of a list, gives no value. Raises KeyError if a column or key is missing.
    """
    values: list[Any] = [row]
    for step in path.split("."):
        if step == "*":
            values = [entry for value in values for entry in value]
        elif step.isdigit():
            values = [value[int(step)] for value in values if len(value) > int(step)]
        else:
            values = [value[step] for value in values]
        values = [value for value in values if value is not None]
    return values
