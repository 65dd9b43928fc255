"""Every error message that a user can meet is in docs/errors.md, listed by class, and has a value and a remedy."""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_neobert import errors

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/errors.md"
START = "<!-- written by tests/repo/test_messages.py -->\n"
CLASSES = {
    name: item
    for name, item in vars(errors).items()
    if isinstance(item, type) and issubclass(item, errors.NeoBERTError) and item is not errors.NeoBERTError
}
LONGEST = 300  # characters; a value counts as its name
VALUE = re.compile(r"\*|(^|\s)--?[a-z]")  # a formatted value, or a flag with the value it was given
# What tells the user how to continue: a verb in the imperative, the rule that the value must follow, or a formatted
# remedy at the end.
VERBS = (
    "add average call check choose compare continue convert correct create decompress delete drop evaluate export "
    "fetch free give install keep leave load lower make measure mount move name number omit pass pick preprocess "
    "put raise remove rename repeat replace restart run see set shorten split start stop train try upgrade use wait "
    "write"
).replace(" ", "|")
REMEDY = re.compile(
    rf"((^|[.:;,)*?] )|\b(or|and|then|to|it|files?|node) )({VERBS})\b"
    r"|\b(must|expected|needs?|only|at most|at least)\b|\*\.?$",
    re.IGNORECASE,
)


class Message(NamedTuple):
    """One message of the code."""

    error: str  # name of the class
    path: str
    text: str  # with the name of each formatted value in asterisks


def find_messages() -> Iterator[Message]:
    """Yield the text of every error that is built in the product code, and of every problem with the settings."""
    for folder in ("megatron_neobert", "checkpoint_conversion", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for error, node in [*errors_built(tree), *problems_yielded(tree)]:
                yield Message(error, str(path.relative_to(ROOT)), text_of(node))


def errors_built(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") in CLASSES
            and node.args
            and is_text(node.args[0])
        ):
            yield node.func.id, node.args[0]


def problems_yielded(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name.endswith("_problems"):
            for node in ast.walk(function):
                if isinstance(node, ast.Yield) and node.value and is_text(node.value):
                    yield "ConfigError", node.value


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def text_of(node: ast.expr) -> str:
    """Return the text of a string, with *name* in place of each formatted value."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    names = (item.attr if isinstance(item, ast.Attribute) else item.id for item in ast.walk(node)
             if isinstance(item, ast.Attribute | ast.Name))  # fmt: skip
    return f"*{next(names, 'value').strip('_').replace('_', ' ')}*"


MESSAGES = sorted(set(find_messages()))


def render() -> str:
    """Return a section for each class by exit code, with the messages of each module."""
    sections = []
    for name, error in sorted(CLASSES.items(), key=lambda item: (item[1].exit_code, item[0])):
        lines = [f"\n## {name}\n", f"Exit code {error.exit_code}. {error.__doc__}\n"]
        module = None
        for message in (message for message in MESSAGES if message.error == name):
            if message.path != module:
                module = message.path
                lines.append(f"\n`{module}`\n")
            lines.append("- " + re.sub(r"([\[\]<>_|`])", r"\\\1", " ".join(message.text.split())))
        sections.append("\n".join(lines) + "\n")
    return "".join(sections)


def test_page_lists_every_message_by_class():
    """WRITE_DOCUMENTATION=1 writes the page."""
    text, start, written = PAGE.read_text(encoding="utf-8").partition(START)
    if os.environ.get("WRITE_DOCUMENTATION"):
        PAGE.write_text(text + start + render(), encoding="utf-8")
    else:
        assert written == render(), "run WRITE_DOCUMENTATION=1 python -m pytest tests/repo/test_messages.py"


def problems_of(text: str) -> list[str]:
    return [
        *([f"more than {LONGEST} characters"] if len(text) > LONGEST else []),
        *([] if VALUE.search(text) else ["no value"]),
        *([] if REMEDY.search(text) else ["no remedy"]),
    ]


def test_messages_are_short_and_have_a_value_and_a_remedy():
    assert len(MESSAGES) > 300
    assert [
        (message.path, message.text, problems) for message in MESSAGES if (problems := problems_of(message.text))
    ] == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("the file is damaged; fetch it again", "no value"),
        ("*path*: not a number.", "no remedy"),
        ("*path* is too long; " + "use less of it " * 20, f"more than {LONGEST} characters"),
    ],
)
def test_other_messages_are_refused(text, problem):
    assert problems_of(text) == [problem]
