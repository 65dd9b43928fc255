"""Expressions of `--data-path PREFIX:where=EXPRESSION`, which select documents by their attributes.

    score>=3 and language=='en'
    input=='dump-7*' or (source in ['books', 'law'] and not is_spam)

An expression compares attribute names with literals or with each other, and combines comparisons by `in [...]`, `and`,
`or`, `not` and parentheses. A text with `*` after `==` or in a list is a pattern. Python's parser reads the expression,
nothing executes it, and every other kind of syntax node is refused.
"""

import ast
import warnings
from collections.abc import Iterator

from megatron_neobert.errors import ConfigError

_LONGEST = 4096  # characters
_DEEPEST = 50  # nested nodes
_LARGEST_NUMBER = 2**63 - 1
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_GRAMMAR = (
    "expressions have attribute names, numbers, quoted texts, True, False, == != < <= > >=, in [...], and, or, not and "
    "parentheses, such as score>=3 and language=='en'"
)


def parse_expression(text: str) -> ast.expr:
    """Parse an expression over document attributes, such as `score>=3`, and return the syntax tree.

    Raise ConfigError if the text is too long, is not a Python expression, or contains a node that is not allowed.
    """
    if len(text) > _LONGEST:
        raise ConfigError(f"an expression of {len(text):,} characters is longer than {_LONGEST:,}; shorten it.")
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
