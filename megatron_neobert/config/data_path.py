"""Parsing of `--data-path`: corpora, their shares of the documents, and the choice of their documents.

Text alone: nothing is opened, and the standard library suffices. Shares are fractions, so that 0.2 is a fifth and
proportions can be kept exactly.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron_neobert.config.expressions import parse_expression
from megatron_neobert.errors import ConfigError

_FORM = (
    "name one corpus, or give each a weight before it, such as 0.2 PREFIX_A 0.8 PREFIX_B:min=1024:max=4096; quote a "
    "path that has a space"
)
_MOST_COMPONENTS = 1024  # each is opened by every process
_LONGEST_LIMIT = 18  # digits
# A number has no slash, so that a folder may be called x:y=z; the path of a drop list may have slashes, and no colon.
_LIMIT = re.compile(r"(.*):(?:(drop)=([^:]+)|([A-Za-z_]+)=([^/:]*))", re.DOTALL)
# An expression may have a colon in a quoted text.
_WHERE = re.compile(r""":where=((?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^:])*)""", re.DOTALL)


@dataclass(frozen=True)
class Component:
    """A corpus, or the documents of it that have minimum to maximum tokens ([CLS] and [SEP] not counted), match an
    expression over their attributes and are not in a drop list."""

    prefix: str
    weight: Fraction = Fraction(1)  # of any sum: a share of the documents once divided by the sum of all
    minimum: int = 1
    maximum: int | None = None
    where: str | None = None  # see expressions.py
    drop: str | None = None  # path of a drop list

    @property
    def is_remote(self) -> bool:
        return "://" in self.prefix

    @property
    def is_filtered(self) -> bool:
        return bool(self.conditions or self.drop)

    @property
    def conditions(self) -> list[str]:
        """Expressions over attributes that all hold for each document of this component."""
        conditions = [f"length>={self.minimum}"] if self.minimum > 1 else []
        conditions += [f"length<={self.maximum}"] if self.maximum is not None else []
        return conditions if self.where is None else [*conditions, self.where]

    def __str__(self) -> str:
        limits = f":min={self.minimum}" if self.minimum > 1 else ""
        limits += f":max={self.maximum}" if self.maximum is not None else ""
        limits += f":where={self.where}" if self.where is not None else ""
        return self.prefix + limits + (f":drop={self.drop}" if self.drop is not None else "")


def parse_data_path(entries: Sequence[str], *, flag: str = "--data-path") -> tuple[Component, ...]:
    """Return the components of a blend in their order, or raise ConfigError with every problem."""
    if not entries:
        raise ConfigError(f"{flag} is missing: name the corpus prefix that neobert preprocess printed.")
    pairs = [("1", entries[0])] if len(entries) == 1 else list(zip(entries[::2], entries[1::2], strict=False))
    problems = []
    if len(pairs) > _MOST_COMPONENTS:
        raise ConfigError(
            f"{flag} names {len(pairs):,} corpora, more than {_MOST_COMPONENTS:,}; preprocess those of one weight "
            "into one corpus."
        )
    if len(entries) > 1 and len(entries) % 2:
        problems.append(
            f"{flag} has {len(entries)} entries, {_shorten(' '.join(entries))}; several corpora need a weight each; "
            f"{_FORM}."
        )
    weights = [_read_weight(text, path, problems, flag) for text, path in pairs]
    components = [
        _read_component(path, weight, problems, flag) for (_, path), weight in zip(pairs, weights, strict=True)
    ]
    counts = Counter(str(component) for component in components)
    problems += [  # the same documents under two weights are a slip of the hand: one weight does the same
        f"{flag} names {_shorten(text)} {count} times; name it once, with the sum of the weights."
        for text, count in counts.items()
        if count > 1
    ]
    if problems:
        raise ConfigError(problems)
    return tuple(components)


def whole_weights(components: Sequence[Component]) -> tuple[int, ...]:
    """The weights as the smallest whole numbers of the same proportions."""
    common = math.lcm(*(component.weight.denominator for component in components))
    numbers = [int(component.weight * common) for component in components]
    divisor = math.gcd(*numbers)
    return tuple(number // divisor for number in numbers)


def curve_names(entries: Sequence[str]) -> list[str]:
    """A word for each corpus of `--valid-data-path`: the end of its path, and its place where two end alike."""
    words = [re.sub(r":drop=[^:]*", "", _WHERE.sub("", entry)).rsplit("/", 1)[-1] for entry in entries]
    words = [re.sub(r"[^A-Za-z0-9]+", "_", word)[-40:] for word in words]
    if len(set(words)) == len(words):
        return words
    return [f"{word}_{place}" for place, word in enumerate(words, start=1)]


def _shorten(text: str) -> str:
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 200 else f"{text[:200]} ..."


def _read_weight(text: str, path: str, problems: list[str], flag: str) -> Fraction:
    try:
        value = float(text)  # first: the fraction of 1e999999999 would not fit into memory
        weight = Fraction(text) if 0 < value < math.inf else None
    except ValueError:
        shown = _shorten(repr(text))
        problems.append(f"{flag}: {shown}, where the weight of {_shorten(path)} should stand, is no number; {_FORM}.")
        return Fraction(1)
    if weight is None:
        problems.append(
            f"{flag}: the weight {_shorten(text)} of {_shorten(path)} is not above 0 and finite; change it, or leave "
            "both out."
        )
        return Fraction(1)
    return weight


def _read_component(text: str, weight: Fraction, problems: list[str], flag: str) -> Component:
    prefix, limits, where, drop = text, dict[str, int](), None, None
    if (found := _WHERE.search(text)) is not None:
        where, prefix = found[1], text[: found.start()] + text[found.end() :]
        try:
            parse_expression(where)
        except ConfigError as error:
            problems.append(f"{flag} {_shorten(text)}: {error.problems[0]}")
    while found := _LIMIT.fullmatch(prefix):
        prefix, kind, path, name, number = found.groups()
        if kind and drop is None:
            drop = path
            continue
        name, number = name or kind, number or path or ""
        is_number = number.isascii() and number.isdigit() and len(number) <= _LONGEST_LIMIT
        if name not in ("min", "max") or name in limits or not is_number:
            problems.append(
                f"{flag} {_shorten(text)}: ':{_shorten(name)}={_shorten(number)}' is not a limit; each of :min=N, "
                ":max=N, :where=EXPRESSION and :drop=FILE may follow a prefix once, N in tokens, no ':' in FILE."
            )
        limits[name] = int(number) if is_number else 1
    if ":drop=" in prefix:
        problems.append(f"{flag} {_shorten(text)}: what follows :drop= must have no ':'; rename the file.")
    if not prefix:
        problems.append(f"{flag} {_shorten(repr(text))} names no corpus; {_FORM}.")
    minimum, maximum = limits.get("min", 1), limits.get("max")
    if minimum < 1 or (maximum is not None and maximum < minimum):
        problems.append(
            f"{flag} {_shorten(text)}: no document has at least {minimum} and at most "
            f"{'any number of' if maximum is None else maximum} tokens; lengths are counted from 1, and the largest "
            "must not be below the smallest. Change min or max."
        )
    return Component(prefix, weight, minimum, maximum, where, drop)
