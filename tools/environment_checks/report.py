"""The findings of all rules, as text for a terminal and as JSON."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from dataclasses import asdict

from environment_checks.devices import gpu_findings, precision_findings, torch_findings
from environment_checks.facts import OK, PROBLEM, WARNING, Facts, Finding
from environment_checks.machine import disk_findings, limit_findings, variable_findings
from environment_checks.packages import (
    other_package_findings,
    pair_findings,
    project_findings,
    python_findings,
    requirement_findings,
    shadow_findings,
)

SECTIONS = {
    "Python and packages": (
        python_findings,
        project_findings,
        torch_findings,
        requirement_findings,
        other_package_findings,
        pair_findings,
        shadow_findings,
    ),
    "GPUs": (gpu_findings,),
    "What training would compute with": (precision_findings,),
    "Machine": (limit_findings, disk_findings, variable_findings),
}
GPU_TEST = "GPU test"
_COLOURS = {OK: "32", WARNING: "33", PROBLEM: "1;31"}
_INDENT = 10


def judge(facts: Facts) -> dict[str, list[Finding]]:
    """Every rule's findings, by section."""
    return {title: [finding for rule in rules for finding in rule(facts)] for title, rules in SECTIONS.items()}


def worst(sections: dict[str, list[Finding]]) -> str:
    statuses = {finding.status for findings in sections.values() for finding in findings}
    return next((status for status in (PROBLEM, WARNING) if status in statuses), OK)


def to_text(sections: dict[str, list[Finding]], *, colour: bool, width: int) -> str:
    """The report; packages that are well share lines, for there are many of them."""
    lines = []
    for title, findings in sections.items():
        if findings:
            lines += ["", title]
        quiet = [finding.subject for finding in findings if finding.status == OK and not finding.words]
        for finding in findings:
            if finding.status != OK or finding.words:
                lines += _lines_of(finding, colour=colour, width=width)
        if quiet:
            lines += _lines_of(Finding(OK, ", ".join(quiet), ""), colour=colour, width=width)
    return "\n".join([*lines, "", _summary(sections)]).lstrip("\n")


def _lines_of(finding: Finding, *, colour: bool, width: int) -> list[str]:
    text = f"{finding.subject}: {finding.words}" if finding.words else finding.subject
    wrapped = textwrap.wrap(text, max(40, width - _INDENT), break_long_words=False, break_on_hyphens=False)
    if finding.remedy:
        remedy = textwrap.wrap(
            f"-> {finding.remedy}",
            max(40, width - _INDENT),
            subsequent_indent="   ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        wrapped += remedy
    label = f"{finding.status:<8}"
    if colour:
        label = f"\033[{_COLOURS[finding.status]}m{label}\033[0m"
    return [f"  {label}{wrapped[0]}", *(" " * _INDENT + line for line in wrapped[1:])]


def _summary(sections: dict[str, list[Finding]]) -> str:
    counts = {
        status: sum(finding.status == status for findings in sections.values() for finding in findings)
        for status in (PROBLEM, WARNING)
    }
    if counts[PROBLEM]:
        return f"{counts[PROBLEM]} problem(s) keep training from starting as it should; {counts[WARNING]} warning(s)."
    if counts[WARNING]:
        return f"Training can start; {counts[WARNING]} warning(s)."
    return "Training can start; nothing to complain about."


def to_json(facts: Facts, sections: dict[str, list[Finding]]) -> str:
    """What was found and what is said about it. Of the variables those that are spoken of: others may be secrets."""
    named = {finding.subject.split("=")[0] for finding in sections["Machine"]}
    found = asdict(facts)
    del found["requirements"]  # setup.py's own lines
    found["variables"] = {name: value for name, value in facts.variables.items() if name in named}
    findings = [{"section": title, **asdict(one)} for title, several in sections.items() for one in several]
    return json.dumps({"status": worst(sections), "findings": findings, "facts": found}, indent=2)


def terminal(variables: dict[str, str]) -> tuple[bool, int]:
    """Whether to colour, and how wide the lines are."""
    colour = sys.stdout.isatty() and not variables.get("NO_COLOR") and variables.get("TERM") != "dumb"
    return colour, min(120, shutil.get_terminal_size((100, 24)).columns)
