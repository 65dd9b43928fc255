"""Command lines from dataclasses: one field declares a flag, its help line, its completion and its YAML key.

Every command of `neobert` is a frozen dataclass of options and a function that takes it. All problems of a command line
are reported together. Standard library only, so that `--help` is fast and works where no package is installed.
"""

import argparse
import inspect
import itertools
import math
import os
import re
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn

from megatron_neobert.errors import LONGEST_REASON, ConfigError, suggestion
from megatron_neobert.megatron_flags import REPLACEMENTS

_LARGEST_NUMBER = 2**63 - 1  # whole numbers are stored in int64 tensors and index files
_PATH_MAX = 4096  # bytes of a path on Linux, with the final null byte
_FLAG = re.compile(r"(--?[^\W\d][^\s=]*)(?:=|\Z)")  # not a negative number


def option(default: Any = MISSING, help: str = "", *, minimum: float | None = None, **metadata: Any) -> Any:
    """Return a dataclass field that is also a command-line flag. A field without `default` is required.

    Args:
        help: Help line of the flag, without the default value.
        minimum: Smallest allowed number.
        metadata: Any of:
            `flag`: flag name, if it differs from the field name.
            `metavar`: placeholder of the value in the help.
            `positional=True`: an argument without a flag.
            `repeat=True`: a list whose flag takes one value and can be repeated.
            `choices`: allowed values of a text field. For a field of type Literal, the default is the type's values.
            `is_path=True`: a path on the user's machine, which published reports omit.
            `group`: help heading of this field and all later fields.
            `read(text)`: parser of the value; raises ValueError if the text is invalid.
    """
    return field(default=default, metadata={**metadata, "help": help, "minimum": minimum})


def flag_of(name: str) -> str:
    """Return the flag of a field, such as `--global-batch-size` for `global_batch_size`."""
    return "--" + name.replace("_", "-")


class OptionField(NamedTuple):
    """A field of a dataclass of options, with its resolved type."""

    name: str
    default: Any  # MISSING if the field is required
    metadata: Mapping[str, Any]
    type: Any  # of the value, or of each entry of a list
    is_list: bool
    is_optional: bool
    choices: tuple[str, ...]  # empty if all values are allowed

    @property
    def is_group(self) -> bool:
        """True if the field is a nested dataclass."""
        return is_dataclass(self.type) and not self.is_list

    @property
    def shown_name(self) -> str:
        """Flag of the field, or the placeholder of a positional argument."""
        if self.metadata.get("positional"):
            return self.metadata.get("metavar", self.name)
        return self.metadata.get("flag") or flag_of(self.name)


def option_fields(options_type: type) -> Iterator[OptionField]:
    """Yield the fields of the dataclass `options_type`."""
    hints = typing.get_type_hints(options_type)
    for item in fields(options_type):
        plain = hints[item.name]
        if is_optional := typing.get_origin(plain) in (typing.Union, types.UnionType):
            plain = next(member for member in typing.get_args(plain) if member is not type(None))
        if is_list := typing.get_origin(plain) is tuple:
            plain = typing.get_args(plain)[0]
        choices = item.metadata.get("choices") or ()
        if typing.get_origin(plain) is Literal:
            plain, choices = str, choices or typing.get_args(plain)
        yield OptionField(item.name, item.default, item.metadata, plain, is_list, is_optional, choices)


def run_function(
    function: Callable[..., int | None], arguments: Sequence[str], *, prog: str, run_flags: Callable[[], list[str]]
) -> int | None:
    """Parse the arguments of a command, call its function with the options, and return the function's exit code.

    Raise ConfigError, which lists every problem, if the command line is invalid.

    Args:
        function: Function with a parameter `options`, annotated with the dataclass of its flags. The first paragraph of
            its docstring is the description in --help. A parameter `flags` receives the remaining arguments.
        run_flags: Returns the flags of `neobert train`. It is called only if `function` has the parameter `flags`.
    """
    options_type = typing.get_type_hints(function)["options"]
    takes_run_flags = "flags" in inspect.signature(function).parameters
    description = (function.__doc__ or "").partition("\n\n")[0]
    parser = Parser(description, also=run_flags() if takes_run_flags else (), prog=prog)
    add_flags(parser, options_type)
    texts, remaining, problems = parser.parse(arguments)
    options, value_problems = read_values(options_type, texts)
    if problems + value_problems:
        raise ConfigError(problems + value_problems)
    return function(options, flags=remaining) if takes_run_flags else function(options)


def read_values(options_type: type, texts: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Convert `texts`, a command line's texts by field name, to an instance of the dataclass `options_type`.

    `texts` also contains the fields of nested dataclasses. A field without a text gets its default value.

    Returns:
        The options and an empty list; or None and an error message for each invalid or missing value.
    """
    values: dict[str, Any] = {}
    problems = []
    for item in option_fields(options_type):
        if item.is_group:
            values[item.name], nested_problems = read_values(item.type, texts)
            problems += nested_problems
        elif item.name in texts:
            wrong = assign(values, item, texts[item.name], source=item.shown_name, is_file_name=True)
            problems += wrong or value_problems(item, values[item.name], source=item.shown_name)
        elif item.default is MISSING:
            problems.append(f"{item.shown_name} is missing: {item.metadata['help'] or 'it is required'}.")
    return (None if problems else options_type(**values)), problems


# --- values


class _Excerpt(reprlib.Repr):
    """Shortened `repr` of a value for messages, because YAML aliases can make a value exponentially large."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 2, 80, 80

    def repr_int(self, x: int, level: int) -> str:
        """Describe a huge number by its number of bits, because Python refuses to print more than 4,300 digits."""
        return repr(x) if abs(x) < 10**40 else f"a number of {x.bit_length()} bits"


excerpt = _Excerpt().repr


def assign(
    values: dict[str, Any], item: OptionField, value: Any, *, source: str, is_file_name: bool = False
) -> list[str]:
    """Convert `value` to the field's type and store it as `values[item.name]`. Return [], or a list of one error.

    Text is converted to the type, also from YAML, which reads `1e-4` as text. An int can be written as `1e6`. For a
    list field, `value` is a list or a single entry. If the type allows None, "none" and "null" become None. Choices are
    not checked.

    Args:
        source: Start of the error message: the flag, or the file and key.
        is_file_name: Allow bytes that are not UTF-8, because file names can contain such bytes. Set this to False for
            texts that are written to a file, such as the settings of a run.
    """
    read = item.metadata.get("read")
    try:
        if read:
            values[item.name] = read(value)
        elif item.is_optional and (value is None or (isinstance(value, str) and value.lower() in ("none", "null"))):
            values[item.name] = None
        else:
            entries = value if item.is_list and isinstance(value, list) else [value]
            converted = tuple(_convert(entry, item.type, is_file_name=is_file_name) for entry in entries)
            values[item.name] = converted if item.is_list else converted[0]
    except (ValueError, TypeError, OverflowError) as error:
        reason = str(error) if read else f"is not {_describe_type(item)}."
        is_text_list = isinstance(value, list) and all(isinstance(entry, str) for entry in value)
        return [f"{source} {excerpt(' '.join(value) if is_text_list else value)} {reason}"]
    return []


def value_problems(item: OptionField, value: Any, *, source: str) -> list[str]:
    """Return an error message if a value is too small, not finite, beyond 64 bits or not a choice; else []."""
    minimum = item.metadata.get("minimum")
    for entry in value if isinstance(value, tuple) else (value,):
        if item.choices and entry is not None and entry not in item.choices:
            hint = suggestion(str(entry), item.choices, otherwise=".")
            return [f"{source} {entry} is not one of {', '.join(item.choices)}{hint}"]
        if isinstance(entry, bool) or not isinstance(entry, (int, float)):
            continue
        if minimum is not None and entry < minimum:
            return [f"{source} {entry} is below {minimum}, its smallest legal value."]
        if isinstance(entry, float) and not math.isfinite(entry):
            return [f"{source} {entry} is not finite; give a finite number."]
        if isinstance(entry, int) and abs(entry) > _LARGEST_NUMBER:
            return [f"{source} {excerpt(entry)} is beyond {_LARGEST_NUMBER}; whole numbers take 64 bits at most."]
    return []


def _convert(value: Any, plain: type, *, is_file_name: bool) -> Any:
    """Convert a text or a YAML scalar to the type `plain`. Raise ValueError or OverflowError if this is impossible."""
    if plain is bool and isinstance(value, bool):
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):  # a bool is an int in Python
        raise ValueError(value)
    if plain in (str, Path):
        text = str(value)
        encoded = os.fsencode(text) if is_file_name else text.encode()
        # An empty path would mean the current folder; line breaks and null bytes cannot be part of one line or a path.
        if not text.strip() or len(encoded) >= _PATH_MAX or set(text) & set("\0\n\r"):
            raise ValueError(value)
        return plain(text)
    if not str(value).isascii() or plain not in (int, float):  # int() accepts the digits of every script
        raise ValueError(value)
    if plain is float or isinstance(value, int):
        return plain(value)
    if isinstance(value, str) and value.strip().lstrip("+-").replace("_", "").isdigit():
        return int(value)
    if float(value) != int(float(value)):
        raise ValueError(value)
    return int(float(value))


def _describe_type(item: OptionField) -> str:
    if item.choices:
        return f"one of {', '.join(item.choices)}."
    name = {int: "whole number", float: "number", bool: "true or false"}.get(item.type, "text")
    described = name if item.type is bool else f"a {name} or a list of {name}s" if item.is_list else f"a {name}"
    return described + (" in UTF-8" if name == "text" else "") + (" or null" if item.is_optional else "")


# --- the parser


class Parser(argparse.ArgumentParser):
    """An argparse parser without abbreviated flags. Errors raise ConfigError, which suggests a similar flag.

    Args:
        also: Flags of a second parser, which reads the remaining arguments. They are not reported as unknown.
    """

    _completes: ClassVar[bool] = False

    def __init__(self, description: str = "", *, also: Iterable[str] = (), **more: Any) -> None:
        super().__init__(description=description, allow_abbrev=False, **more)
        self._also, self._arguments = tuple(also), [""]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse, but raise ConfigError. If a shell requests completions, print them and exit."""
        if "_ARGCOMPLETE" in os.environ and not Parser._completes:
            import argcomplete

            Parser._completes = True  # argcomplete calls this method too
            argcomplete.autocomplete(self)
        self._arguments = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def parse(self, arguments: Sequence[str]) -> tuple[dict[str, Any], list[str], list[str]]:
        """Return the parsed texts by field name, the remaining arguments, and error messages about unknown arguments.

        Flags that were not given are absent. Raise ConfigError for argparse's errors, such as a missing value.
        """
        parsed, remaining = self.parse_known_args(arguments)
        problems = self.unknown_flags()
        if not self._also:
            problems += [
                f"{excerpt(word)} is not the value of any flag; check the spelling before it, and quote a value that "
                "has a space."
                # Words after an unknown flag are probably its values, and would be reported twice.
                for word in itertools.takewhile(lambda word: not _FLAG.match(word), remaining)
            ]
        return vars(parsed), remaining, problems

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError, which lists every unknown flag and argparse's message."""
        raise ConfigError([*self.unknown_flags(), f"{' '.join(message.split())[:LONGEST_REASON]}. See --help."])

    def all_flags(self) -> list[str]:
        """Return every flag of this parser."""
        return [flag for action in self._actions for flag in action.option_strings]

    def unknown_flags(self) -> list[str]:
        """Return an error message for each flag of the last command line that is unknown to both parsers."""
        known = [*self.all_flags(), *self._also]
        flags = [match[1] for word in itertools.takewhile("--".__ne__, self._arguments) if (match := _FLAG.match(word))]
        return [
            f"unknown flag {flag}, which is Megatron-LM's; here: {REPLACEMENTS[flag]}."
            if flag in REPLACEMENTS
            else f"unknown flag {flag[:80]}{suggestion(flag, known)}"
            for flag in dict.fromkeys(flags)
            if flag not in known
        ]


def add_flags(
    parser: argparse._ActionsContainer,
    options_type: type,
    *,
    is_shown: Callable[[str], bool] = lambda name: True,
    negatable: bool = False,
) -> None:
    """Add the flags of a dataclass to a parser. A nested dataclass becomes a group in the help.

    Args:
        is_shown: Returns True for a field name if --help should list the flag. The parser also accepts hidden flags.
        negatable: Also add `--no-FLAG` for switches that are off by default, because a YAML file can switch them on. A
            repeated list flag then replaces the list instead of extending it.
    """
    container = parser
    for item in option_fields(options_type):
        if "group" in item.metadata:
            container = parser.add_argument_group(item.metadata["group"])
        if item.is_group:
            group = parser.add_argument_group(item.metadata.get("help") or item.name)
            add_flags(group, item.type, is_shown=is_shown, negatable=negatable)
            continue
        is_positional = item.metadata.get("positional")
        names = [] if is_positional else [item.shown_name]
        settings: dict[str, Any] = {
            "dest": item.name,
            "help": _help_of(item) if is_shown(item.name) else argparse.SUPPRESS,
            "default": argparse.SUPPRESS,
        }
        if item.type is bool:
            switch: Any = argparse.BooleanOptionalAction if negatable or item.default is not False else "store_true"
            container.add_argument(*names, action=switch, **settings)
            continue
        is_yaml = is_dataclass(item.type)
        text = "YAML" if is_yaml else item.name.upper() if is_positional else "TEXT"
        placeholder = {int: "N", float: "X", Path: "PATH"}.get(item.type, "|".join(item.choices) or text)
        settings["metavar"] = item.metadata.get("metavar") or placeholder
        if item.metadata.get("repeat"):
            settings["action"] = "append"
        elif item.is_list and not is_yaml:
            # A repeated flag of a command extends its list. A repeated flag of a run replaces it, as scripts rely on.
            settings |= {"nargs": "+", "action": "store" if negatable or not names else "extend"}
        action = container.add_argument(*names, **settings)
        # Only the shell gets the choices: argparse would stop at the first wrong value, and we report all of them.
        if item.choices:
            setattr(action, "completer", lambda values=item.choices, **_: values)  # noqa: B010  argcomplete's attribute


def _help_of(item: OptionField) -> str:
    text = item.metadata.get("help", "")
    if item.default is MISSING and not item.metadata.get("positional"):
        text += " (required)"
    elif item.default not in (MISSING, None, (), False) and "default" not in text:
        default = " ".join(map(str, item.default)) if isinstance(item.default, tuple) else str(item.default)
        text += f" (default {default})"
    return text.strip().replace("%", "%%")  # argparse formats help lines with %
