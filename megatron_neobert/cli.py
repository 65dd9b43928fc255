"""Command lines out of dataclasses: a field is a flag, a help line, a value to complete and a key of a YAML file.

Every command of `neobert` is a frozen dataclass of options and a function that takes it. All problems of a command line
are reported together. Standard library only, so that `--help` answers at once and where no package is installed.
"""

from __future__ import annotations  # `neobert check environment` runs on older Pythons too

import argparse
import inspect
import os
import re
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

from megatron_neobert.errors import LONGEST_REASON, ConfigError, suggestion

_LARGEST_NUMBER = 2**63 - 1  # whole numbers go into tensors and indexes


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    choices: Sequence[str] = (),
    minimum: float | None = None,
    **metadata: Any,
) -> Any:
    """Return a dataclass field that is a flag; a field without default is required.

    Args:
        choices: Legal values of a text. A field of type Literal has its choices in the type.
        minimum: Smallest legal number.
        metadata: `flag`, the name if it is not the field's; `metavar`; `positional=True`; `repeat=True` for a list
            whose flag is given once for each entry; `completed`, values that a shell suggests; `is_path=True` for
            paths, which published reports leave out; `group`, the heading in the help of this field and of those after
            it; `read(text)`, which returns the value or raises ValueError.
    """
    return field(default=default, metadata={**metadata, "help": help, "choices": tuple(choices), "minimum": minimum})


def flag_of(name: str) -> str:
    """Return `--global-batch-size` for `global_batch_size`."""
    return "--" + name.replace("_", "-")


def run_function(
    function: Callable[..., int | None], words: Sequence[str], *, prog: str, run_flags: Callable[[], list[str]]
) -> int | None:
    """Call a command's function with the options that the words of its command line ask for; return its exit code.

    The annotation of the parameter `options` is the dataclass. The first paragraph of the docstring is the description
    in --help. A function that also has a parameter `flags` gets the words of the flags of `neobert train`, `run_flags`.
    """
    options = typing.get_type_hints(function)["options"]
    description = (function.__doc__ or "").partition("\n\n")[0]
    more: dict[str, Any] = {}
    if "flags" in inspect.signature(function).parameters:
        parser = build_parser(options, prog=prog, description=description, also=run_flags())
        parsed, more["flags"] = parser.parse_known_args(words)
        given, problems = vars(parsed), parser.unknown_flags()
    else:
        given, problems = build_parser(options, prog=prog, description=description).parse_all(words)
    values, wrong = read_values(options, given)
    if problems + wrong:
        raise ConfigError(problems + wrong)
    return function(values, **more)


def read_values(options: type, given: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Return the options with the given texts as values, and no problem; or None and every problem.

    Nested dataclasses take their fields from the same mapping.
    """
    values: dict[str, Any] = {}
    problems = []
    for item, wanted in typed_fields(options):
        if is_dataclass(wanted):
            values[item.name], more = read_values(typing.cast(type, wanted), given)
            problems += more
        elif item.name in given:
            wrong = assign(values, item, wanted, given[item.name], source=_source_of(item), is_file_name=True)
            if not wrong and (problem := value_problem(item, wanted, values[item.name], source=_source_of(item))):
                wrong = [problem]
            problems += wrong
        elif item.default is MISSING:
            problems.append(f"{_source_of(item)} is missing: {item.metadata['help'] or 'it is required'}.")
    return (None if problems else options(**values)), problems


def typed_fields(options: type) -> Iterator[tuple[Field, Any]]:
    """Yield the fields of a dataclass with their types, which may be written as text in the source."""
    hints = typing.get_type_hints(options)
    for item in fields(options):
        yield item, hints[item.name]


# --- values


class _Excerpt(reprlib.Repr):
    """A few words of a value for a message: YAML's aliases can make a page of text exponentially long."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 2, 80, 80

    def repr_int(self, x: int, level: int) -> str:
        """Python itself refuses to write more than 4,300 digits."""
        return repr(x) if abs(x) < 10**40 else f"a number of {x.bit_length()} bits"


excerpt = _Excerpt().repr


def assign(
    values: dict[str, Any], item: Field, wanted: Any, value: Any, *, source: str, is_file_name: bool = False
) -> list[str]:
    """Put one value, converted to its field's type, into `values`; return what is wrong with it, after its `source`."""
    try:
        converted = (
            item.metadata["read"](value)
            if "read" in item.metadata
            else convert(value, wanted, is_file_name=is_file_name)
        )
    except (ValueError, TypeError, OverflowError) as error:
        reason = str(error) if "read" in item.metadata else f"is not {_type_words(wanted, item)}."
        is_words = isinstance(value, list) and all(isinstance(entry, str) for entry in value)
        return [f"{source} {excerpt(' '.join(value) if is_words else value)} {reason}"]
    values[item.name] = converted
    return []


def value_problem(item: Field, wanted: Any, value: Any, *, source: str) -> str:
    """Return what is wrong with a value of the right type, or an empty text."""
    legal, minimum = choices_of(item, wanted), item.metadata.get("minimum")
    for entry in value if isinstance(value, tuple) else (value,):
        if legal and entry is not None and entry not in legal:
            return f"{source} {entry} is not one of {', '.join(legal)}{suggestion(str(entry), legal, otherwise='.')}"
        if isinstance(entry, bool) or not isinstance(entry, (int, float)):
            continue
        if minimum is not None and not entry >= minimum:  # NaN fails too
            return f"{source} {entry} is below {minimum}, its smallest legal value."
        if entry in (float("inf"), float("-inf")):
            return f"{source} {entry} is infinite; give a finite value."
        if isinstance(entry, int) and abs(entry) > _LARGEST_NUMBER:
            return f"{source} {excerpt(entry)} is beyond {_LARGEST_NUMBER}; whole numbers take 64 bits at most."
    return ""


def convert(value: Any, wanted: Any, *, is_file_name: bool = False) -> Any:
    """Return a flag's text or a YAML value as the type of its field; ValueError if it is something else.

    YAML 1.1 reads `1e-4` as text, so a text is parsed by the field's type and not by YAML's guess.

    Args:
        is_file_name: A text may have bytes that are not UTF-8, as names of files may, because it is not written again.
    """
    plain, optional = plain_type(wanted)
    if optional and (value is None or (isinstance(value, str) and value.lower() in ("none", "null"))):
        return None
    if plain is bool and isinstance(value, bool):
        return value
    if typing.get_origin(plain) is tuple:
        entry_type = typing.get_args(plain)[0]
        return tuple(
            convert(entry, entry_type, is_file_name=is_file_name)
            for entry in (value if isinstance(value, list) else [value])
        )
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):  # True is an int to Python alone
        raise ValueError(value)
    if plain in (str, Path) or typing.get_origin(plain) is Literal:
        text = str(value)
        # An empty path would be the current folder; the others are the end of what Linux allows, and of a line.
        encoded = os.fsencode(text) if is_file_name else text.encode()
        if not text.strip() or len(encoded) >= 4096 or set(text) & set("\0\n\r"):
            raise ValueError(value)
        return Path(text) if plain is Path else text
    if not str(value).isascii() or plain not in (int, float):  # int() reads the digits of any script
        raise ValueError(value)
    if plain is float or isinstance(value, int):
        return plain(value)
    if isinstance(value, str) and value.strip().lstrip("+-").replace("_", "").isdigit():
        return int(value)
    if float(value) != int(float(value)):
        raise ValueError(value)
    return int(float(value))


def plain_type(wanted: Any) -> tuple[Any, bool]:
    """Return `int | None` as (int, True)."""
    if typing.get_origin(wanted) in (typing.Union, getattr(types, "UnionType", None)):
        return next(part for part in typing.get_args(wanted) if part is not type(None)), True
    return wanted, False


def choices_of(item: Field, wanted: Any) -> tuple[str, ...]:
    """Return the legal values of a field, or of each entry of a list; empty if any value is."""
    plain, _ = plain_type(wanted)
    if typing.get_origin(plain) is tuple:
        plain = typing.get_args(plain)[0]
    literals = typing.get_args(plain) if typing.get_origin(plain) is Literal else ()
    return item.metadata.get("choices") or literals


def _type_words(wanted: Any, item: Field) -> str:
    plain, optional = plain_type(wanted)
    is_list = typing.get_origin(plain) is tuple
    if legal := choices_of(item, wanted):
        return f"one of {', '.join(legal)}."
    entry = typing.get_args(plain)[0] if is_list else plain
    name = {int: "whole number", float: "number", bool: "true or false"}.get(entry, "text")
    words = name if entry is bool else f"a {name} or a list of {name}s" if is_list else f"a {name}"
    return words + (" in UTF-8" if name == "text" else "") + (" or null" if optional else "")


def _source_of(item: Field) -> str:
    return item.metadata.get("metavar", item.name) if item.metadata.get("positional") else flag_name(item)


def flag_name(item: Field) -> str:
    """Return the flag of a field."""
    return item.metadata.get("flag") or flag_of(item.name)


# --- the parser


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, whose errors are ConfigErrors that name the flag that was probably meant.

    Args:
        also: Flags that another parser reads, out of what parse_known_args leaves.
    """

    _completes: ClassVar[bool] = False

    def __init__(self, description: str = "", *, also: Iterable[str] = (), **more: Any) -> None:
        super().__init__(description=description, allow_abbrev=False, **more)
        self._also, self._words = tuple(also), [""]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse, after answering a shell that asks for completions."""
        if "_ARGCOMPLETE" in os.environ and not Parser._completes:
            import argcomplete

            Parser._completes = True  # argcomplete calls this method too
            argcomplete.autocomplete(self)  # prints the flags and ends the process
        self._words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def parse_all(self, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the given values by name, and a problem for each word that is no flag or value."""
        parsed, rest = self.parse_known_args(words)
        problems = [self._unknown(word.partition("=")[0]) for word in rest if word.startswith("-")]
        problems += [
            f"{excerpt(word)} is not the value of any flag; check the spelling before it, and quote a value that has a "
            "space."
            for before, word in zip(["", *rest], rest, strict=False)
            if not word.startswith("-") and not before.startswith("-")  # after an unknown flag it is that flag's value
        ]
        return vars(parsed), problems

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError with every unknown flag, and with what argparse found."""
        raise ConfigError([*self.unknown_flags(), f"{' '.join(message.split())[:LONGEST_REASON]}. See --help."])

    def all_flags(self) -> list[str]:
        """Return every flag of this parser."""
        return [flag for action in self._actions for flag in action.option_strings]

    def unknown_flags(self) -> list[str]:
        """Return a problem for each flag in the last command line that neither this parser nor the other knows."""
        known = [*self.all_flags(), *self._also]
        words = self._words[: self._words.index("--")] if "--" in self._words else self._words
        flags = [word.partition("=")[0] for word in words if re.match(r"--?[^\W\d]", word) and " " not in word]
        return [self._unknown(flag) for flag in dict.fromkeys(flags) if flag not in known]

    def _unknown(self, flag: str) -> str:
        meant = suggestion(flag, [*self.all_flags(), *self._also])
        return f"unknown flag {' '.join(flag.split())[:80]}{meant}"


def build_parser(options: type, *, prog: str, description: str, **more: Any) -> Parser:
    """Return a parser with the flags of a dataclass; it reads texts, which `read_values` converts."""
    parser = Parser(description, prog=prog, argument_default=argparse.SUPPRESS, **more)
    add_flags(parser, options)
    return parser


def add_flags(
    parser: argparse._ActionsContainer,
    options: type,
    *,
    shown: Callable[[str], bool] = lambda name: True,
    negatable: bool = False,
) -> None:
    """Add the flags of a dataclass; those of a nested dataclass become a group in the help.

    Args:
        shown: Whether the help has the flag of a field.
        negatable: A switch that is off by default also has `--no-FLAG`, for what a file may have switched on.
    """
    container = parser
    for item, wanted in typed_fields(options):
        plain, _ = plain_type(wanted)
        if "group" in item.metadata:
            container = parser.add_argument_group(item.metadata["group"])
        if is_dataclass(wanted):
            group = parser.add_argument_group(item.metadata.get("help") or item.name)
            add_flags(group, typing.cast(type, wanted), shown=shown, negatable=negatable)
            continue
        help_text = _help_of(item) if shown(item.name) else argparse.SUPPRESS
        names = [] if item.metadata.get("positional") else [flag_name(item)]
        settings: dict[str, Any] = {"dest": item.name, "help": help_text}
        if plain is bool:
            switch: Any = argparse.BooleanOptionalAction if negatable or item.default is not False else "store_true"
            container.add_argument(*names, action=switch, **settings)
            continue
        legal = choices_of(item, wanted)
        kind = typing.get_args(plain)[0] if typing.get_origin(plain) is tuple else plain
        fallback = item.name.upper() if item.metadata.get("positional") else "TEXT"
        named = "YAML" if is_dataclass(kind) else "|".join(legal) or fallback
        named = {int: "N", float: "X", Path: "PATH"}.get(kind, named)
        settings["metavar"] = item.metadata.get("metavar") or named
        if item.metadata.get("repeat"):
            settings["action"] = "append"
        elif typing.get_origin(plain) is tuple and not is_dataclass(kind):
            # Given twice, the flag of a command adds to its list, and that of a run replaces it, as scripts rely on.
            settings |= {"nargs": "+", "action": "store" if negatable or not names else "extend"}
        action = container.add_argument(*names, **settings)
        # A shell is told these values. argparse is not: it would report one wrong value and stop.
        if values := item.metadata.get("completed") or legal:
            setattr(action, "completer", lambda values=values, **_: values)  # noqa: B010  argcomplete's attribute


def _help_of(item: Field) -> str:
    words = item.metadata.get("help", "").replace("%", "%%")
    if item.default is MISSING and not item.metadata.get("positional"):
        return f"{words} (required)"
    if item.default in (MISSING, None, (), False) or "default" in words:
        return words
    default = " ".join(map(str, item.default)) if isinstance(item.default, tuple) else str(item.default)
    return f"{words} (default {default})".replace("(default %)", "(default %%)").strip()
