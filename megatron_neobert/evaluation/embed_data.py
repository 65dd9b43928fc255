"""Datasets of contrastive fine-tuning: a YAML file that describes them, and rows of a query, a positive and negatives.

Everything about a dataset is data: where it comes from, which columns hold the texts, its share of the batch and its
instruction. All problems of the file are reported together.

A dataset KEY is DATA_DIR/KEY.parquet, KEY.jsonl (also .gz, .zst) or a folder KEY: what `save_to_disk` wrote, or a copy
of the Hub's repository. Its columns are those that the YAML file names, or already query, positive and negatives. The
rows are normalised once into the cache of `datasets` (HF_DATASETS_CACHE), from where they are mapped into memory.
"""

import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import datasets
import yaml

from megatron_neobert.cli import assign, option, typed_fields, value_problem
from megatron_neobert.errors import (
    ConfigError,
    DataError,
    MissingInputError,
    NeoBERTError,
    short_reason,
    suggestion,
    yaml_reason,
)
from megatron_neobert.evaluation.data import check_data, stream_rows, was_saved

_NAME = re.compile(r"[A-Za-z0-9_-]+")  # of a file, and of a prompt in the final folder
_ABOVE_ZERO = 1e-12


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("is not a text.")
    return value


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The section `training`. examples/configs/evaluation/contrastive.yaml names the sources of the values."""

    steps: int = option(2000, minimum=1)
    batch_size: int = option(128, "pairs per process and step, before a dataset's divisor", minimum=1)
    alpha: float = option(0.5, minimum=0)
    temperature: float = option(0.07, minimum=_ABOVE_ZERO)
    learning_rate: float = option(1e-4, minimum=_ABOVE_ZERO)
    warmup_ratio: float = option(0.1, "of the steps", minimum=0)
    weight_decay: float = option(0.01, minimum=0)
    clip_grad: float = option(1.0, minimum=_ABOVE_ZERO)
    max_length: int = option(1024, "tokens", minimum=1)
    instructions: Literal["query", "both", "none"] = option("query")
    separator: str = option(" ", read=_text)
    log_interval: int = option(10, "steps", minimum=1)
    save_interval: int = option(250, "steps", minimum=1)


@dataclass(frozen=True, kw_only=True)
class DatasetSource:
    """One dataset. A column is a path: `a`, `a.0` (first of a list), `a.b` (entry), `a.*` (all of a list)."""

    divisor: int = option(minimum=1)
    instruction: str = option(read=_text)
    hub: str | None = option(None)
    configs: tuple[str, ...] = option(())
    split: str = option("train")
    query: tuple[str, ...] = option((), "the first that a row has")
    positive: tuple[str, ...] = option(())
    negatives: tuple[str, ...] = option((), "all of them")
    score: str | None = option(None)
    above: float = option(0.0)
    retrieval: bool = option(False)
    default: bool = option(True)

    def batch_size(self, target: int) -> int:
        """Return the pairs per step. With one pair there would be no negative in the batch."""
        return max(2, target // self.divisor)


@dataclass(frozen=True)
class ContrastiveConfig:
    """The whole file; datasets in its order."""

    training: TrainingSettings
    datasets: dict[str, DatasetSource]


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
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: not readable as YAML: {yaml_reason(error)}; compare it with the recipe evaluation/contrastive."
        ) from None
    if not isinstance(content, dict) or set(content) != {"training", "datasets"}:
        raise ConfigError(f"{path}: expected the sections training and datasets, and nothing else.")
    entries = content["datasets"]
    if not isinstance(entries, dict) or not entries:
        raise ConfigError(f"{path}: datasets names no dataset; see the recipe evaluation/contrastive.")
    problems: list[str] = []
    training = _build(TrainingSettings, content["training"] or {}, f"{path}: training", problems)
    if training is not None and not training.warmup_ratio < 1:
        problems.append(f"{path}: training.warmup_ratio {training.warmup_ratio} is not below 1.")
    sources = {}
    for key, entry in entries.items():
        if not isinstance(key, str) or not _NAME.fullmatch(key):
            problems.append(f"{path}: the dataset's name {key!r} is not made of letters, digits, '-' and '_'.")
            continue
        where = f"{path}: datasets.{key}"
        source = sources[key] = _build(DatasetSource, entry, where, problems)
        if source is None:
            continue
        named = source.query or source.positive or source.negatives or source.configs or source.score
        if source.retrieval and named:
            problems.append(f"{where}: retrieval: true has fixed columns; name no columns, configs or score.")
        elif source.hub is not None and not source.retrieval and not (source.query and source.positive):
            problems.append(f"{where}: hub {source.hub} without query and positive; name the columns.")
    if problems:
        raise ConfigError(problems)
    return ContrastiveConfig(training, sources)


def choose_datasets(wanted: Sequence[str], config: ContrastiveConfig) -> list[str]:
    """Return the datasets of these names, in the order of the file; without names the default ones.

    Raises:
        ConfigError: The file has no such dataset.
    """
    if not wanted:
        return [key for key, source in config.datasets.items() if source.default]
    if unknown := [key for key in wanted if key not in config.datasets]:
        raise ConfigError(f"--limit-datasets {' '.join(unknown)}: unknown; the file has {', '.join(config.datasets)}.")
    return [key for key in config.datasets if key in wanted]


def _build(cls: type, entries: Any, where: str, problems: list[str]) -> Any:
    """Return one of the dataclasses above, or None with what is wrong added to `problems`."""
    if not isinstance(entries, Mapping):
        problems.append(f"{where} holds {entries!r:.80}; expected 'name: value' lines.")
        return None
    known, before, values = [item.name for item in fields(cls)], len(problems), dict[str, Any]()
    for name in entries:
        if name not in known:
            problems.append(f"{where}: unknown setting {name}{suggestion(str(name), known)}")
    for item, wanted in typed_fields(cls):
        source = f"{where}.{item.name}"
        if item.name in entries:
            wrong = assign(values, item, wanted, entries[item.name], source=source)
            if not wrong and (problem := value_problem(item, wanted, values[item.name], source=source)):
                wrong = [problem]
            problems += wrong
        elif item.default is MISSING:
            problems.append(f"{where} lacks {item.name}.")
    return None if len(problems) > before else cls(**values)


# --- rows


PLAIN_COLUMNS = {"query", "positive", "negatives"}
_TEXT = datasets.Value("string")
_FEATURES = datasets.Features({"query": _TEXT, "positive": _TEXT, "negatives": [_TEXT]})
_PLAIN = DatasetSource(divisor=1, instruction="", query=("query",), positive=("positive",), negatives=("negatives.*",))
_FILES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst")


def find_local(data_dir: Path, keys: Sequence[str], *, skip_missing: bool) -> dict[str, Path]:
    """Return the path of each dataset, in the order of the names, so that a run does not depend on that of the file.

    Missing datasets are left out if `skip_missing`.

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
    """Return the rows of one dataset: query and positive are texts, negatives a list of texts.

    Rows without query or positive are left out, and so are a row's negatives that are empty or stand there twice.

    Raises:
        DataError: A file cannot be read, or lacks the columns.
    """
    check_data(path)
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    # A tuple: of a list, `datasets` would give each call of the generator a part, and call it for every file.
    stamps = tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    return _normalised(key, source, str(path), limit, stamps)


def fetch_pairs(key: str, source: DatasetSource) -> datasets.Dataset:
    """Return the rows of one dataset from the Hub; `source.hub` may be a folder."""
    return _normalised(key, source, None, None, ())


def _normalised(key: str, source: DatasetSource, path: str | None, limit: int | None, stamps: Any) -> datasets.Dataset:
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
    """Yield normalised rows; `stamps` is for the cache alone."""
    place = path or source.hub
    assert place is not None, f"{key} has neither a local path nor a hub name"
    kept = left_out = 0
    joined = source.retrieval and not Path(place).is_file()
    # Configs can be named for the Hub, or for a copy of its repository.
    is_repository = not Path(place).exists() or (Path(place).is_dir() and not was_saved(Path(place)))
    configs = source.configs if is_repository and source.configs else (None,)
    opened = itertools.chain.from_iterable(stream_rows(place, config, source.split) for config in configs)
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


def _join_retrieval(place: str, split: str) -> Iterator[dict[str, Any]]:
    """Yield pairs of a query and a relevant document; titles are dropped, as in the released code.

    The judgements are read first, so that of the corpus (millions of texts) only what they name is kept in memory.
    """
    judged = [
        (str(row["query-id"]), str(row["corpus-id"]))
        for row in stream_rows(place, "default", split)
        if row["score"] > 0
    ]
    wanted = {document for _, document in judged}
    queries = {str(row["_id"]): row["text"] for row in stream_rows(place, "queries", "queries")}
    corpus = {
        str(row["_id"]): row["text"] for row in stream_rows(place, "corpus", "corpus") if str(row["_id"]) in wanted
    }
    for query, document in judged:
        yield {"query": queries.get(query), "positive": corpus.get(document)}


def _normalise(row: dict[str, Any], source: DatasetSource, where: str) -> dict[str, Any] | None:
    """Return the three columns, or None if there is no pair."""
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
