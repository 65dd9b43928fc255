"""The history of a run out of its metrics.jsonl, which may be growing, and which kills may have torn.

A run that resumes trains again on what came after its last checkpoint, and logs it again behind a line that announces
the restart: earlier lines of later iterations are replaced. A line that a kill has cut is left out, even if the next
start appended to it. A value is left out if its name is not a word, since names are printed, or if its number cannot be
drawn.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_neobert.errors import DataError, MissingInputError
from megatron_neobert.text import parse_json

_LOG = "metrics.jsonl"
_BEGINNING = '{"iteration"'  # of every line
_LARGEST = 2**53  # what a float can count to
_LARGEST_VALUE = 1e39  # fp32 ends below it, and axes fail far above
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]{0,63}")
RESTARTED = "restarted"  # a line with this key: the run resumed behind this iteration


@dataclass(frozen=True)
class RunLog:
    """Logged values of a run by iteration."""

    name: str
    values: dict[int, dict[str, float]]  # increasing iterations; only what the line of that iteration has
    restarts: list[int]  # iterations behind which it resumed after a stop
    unreadable: int  # lines, without a last one that is perhaps being written

    @property
    def metrics(self) -> list[str]:
        """Names of everything that was logged."""
        return list(dict.fromkeys(name for values in self.values.values() for name in values))

    def tokens_at(self, iterations: Sequence[int]) -> list[float]:
        """Return the tokens that the run had seen after each iteration, interpolated between two intervals.

        Raises:
            DataError: No interval has ended.
        """
        counts = {one: logged["consumed_tokens"] for one, logged in self.values.items() if "consumed_tokens" in logged}
        if not counts:
            raise DataError(
                f"{self.name}: no interval has ended, so no tokens have been counted; wait for the first, or give "
                "--x iteration"
            )
        return [float(tokens) for tokens in np.interp(iterations, [0, *counts], [0.0, *counts.values()])]

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """Return iterations and values of a metric; NaN where all updates of an interval were skipped."""
        pairs = [
            (iteration, values.get(metric, math.nan))
            for iteration, values in self.values.items()
            if metric in values or (not metric.startswith("validation") and "consumed_tokens" in values)
        ]
        return [iteration for iteration, _ in pairs], [value for _, value in pairs]


def read_run(path: Path, *, name: str) -> RunLog:
    """Return the log of a run.

    Args:
        path: Its folder, --save, or the file itself.

    Raises:
        MissingInputError: There is no log.
        DataError: It holds nothing yet, or is no such log.
    """
    file = path / _LOG if path.is_dir() else path
    if not file.is_file():
        what = "holds no metrics.jsonl" if path.is_dir() else "does not exist"
        raise MissingInputError(
            f"{path} {what}; name the folder given to --save. A run writes its log there from the first interval on."
        )
    *lines, last = file.read_text(encoding="utf-8", errors="replace").split("\n")
    entries = [_parse(line) for line in lines if line.strip()]
    ended = _parse(last)  # without a line feed: whole only if nothing is missing
    run = _merge([entry for entry in (*entries, ended) if entry is not None], name, unreadable=entries.count(None))
    if not run.values:
        raise DataError(
            f"{file} has no whole line with an iteration and a value; is it the log of a run, and has its first "
            "interval (--log-interval) ended?"
        )
    return run


def _parse(line: str) -> dict[str, float] | None:
    """Return the numbers of a line; None if it has none."""
    try:
        content = parse_json(line[max(line.rfind(_BEGINNING), 0) :])
    except ValueError:
        return None
    iteration = content.get("iteration") if isinstance(content, dict) else None
    if type(iteration) is not int or not 0 <= iteration <= _LARGEST:
        return None
    return {name: value for name, value in content.items() if _NAME.fullmatch(name) and _is_number(value)}


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= (_LARGEST if isinstance(value, int) else _LARGEST_VALUE)  # false for NaN


def _merge(entries: list[dict[str, float]], name: str, *, unreadable: int) -> RunLog:
    values: dict[int, dict[str, float]] = {}
    restarts: list[int] = []
    for entry in entries:
        iteration = int(entry.pop("iteration"))
        if entry.pop(RESTARTED, None) is not None:
            values = {one: content for one, content in values.items() if one <= iteration}
            restarts = [*(one for one in restarts if one < iteration), iteration]
        if entry:
            values[iteration] = {**values.get(iteration, {}), **entry}
    return RunLog(name=name, values=dict(sorted(values.items())), restarts=restarts, unreadable=unreadable)
