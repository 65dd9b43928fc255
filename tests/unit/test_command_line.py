"""Command lines from dataclasses: flags, help and checked values follow from the fields."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from megatron_neobert.cli import option, run_function
from megatron_neobert.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Group:
    """Nested options, which are a group in the help."""

    share: float = option(0.5, "share of 100 % of the rows", minimum=0.0)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Every kind of field."""

    source: Path = option(help="what is read", positional=True)
    output: Path = option(help="where it goes")
    names: tuple[str, ...] = option((), "some names", repeat=True)
    sizes: tuple[int, ...] | None = option(None, "some sizes", minimum=1)
    kind: Literal["fast", "exact"] = option("fast", "how")
    verbose: bool = option(False, "say more")
    checked: bool = option(True, "look twice")
    group: Group = option(help="rows")


def command(options: Options) -> None:
    """Do something with every kind of field.

    This paragraph is not in the help.
    """
    received.append(options)


def command_with_flags(options: Group, flags: list[str]) -> None:
    """Do something with a run's flags too."""
    received.append((options, flags))


received: list = []


def call(*arguments: str, function=command):
    run_function(function, arguments, prog="neobert test", run_flags=lambda: ["--num-layers"])
    return received.pop()


def test_arguments_are_converted_to_the_types_of_the_fields():
    arguments = (
        "in --output out --names a --names b --sizes 1 --sizes 1e3 --kind exact --verbose --no-checked --share 0.25"
    )
    assert call(*arguments.split()) == Options(
        source=Path("in"),
        output=Path("out"),
        names=("a", "b"),
        sizes=(1, 1000),
        kind="exact",
        verbose=True,
        checked=False,
        group=Group(share=0.25),
    )


def test_all_problems_of_a_command_line_are_reported_together():
    with pytest.raises(ConfigError) as refused:
        call("in", "--sizes", "1", "0", "--kind", "exactt", "--share", "much", "--verbos")
    assert refused.value.problems == [
        "unknown flag --verbos; did you mean '--verbose'?",
        "--output is missing: where it goes.",
        "--sizes 0 is below 1, its smallest legal value.",
        "--kind exactt is not one of fast, exact; did you mean 'exact'?",
        "--share 'much' is not a number.",
    ]


def test_help_shows_the_first_paragraph_the_groups_and_required_flags(capsys):
    with pytest.raises(SystemExit):
        call("--help")
    shown = capsys.readouterr().out
    for text in ("usage: neobert test ", "\nDo something with every kind", "where it goes (required)", "\nrows:\n"):
        assert text in shown
    assert "100 % of the rows" in shown and "This paragraph" not in shown and "--no-verbose" not in shown


def test_command_with_a_flags_parameter_receives_the_flags_of_a_run():
    assert call("--num-layers", "2", "--share", "1", function=command_with_flags) == (
        Group(share=1.0),
        ["--num-layers", "2"],
    )
    with pytest.raises(ConfigError, match="unknown flag --num-layer; did you mean '--num-layers'"):
        call("--num-layer", "2", function=command_with_flags)
