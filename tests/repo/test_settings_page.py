"""docs/commands.md lists the commands and settings of the code."""

import os
import re
from argparse import ArgumentParser
from dataclasses import MISSING
from pathlib import Path

import pytest

from megatron_neobert.__main__ import COMMANDS
from megatron_neobert.cli import flag_of, option_fields
from megatron_neobert.config import cli
from megatron_neobert.megatron_flags import REPLACEMENTS

# Settings that have another name in Megatron-LM -> its flag; empty if it has no such setting.
MEGATRON_NAMES = dict.fromkeys((
    "long_documents", "batch_layout", "document_block_size", "mask_replacement", "weight_decay_scope", "phases",
    "continue_from", "keep_last", "objective",
), "") | {
    "init_method_range": "--init-method-std",
    "loss_normalization": "--calculate-per-token-loss",
    "keep_every": "--save-retain-interval",
}  # fmt: skip
PAGE = Path(__file__).resolve().parents[2] / "docs" / "commands.md"
START, END = "<!-- written by tests/repo/test_settings_page.py -->\n", "<!-- end of the commands -->\n"


def render_settings() -> str:
    """Return a table for each section, in the order of --help-all."""
    parts = []
    for section, config in cli.SECTIONS.items():
        subject = (config.__doc__ or "").partition("\n")[0]
        rows = ["| flag | default | values | what it changes |", "| --- | --- | --- | --- |"]
        for item in option_fields(config):
            default = None if item.default is MISSING else item.default
            shown = "" if default in (None, ()) else f"`{default}`"
            cells = (f"`{flag_of(item.name)}`", shown, values_of(item), item.metadata["help"])
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append(f"\n### {section}\n\n{subject}\n\n" + "\n".join(rows) + "\n")
    renamed = [f"`{flag_of(name)}` is `{theirs}`" for name, theirs in MEGATRON_NAMES.items() if theirs]
    missing = [f"`{flag_of(name)}`" for name, theirs in MEGATRON_NAMES.items() if not theirs]
    names = (
        "\n### For users of Megatron-LM\n\nFlags have the names and meanings of Megatron-LM 0.19, except that "
        f"{', '.join(renamed)} there, and that Megatron-LM has no {', '.join(missing)}. Other flags of Megatron-LM:\n\n"
    )
    rows = [f"| `{flag}` | {replacement} |" for flag, replacement in REPLACEMENTS.items()]
    return "".join(parts) + names + "| in Megatron-LM | here |\n| --- | --- |\n" + "\n".join(rows) + "\n"


def values_of(item) -> str:
    if item.type is bool:
        return f"`--no-{flag_of(item.name)[2:]}` switches it off" if item.default else "given or not"
    if item.choices:
        return ", ".join(f"`{choice}`" for choice in item.choices)
    words = {int: "integer", float: "number"}.get(item.type, "YAML" if item.name == "phases" else "text")
    words += "s, one or more" if item.is_list and item.type is str else ""
    minimum = item.metadata["minimum"]
    return words if minimum is None else f"{words} from {minimum:g}"


def render_commands() -> str:
    """Return a table for each group of `neobert --help`."""
    parts = []
    for group, commands in COMMANDS.items():
        rows = [f"| `neobert {name}` | {purpose} |" for name, purpose in commands.items()]
        parts.append("\n".join([f"\n## {group}\n", "| command | purpose |", "| --- | --- |", *rows]) + "\n")
    return "".join(parts) + "\n"


def test_page_lists_the_commands_and_settings_of_the_code():
    """WRITE_DOCUMENTATION=1 writes the page."""
    page = PAGE.read_text(encoding="utf-8")
    before, commands, text, settings = re.split(f"(?:{START}|{END})", page)
    if os.environ.get("WRITE_DOCUMENTATION"):
        PAGE.write_text(before + START + render_commands() + END + text + START + render_settings(), encoding="utf-8")
    else:
        remedy = "run WRITE_DOCUMENTATION=1 python -m pytest tests/repo/test_settings_page.py"
        assert (commands, settings) == (render_commands(), render_settings()), remedy


def test_names_in_megatron_are_those_of_its_parser():
    arguments = pytest.importorskip("megatron.training.arguments", reason="megatron-core 0.16 does not bring it")
    parser = ArgumentParser(allow_abbrev=False)
    arguments.add_megatron_arguments(parser)
    theirs = set(parser._option_string_actions)
    names = {item.name for config in cli.SECTIONS.values() for item in option_fields(config)}
    assert {name for name in names if flag_of(name) not in theirs} == set(MEGATRON_NAMES)
    assert set(MEGATRON_NAMES.values()) - {""} <= theirs
    of_preprocessing = {"--json-keys", "--append-eod", "--split-sentences", "--partitions"}  # tools/preprocess_data.py
    assert set(REPLACEMENTS) - of_preprocessing <= theirs


def test_replacements_name_flags_that_exist_here_and_replace_none():
    here = {flag_of(item.name) for config in cli.SECTIONS.values() for item in option_fields(config)}
    here |= {"--text-key", "--record-key", "--workers"}  # of neobert preprocess
    named = {flag for text in REPLACEMENTS.values() for flag in re.findall(r"--[a-z][a-z0-9-]*", text)}
    assert named <= here and not set(REPLACEMENTS) & here
