"""What contrastive fine-tuning is told by its YAML file: one section of settings and a table of datasets.

Everything about a dataset is data: where it comes from, which columns hold the texts, its share of the batch and its
instruction. Unknown keys are refused with a suggestion, and everything that is wrong with the file is reported at once.
"""

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from megatron_neobert.errors import ConfigError, MissingInputError

Instructions = Literal["query", "both", "none"]


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The section `training`. examples/contrastive.yaml names the sources of the values."""

    steps: int = 2000
    batch_size: int = 128  # pairs per process and step, before a dataset's divisor
    alpha: float = 0.5
    temperature: float = 0.07
    learning_rate: float = 1e-4
    warmup_ratio: float = 0.1
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    max_length: int = 1024  # tokens
    instructions: Instructions = "query"
    separator: str = " "
    log_interval: int = 10  # steps
    save_interval: int = 250  # steps

    def problems(self) -> list[str]:
        """What no run can do, as sentences."""
        at_least_one = ("steps", "batch_size", "max_length", "log_interval", "save_interval")
        found = [
            f"{name} {getattr(self, name)} is not a number of at least 1."
            for name in at_least_one
            if getattr(self, name) < 1
        ]
        positive = ("temperature", "learning_rate", "clip_grad")
        found += [
            f"{name} {getattr(self, name)} is not greater than 0." for name in positive if not getattr(self, name) > 0
        ]
        found += [
            f"{name} {getattr(self, name)} is below 0." for name in ("alpha", "weight_decay") if getattr(self, name) < 0
        ]
        if not 0 <= self.warmup_ratio < 1:
            found.append(f"warmup_ratio {self.warmup_ratio} is not a share of the steps; use 0 to below 1.")
        return found


@dataclass(frozen=True, kw_only=True)
class DatasetSource:
    """One dataset. A column is a path: `a`, `a.0` (first of a list), `a.b` (entry), `a.*` (all of a list)."""

    divisor: int
    instruction: str
    hub: str | None = None
    configs: tuple[str, ...] = ()
    split: str = "train"
    query: tuple[str, ...] = ()  # the first that a row has
    positive: tuple[str, ...] = ()
    negatives: tuple[str, ...] = ()  # all of them
    score: str | None = None
    above: float = 0.0
    retrieval: bool = False
    default: bool = True

    def batch_size(self, target: int) -> int:
        """Pairs per step. With one pair there would be no negative in the batch."""
        return max(2, target // self.divisor)


@dataclass(frozen=True)
class ContrastiveConfig:
    """The whole file; datasets in its order."""

    training: TrainingSettings
    datasets: dict[str, DatasetSource]


def read_config(path: Path) -> ContrastiveConfig:
    """Reads and checks a file.

    Raises:
        MissingInputError: There is no such file.
        ConfigError: It is not YAML, or holds something that is unknown or impossible.
    """
    if not path.is_file():
        raise MissingInputError(f"--config {path}: no such file (looked from {Path.cwd()}).")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{path}: not readable as YAML: {reason}; compare it with examples/contrastive.yaml."
        ) from None
    if not isinstance(content, dict) or set(content) != {"training", "datasets"}:
        raise ConfigError(f"{path}: expected the sections training and datasets, and nothing else.")
    problems: list[str] = []
    training = _build(TrainingSettings, content["training"] or {}, f"{path}: training", problems)
    datasets = {}
    entries = content["datasets"]
    if not isinstance(entries, dict) or not entries:
        problems.append(f"{path}: datasets names no dataset; see examples/contrastive.yaml.")
        entries = {}
    for key, entry in entries.items():
        if not isinstance(key, str) or not key.replace("_", "").replace("-", "").isalnum():
            problems.append(f"{path}: the dataset's name {key!r} is not made of letters, digits, '-' and '_'.")
            continue
        source = _build(DatasetSource, entry, f"{path}: datasets.{key}", problems)
        if source is not None:
            datasets[key] = source
            problems += [f"{path}: datasets.{key}: {problem}" for problem in _problems_of(source)]
    if training is not None:
        problems += [f"{path}: training: {problem}" for problem in training.problems()]
    if problems:
        raise ConfigError(problems)
    assert training is not None
    return ContrastiveConfig(training, datasets)


def _problems_of(source: DatasetSource) -> list[str]:
    found = []
    if source.divisor < 1:
        found.append(f"divisor {source.divisor} is not a number of at least 1.")
    if source.hub is not None and not source.retrieval and not (source.query and source.positive):
        found.append(f"hub {source.hub} without query and positive; name the columns.")
    if source.retrieval and (source.query or source.positive or source.negatives or source.configs or source.score):
        found.append("retrieval: true has fixed columns; remove query, positive, negatives, configs and score.")
    return found


def _build(cls: type, entry: Any, where: str, problems: list[str]) -> Any:
    """A dataclass from a mapping, or None after telling `problems`."""
    if not isinstance(entry, Mapping):
        problems.append(f"{where} holds {entry!r}; expected 'name: value' lines.")
        return None
    before = len(problems)
    hints, values = get_type_hints(cls), {}
    for name, value in entry.items():
        if name not in hints:
            close = difflib.get_close_matches(str(name), list(hints), n=1)
            problems.append(f"{where}: unknown setting {name}" + (f"; did you mean {close[0]!r}?" if close else "."))
            continue
        converted = _convert(value, hints[name])
        if converted is MISSING:
            problems.append(f"{where}.{name}: {value!r} is not {_describe(hints[name])}.")
        values[name] = converted
    for field in fields(cls):
        if field.default is MISSING and field.name not in entry:
            problems.append(f"{where} lacks {field.name}.")
    return cls(**values) if len(problems) == before else None


def _convert(value: Any, hint: Any) -> Any:
    """The value as the field wants it, or MISSING."""
    if get_origin(hint) is Literal:
        return value if value in get_args(hint) else MISSING
    if hint == tuple[str, ...]:  # one name may stand without brackets
        names = [value] if isinstance(value, str) else value
        return tuple(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else MISSING
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint == str | None:
        return value if value is None or isinstance(value, str) else MISSING
    return value if type(value) is hint else MISSING


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint))
    names = {int: "a whole number", float: "a number (write 1.0e-4 with its point)", bool: "true or false"}
    return names.get(hint, "a text or a list of texts" if hint == tuple[str, ...] else "a text")
