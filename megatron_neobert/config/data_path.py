"""Parsing of `--data-path`: corpora, their weights, and the limits that select a part of their documents.

This module reads text only and opens no file. Weights are fractions, so that proportions such as 0.2 are exact.

The limit `:where=EXPRESSION` selects documents by their attributes:

    score>=3 and language=='en'
    input=='dump-7*' or (source in ['books', 'law'] and not is_spam)

An expression compares attribute names with literals or with each other, and combines comparisons by `in [...]`, `and`,
`or`, `not` and parentheses. A text with `*` after `==` or in a list is a pattern. Python's parser reads the expression,
nothing executes it, and every other kind of syntax node is refused.
"""

import ast
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction

from megatron_neobert.errors import ConfigError

_FORM = (
    "name one corpus, or give each a weight before it, such as 0.2 PREFIX_A 0.8 PREFIX_B:min=1024:max=4096; quote a "
    "path that has a space"
)
_MOST_COMPONENTS = 1024  # each is opened by every process
_LONGEST_LIMIT = 18  # digits
# A limit has no slash, so that a folder can be named x:y=z. The path of a drop list can have slashes, but no colon.
_LIMIT = re.compile(r"(.*):(?:(drop)=([^:]+)|([A-Za-z_]+)=([^/:]*))", re.DOTALL)
# An expression can have colons in quoted texts.
_WHERE = re.compile(r""":where=((?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^:])*)""", re.DOTALL)
_LONGEST_EXPRESSION = 4096  # characters
_DEEPEST = 50  # nested nodes
_LARGEST_NUMBER = 2**63 - 1
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_GRAMMAR = (
    "expressions have attribute names, numbers, quoted texts, True, False, == != < <= > >=, in [...], and, or, not and "
    "parentheses, such as score>=3 and language=='en'"
)


@dataclass(frozen=True)
class Component:
    """A corpus of a blend, or the subset of its documents that the limits select."""

    prefix: str
    weight: Fraction = Fraction(1)  # divided by the sum of all weights: share of the documents
    minimum: int = 1  # tokens of a document, without [CLS] and [SEP]
    maximum: int | None = None
    where: str | None = None  # expression over attributes
    drop: tuple[str, ...] = ()  # paths of drop lists

    @property
    def is_filtered(self) -> bool:
        return bool(self.conditions or self.drop)

    @property
    def conditions(self) -> list[str]:
        """Expressions over attributes that every selected document fulfils. Drop lists are not included."""
        conditions = [f"length>={self.minimum}"] if self.minimum > 1 else []
        conditions += [f"length<={self.maximum}"] if self.maximum is not None else []
        return conditions if self.where is None else [*conditions, self.where]

    def __str__(self) -> str:
        """Format the component as an entry for `parse_data_path`, without its weight."""
        limits = f":min={self.minimum}" if self.minimum > 1 else ""
        limits += f":max={self.maximum}" if self.maximum is not None else ""
        limits += f":where={self.where}" if self.where is not None else ""
        return self.prefix + limits + "".join(f":drop={path}" for path in self.drop)


def parse_data_path(entries: Sequence[str], *, flag: str = "--data-path") -> tuple[Component, ...]:
    """Return the components of a blend in order. Weights are not normalized, and no file is opened.

    Args:
        entries: A single prefix, or weight, prefix, weight, prefix, and so on. Limits such as `:min=512` can follow a
            prefix.
        flag: Flag to name in error messages.

    Raises:
        ConfigError: A weight is missing, a corpus is named twice, and so on. The message lists all problems.
    """
    if not entries:
        raise ConfigError(f"{flag} is missing: name the corpus prefix that neobert preprocess printed.")
    pairs = [("1", entries[0])] if len(entries) == 1 else list(zip(entries[::2], entries[1::2], strict=False))
    problems = []
    if len(pairs) > _MOST_COMPONENTS:
        raise ConfigError(
            f"{flag} names {len(pairs):,} corpora, more than {_MOST_COMPONENTS:,}; preprocess corpora of equal weight "
            "into one."
        )
    if len(entries) > 1 and len(entries) % 2:
        problems.append(
            f"{flag} has {len(entries)} entries, {_shorten(' '.join(entries))}; several corpora need a weight each; "
            f"{_FORM}."
        )
    components = []
    for text, path in pairs:
        weight = Fraction(0)
        with suppress(ValueError):
            # The float first, because Fraction("1e999999999") would not fit into memory.
            if 0 < float(text) < math.inf:
                weight = Fraction(text)
        if not weight:
            problems.append(
                f"{flag}: {_shorten(repr(text))}, the weight of {_shorten(path)}, is not a finite number above 0; "
                f"{_FORM}."
            )
        components.append(_read_component(path, weight, problems, flag))
    counts = Counter(str(component) for component in components)
    problems += [  # probably a mistake, because one entry with the sum of the weights is the same
        f"{flag} names {_shorten(text)} {count} times; name it once, with the sum of the weights."
        for text, count in counts.items()
        if count > 1
    ]
    if problems:
        raise ConfigError(problems)
    return tuple(components)


def whole_weights(components: Sequence[Component]) -> tuple[int, ...]:
    """Scale the weights to the smallest whole numbers with the same proportions: 0.2 and 0.8 become (1, 4)."""
    denominator = math.lcm(*(component.weight.denominator for component in components))
    numbers = [int(component.weight * denominator) for component in components]
    divisor = math.gcd(*numbers)
    return tuple(number // divisor for number in numbers)


def curve_names(entries: Sequence[str]) -> list[str]:
    """Return a distinct name for each `--valid-data-path` entry: the end of the path, in letters, digits and `_`."""
    names = [re.sub(r":drop=[^:]*", "", _WHERE.sub("", entry)).rsplit("/", 1)[-1] for entry in entries]
    names = [re.sub(r"[^A-Za-z0-9]+", "_", name)[-40:] for name in names]
    if len(set(names)) == len(names):
        return names
    return [f"{name}_{number}" for number, name in enumerate(names, start=1)]


def _shorten(text: str) -> str:
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 200 else f"{text[:200]} ..."


def _read_component(text: str, weight: Fraction, problems: list[str], flag: str) -> Component:
    prefix, limits, where, drop = text, dict[str, int](), None, tuple[str, ...]()
    if (match := _WHERE.search(text)) is not None:
        where, prefix = match[1], text[: match.start()] + text[match.end() :]
        try:
            parse_expression(where)
        except ConfigError as error:
            problems.append(f"{flag} {_shorten(text)}: {error.problems[0]}")
    while match := _LIMIT.fullmatch(prefix):
        prefix, drop_key, drop_path, name, number = match.groups()
        if drop_key:
            drop = (drop_path, *drop)
            continue
        is_number = number.isascii() and number.isdigit() and len(number) <= _LONGEST_LIMIT
        if name not in ("min", "max") or name in limits or not is_number:
            problems.append(
                f"{flag} {_shorten(text)}: ':{_shorten(name)}={_shorten(number)}' is not a limit; :min=N, :max=N and "
                ":where=EXPRESSION may follow a prefix once and :drop=FILE several times, N in tokens, no ':' in FILE."
            )
        limits[name] = int(number) if is_number else 1
    if ":drop=" in prefix:
        problems.append(f"{flag} {_shorten(text)}: the path after :drop= must not contain ':'; rename the file.")
    if not prefix:
        problems.append(f"{flag} {_shorten(repr(text))} names no corpus; {_FORM}.")
    minimum, maximum = limits.get("min", 1), limits.get("max")
    if minimum < 1 or (maximum is not None and maximum < minimum):
        problems.append(
            f"{flag} {_shorten(text)}: min={minimum} and max={'none' if maximum is None else maximum} select no "
            "document; min must be at least 1 and not above max. Change one of them."
        )
    return Component(prefix, weight, minimum, maximum, where, drop)


# ---- expressions


def parse_expression(text: str) -> ast.expr:
    """Parse an expression over document attributes, such as `score>=3`, and return the syntax tree.

    Raise ConfigError if the text is too long, is not a Python expression, or contains a node that is not allowed.
    """
    if len(text) > _LONGEST_EXPRESSION:
        raise ConfigError(
            f"an expression of {len(text):,} characters is longer than {_LONGEST_EXPRESSION:,}; shorten it."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as unknown escapes in quoted texts
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else type(error).__name__
        raise ConfigError(f"{text!r:.200} is not an expression ({reason}); {_GRAMMAR}.") from error
    if (refused := next(_refused_nodes(tree, _DEEPEST), None)) is not None:
        source = ast.get_source_segment(text.strip(), refused)
        raise ConfigError(f"{text!r:.200}: {source!r:.80} is refused; {_GRAMMAR}.")
    return tree


def names_in(tree: ast.expr) -> set[str]:
    """Return the attribute names in an expression."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _refused_nodes(node: ast.expr, depth: int) -> Iterator[ast.expr]:
    """Yield each node of a condition that the grammar does not allow, or that is nested `depth` levels deep."""
    match node:
        case _ if depth == 0:
            yield node
        case ast.BoolOp(values=conditions):
            for condition in conditions:
                yield from _refused_nodes(condition, depth - 1)
        case ast.UnaryOp(op=ast.Not(), operand=condition):
            yield from _refused_nodes(condition, depth - 1)
        case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()], comparators=[ast.List(elts=values)]) if values:
            yield from (operand for operand in (left, *values) if not _is_operand(operand))
            if not isinstance(left, ast.Name):
                yield node
        case ast.Compare(left=left, ops=operators, comparators=right) if all(
            isinstance(operator, _COMPARISONS) for operator in operators
        ):
            yield from (operand for operand in (left, *right) if not _is_operand(operand))
            if not any(isinstance(operand, ast.Name) for operand in (left, *right)):
                yield node
        case ast.Name():
            return
        case _:
            yield node


def _is_operand(node: ast.expr) -> bool:
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
            return _is_operand(node.operand)
        case ast.Constant(value=str(text)):
            # An attribute never contains a surrogate.
            return not any("\ud800" <= character <= "\udfff" for character in text)
        case ast.Constant(value=bool() | float()) | ast.Name():
            return True
        case ast.Constant(value=int(number)):
            return number <= _LARGEST_NUMBER
        case _:
            return False
