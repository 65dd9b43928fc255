"""The settings as the user types them: Megatron-spelled flags, a YAML file, and the record saved with a run.

A field of `config.py` is declared once; its flag, its help line, its place in the YAML file and its type check all
follow from the dataclass. Order of precedence: default < file < flag. Every problem is reported at once.
"""

import argparse
import difflib
import types
import typing
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import yaml

from megatron_neobert.config import Settings, flag_of
from megatron_neobert.config_checks import find_problems
from megatron_neobert.errors import CheckpointError, ConfigError, MissingInputError

_SECTIONS = {section.name: typing.cast(type, section.type) for section in fields(Settings)}
_TEXTS = tuple[str, ...]
_SECTION_OF = {item.name: name for name, config in _SECTIONS.items() for item in fields(config)}


@dataclass(frozen=True)
class Command:
    """What the command line asks for."""

    settings: Settings
    dry_run: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See --help.")


def parse_command_line(arguments: list[str], *, world_size: int) -> Command:
    """Settings out of flags and an optional `--config` file, checked for `world_size` ranks.

    Raises:
        ConfigError: With every problem found, in the file, the flags and their combination.
        MissingInputError: The file does not exist.
    """
    parsed, unknown = _build_parser().parse_known_args(arguments)
    problems = [_unknown_flag(word) for word in unknown if word.startswith("-")]
    problems += [f"{word!r} is not the value of any flag; check the spelling before it." for word in _strays(unknown)]
    given = {name: value for name, value in vars(parsed).items() if name in _SECTION_OF}

    values: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    if parsed.config is not None:
        problems += _merge_file(Path(parsed.config), values)
    for name, text in given.items():
        problems += _assign(values, _SECTION_OF[name], name, text, source=flag_of(name))
    settings = _build(values)
    problems += find_problems(settings, world_size=world_size)  # of the legal values, and defaults for the others
    if problems:
        raise ConfigError(problems)
    return Command(settings=settings, dry_run=parsed.dry_run)


def read_settings(path: Path) -> Settings:
    """Settings out of a YAML file, each value checked for its type.

    Raises:
        ConfigError: With every unknown key and every value of the wrong type.
        MissingInputError: No such file.
    """
    values: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    if problems := _merge_file(path, values):
        raise ConfigError(problems)
    return _build(values)


def write_record(settings: Settings, path: Path) -> None:
    """Saves the resolved settings, every default written out, as YAML."""
    path.write_text(yaml.safe_dump(asdict(settings), sort_keys=False), encoding="utf-8")


def read_record(path: Path) -> Settings:
    """The settings that `write_record` saved.

    Raises:
        CheckpointError: The record is missing, unreadable, or of another version of this project.
    """
    try:
        return read_settings(path)
    except (ConfigError, MissingInputError) as error:
        raise CheckpointError(
            f"{path}: not the settings of a run ({error}); was it written by another version?"
        ) from error


# --- flags ---


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pretrain_neobert",
        description="Pre-trains a NeoBERT encoder. Precedence: defaults < --config FILE < flags.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", default=None, metavar="FILE", help="YAML file with the sections listed below")
    parser.add_argument("--dry-run", action="store_true", default=False, help="check, print what would run, and stop")
    for section, config in _SECTIONS.items():
        group = parser.add_argument_group(f"{section}")
        for item in fields(config):
            default = item.default if item.default is not MISSING else None
            shown = "" if default in (None, ()) else f" (default {str(default).replace('%', '%%')})"
            if _plain_type(item.type)[0] is bool:
                group.add_argument(
                    flag_of(item.name), action=argparse.BooleanOptionalAction, help=item.metadata["help"] + shown
                )
            else:
                metavar = "|".join(item.metadata["choices"]) if item.metadata["choices"] else _type_word(item.type)
                count = "+" if item.type == _TEXTS else None
                group.add_argument(flag_of(item.name), metavar=metavar, nargs=count, help=item.metadata["help"] + shown)
    return parser


def _unknown_flag(word: str) -> str:
    flag = word.split("=", 1)[0]
    known = [flag_of(name) for name in _SECTION_OF] + ["--config", "--dry-run"]
    return f"unknown flag {flag}{_suggestion(flag, known)}"


def _strays(unknown: list[str]) -> list[str]:
    """Words that belong to no flag; the value right after an unknown flag is that flag's."""
    return [
        word
        for before, word in zip(["", *unknown], unknown, strict=False)
        if not word.startswith("-") and not before.startswith("-")
    ]


def _suggestion(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else "; see --help for the list."


# --- YAML ---


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader, except that a key that stands twice is an error and not an overwrite."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _merge_file(path: Path, values: dict[str, dict[str, Any]]) -> list[str]:
    """Adds the content of a YAML file to `values`; returns its problems, each with the file's name in front."""
    if not path.is_file():
        raise MissingInputError(f"--config {path}: no such file (looked from {Path.cwd()}).")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)  # a SafeLoader
    except (yaml.YAMLError, UnicodeDecodeError, TypeError) as error:
        return [f"{path}: not readable as YAML: {' '.join(str(error).split())}"]
    if content is None:
        return []
    if not isinstance(content, dict):
        return [f"{path}: holds a {type(content).__name__}; expected the sections {', '.join(_SECTIONS)}."]
    problems = []
    for section, entries in content.items():
        if section not in _SECTIONS:
            problems.append(f"{path}: unknown section {section}{_suggestion(str(section), list(_SECTIONS))}")
        elif entries is not None and not isinstance(entries, dict):
            problems.append(f"{path}: section {section} holds {entries!r}; expected 'name: value' lines.")
        else:
            for name, value in (entries or {}).items():
                problems += _assign(values, section, str(name), value, source=f"{path}: {section}.{name}")
    return problems


def _assign(values: dict[str, dict[str, Any]], section: str, name: str, value: Any, *, source: str) -> list[str]:
    """Puts one value, converted to its field's type, into `values`; returns what is wrong with it."""
    types_of_section = {item.name: item.type for item in fields(_SECTIONS[section])}
    if name not in types_of_section:
        home = _SECTION_OF.get(name)
        hint = f"; it belongs to section {home!r}." if home else _suggestion(name, list(types_of_section))
        return [f"{source.rsplit(':', 1)[0]}: unknown setting {section}.{name}{hint}"]
    try:
        values[section][name] = _convert(value, types_of_section[name])
    except (ValueError, TypeError, OverflowError):
        return [f"{source} {value!r} is not {_type_words(types_of_section[name])}."]
    return []


def _build(values: dict[str, dict[str, Any]]) -> Settings:
    return Settings(**{name: config(**values[name]) for name, config in _SECTIONS.items()})


# --- types ---


def _convert(value: Any, wanted: Any) -> Any:
    """A flag's text or a YAML value as the type of its field; ValueError if it is something else.

    YAML 1.1 reads `1e-4` as text, so text is parsed by the field's type and not by YAML's guess.
    """
    plain, optional = _plain_type(wanted)
    if value is None or (optional and isinstance(value, str) and value.lower() in ("none", "null")):
        if optional:
            return None
        raise ValueError(value)
    if plain is bool:
        if isinstance(value, bool):
            return value
        raise ValueError(value)
    if isinstance(value, bool):  # True is an int to Python and a mistake to the user
        raise ValueError(value)
    if wanted == _TEXTS:
        return tuple(_convert(entry, str) for entry in (value if isinstance(value, list) else [value]))
    if plain is int:
        number = float(value) if isinstance(value, (str, float)) and not _is_integer(value) else int(value)
        if number != int(number):
            raise ValueError(value)
        return int(number)
    if plain is float and isinstance(value, (int, float, str)):
        return float(value)
    if plain is str and isinstance(value, (str, int, float)):
        return str(value)
    raise ValueError(value)


def _is_integer(value: str | float) -> bool:
    return isinstance(value, str) and value.strip().lstrip("+-").isdigit()


def _plain_type(wanted: Any) -> tuple[type, bool]:
    """`int | None` as (int, True)."""
    if isinstance(wanted, types.UnionType):
        plain = next(part for part in typing.get_args(wanted) if part is not type(None))
        return plain, True
    return wanted, False


def _type_word(wanted: Any) -> str:
    return {int: "N", float: "X", str: "TEXT", _TEXTS: "TEXT"}[_plain_type(wanted)[0]]


def _type_words(wanted: Any) -> str:
    plain, optional = _plain_type(wanted)
    words = {
        int: "a whole number",
        float: "a number",
        str: "a text",
        bool: "true or false",
        _TEXTS: "a text or a list of texts",
    }[plain]
    return words + (" or null" if optional else "")
