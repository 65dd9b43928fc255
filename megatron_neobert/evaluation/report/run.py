"""One page of all results: tables and figures beside the paper's numbers, every number with the run it comes from."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_neobert.errors import DataError
from megatron_neobert.evaluation.report.blocks import Block, Code, Section, to_html, to_markdown
from megatron_neobert.evaluation.report.records import KINDS, Run, find_runs
from megatron_neobert.evaluation.report.sections import SECTIONS
from megatron_neobert.runtime.atomic_files import replace_file

TITLE = "Evaluation"


def write_report(folders: Sequence[Path], output: Path) -> list[Run]:
    """Writes report.md, report.html and the figures from all records below the folders; returns these.

    Raises:
        MissingInputError, DataError: There are no records, or some file is none.
    """
    runs = find_runs(folders)
    output.mkdir(parents=True, exist_ok=True)
    sections = [_overview(runs)]
    for kind, (title, _) in SECTIONS.items():
        of_kind = [run for run in runs if run.kind == kind]
        if of_kind:
            sections.append(Section(title, _build(kind, of_kind, output)))
        else:
            sections.append(Section(title, [f"Missing: no record; {KINDS[kind]} writes it."]))
    sections += [Section("Runs", ["What each number was measured with."]), *map(_describe, runs)]
    replace_file(output / "report.md", to_markdown(TITLE, sections))
    replace_file(output / "report.html", to_html(TITLE, sections))
    return runs


def missing(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Model -> the kinds that there is no record of."""
    names = dict.fromkeys(run.record["model"]["name"] for run in runs)
    there = {(run.record["model"]["name"], run.kind) for run in runs}
    return {name: [kind for kind in KINDS if (name, kind) not in there] for name in names}


def _overview(runs: Sequence[Run]) -> Section:
    lines = []
    for name, absent in missing(runs).items():
        own = [run for run in runs if run.record["model"]["name"] == name]
        weights = ", ".join(dict.fromkeys(run.record["model"]["fingerprint"] for run in own))
        lines.append(f"{name} (weights {weights}): missing: {', '.join(absent) or 'nothing'}.")
    text = (
        "Numbers are measured, by the run in the last column, unless that column says reported: those are printed in "
        "the paper and enter no average."
    )
    return Section("Overview", [text, *lines])


def _build(kind: str, runs: Sequence[Run], output: Path) -> list[Block]:
    try:
        return SECTIONS[kind][1](runs, output)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        files = ", ".join(str(run.path) for run in runs)
        reason = f"{type(error).__name__}: {error}"
        raise DataError(
            f"{files}: results that are not of this version's {KINDS[kind]} ({reason}); measure again."
        ) from error


def _find_seeds(settings: dict[str, Any]) -> Iterator[str]:
    """Wherever they stand: some evaluations have settings for each task."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _find_seeds(value)
        elif name in ("seed", "seeds"):
            yield from map(str, value if isinstance(value, list) else [value])


def _describe(run: Run) -> Section:
    record = run.record
    settings = record["settings"]
    seeds = ", ".join(dict.fromkeys(_find_seeds(settings))) or "none"
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    blocks: list[Block] = [
        f"{run.path}; weights {record['model']['fingerprint']}; seed {seeds}; {record['machine']}; {versions}.",
        Code(record["command"]),
        Code("\n".join(f"{name}: {json.dumps(value)}" for name, value in sorted(settings.items()))),
    ]
    return Section(f"[{run.number}] {run.model}: {run.kind}", blocks, level=3, run=run.number)
