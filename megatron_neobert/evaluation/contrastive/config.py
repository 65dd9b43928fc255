"""The YAML file of contrastive fine-tuning: one section of settings and a table of datasets.

Everything about a dataset is data: where it comes from, which columns hold the texts, its share of the batch and its
instruction. pydantic checks types and bounds; unknown keys are refused with a suggestion, and everything that is wrong
with the file is reported at once.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError
from pydantic.dataclasses import dataclass

from megatron_neobert.errors import ConfigError, MissingInputError, suggestion, yaml_reason

_RULES = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_NAME = re.compile(r"[A-Za-z0-9_-]+")  # of a file, and of a prompt in the final folder


def _to_tuple(value: Any) -> Any:
    """One name may stand without brackets."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_to_tuple)]


@dataclass(frozen=True, kw_only=True, config=_RULES)
class TrainingSettings:
    """The section `training`. examples/configs/evaluation/contrastive.yaml names the sources of the values."""

    steps: PositiveInt = 2000
    batch_size: PositiveInt = 128  # pairs per process and step, before a dataset's divisor
    alpha: float = Field(default=0.5, ge=0)
    temperature: PositiveFloat = 0.07
    learning_rate: PositiveFloat = 1e-4
    warmup_ratio: float = Field(default=0.1, ge=0, lt=1)  # of the steps
    weight_decay: float = Field(default=0.01, ge=0)
    clip_grad: PositiveFloat = 1.0
    max_length: PositiveInt = 1024  # tokens
    instructions: Literal["query", "both", "none"] = "query"
    separator: str = " "
    log_interval: PositiveInt = 10  # steps
    save_interval: PositiveInt = 250  # steps


@dataclass(frozen=True, kw_only=True, config=_RULES)
class DatasetSource:
    """One dataset. A column is a path: `a`, `a.0` (first of a list), `a.b` (entry), `a.*` (all of a list)."""

    divisor: PositiveInt
    instruction: str
    hub: str | None = None
    configs: Names = ()
    split: str = "train"
    query: Names = ()  # the first that a row has
    positive: Names = ()
    negatives: Names = ()  # all of them
    score: str | None = None
    above: float = 0.0
    retrieval: bool = False
    default: bool = True

    def batch_size(self, target: int) -> int:
        """Pairs per step. With one pair there would be no negative in the batch."""
        return max(2, target // self.divisor)


@dataclasses.dataclass(frozen=True)
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
        raise ConfigError(
            f"{path}: not readable as YAML: {yaml_reason(error)}; compare it with the recipe evaluation/contrastive."
        ) from None
    if not isinstance(content, dict) or set(content) != {"training", "datasets"}:
        raise ConfigError(f"{path}: expected the sections training and datasets, and nothing else.")
    entries = content["datasets"]
    if not isinstance(entries, dict) or not entries:
        raise ConfigError(f"{path}: datasets names no dataset; see the recipe evaluation/contrastive.")
    problems: list[str] = []
    training = build(TrainingSettings, content["training"] or {}, f"{path}: training.", problems)
    datasets = {}
    for key, entry in entries.items():
        if not isinstance(key, str) or not _NAME.fullmatch(key):
            problems.append(f"{path}: the dataset's name {key!r} is not made of letters, digits, '-' and '_'.")
            continue
        where = f"{path}: datasets.{key}"
        source = datasets[key] = build(DatasetSource, entry, f"{where}.", problems)
        if source is None:
            continue
        named = source.query or source.positive or source.negatives or source.configs or source.score
        if source.retrieval and named:
            problems.append(f"{where}: retrieval: true has fixed columns; name no columns, configs or score.")
        elif source.hub is not None and not source.retrieval and not (source.query and source.positive):
            problems.append(f"{where}: hub {source.hub} without query and positive; name the columns.")
    if problems:
        raise ConfigError(problems)
    return ContrastiveConfig(training, datasets)


def build(cls: type, entries: Any, where: str, problems: list[str]) -> Any:
    """One of the dataclasses above, or None with what is wrong added to `problems`.

    Args:
        where: What stands before a name in a message.
    """
    if not isinstance(entries, Mapping):
        problems.append(f"{where[:-1]} holds {entries!r:.80}; expected 'name: value' lines.")
        return None
    try:
        return cls(**{str(name): value for name, value in entries.items()})
    except ValidationError as error:
        for found in error.errors():
            name, kind = str(found["loc"][0]), found["type"]
            if kind == "unexpected_keyword_argument":
                known = [field.name for field in dataclasses.fields(cls)]
                problems.append(f"{where[:-1]}: unknown setting {name}{suggestion(name, known)}")
            elif kind in ("missing", "missing_argument", "missing_keyword_only_argument"):
                problems.append(f"{where[:-1]} lacks {name}.")
            else:
                # YAML 1.1 takes 1e-4 for a text.
                hint = " (with its point: 1.0e-4)" if kind == "float_type" and isinstance(found["input"], str) else ""
                problems.append(f"{where}{name} {found['input']!r:.80}: {found['msg']}{hint}.")
        return None
