"""Reader of a run's metrics.jsonl, which may still grow and may have lines that were cut by a kill.

A run that resumes logs `restarted`, then repeats the iterations after its last checkpoint. The repeated lines replace
the earlier ones. A line that was cut is dropped, even if the next start appended a whole line to it.

The file may come from strangers: a value is dropped if its name is not a word, because names are printed, or if its
number is too large to draw.
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
_LINE_START = '{"iteration"'
_LARGEST = 2**53  # largest whole number up to which a float is exact
_LARGEST_VALUE = 1e39  # above fp32's range; matplotlib fails far above it
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]{0,63}")
RESTARTED = "restarted"  # key of the line that a run logs when it resumes after this iteration


@dataclass(frozen=True)
class RunLog:
    """Logged values of a run by iteration."""

    name: str
    values: dict[int, dict[str, float]]  # by increasing iteration, then by metric
    restarts: list[int]  # last iterations before the run resumed after a stop
    unreadable: int  # dropped lines, except an incomplete last line

    @property
    def metrics(self) -> list[str]:
        """Names of all metrics that were logged."""
        return list(dict.fromkeys(name for values in self.values.values() for name in values))

    def tokens_at(self, iterations: Sequence[int]) -> list[float]:
        """Return the tokens consumed up to each iteration, interpolated from 0 at iteration 0; constant after the last.

        Raise DataError if no line of the log has a number of tokens yet.
        """
        counts = {at: logged["consumed_tokens"] for at, logged in self.values.items() if "consumed_tokens" in logged}
        if not counts:
            raise DataError(
                f"{self.name}: no interval has ended, so no tokens have been counted. Wait for the first interval, or "
                "use --x iteration."
            )
        return [float(tokens) for tokens in np.interp(iterations, [0, *counts], [0.0, *counts.values()])]

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """Return iterations, increasing, and the metric's values at each of them.

        Validation metrics have the iterations that logged them. Other metrics have every interval, NaN where missing.
        """
        pairs = [
            (iteration, values.get(metric, math.nan))
            for iteration, values in self.values.items()
            if metric in values or (not metric.startswith("validation") and "consumed_tokens" in values)
        ]
        return [iteration for iteration, _ in pairs], [value for _, value in pairs]


def read_run(path: Path, *, name: str) -> RunLog:
    """Return the log of a run. Unreadable lines are dropped and counted.

    Args:
        path: Folder of the run (its --save), or the log file.

    Raises:
        MissingInputError: There is no log.
        DataError: No line of the file has an iteration and a value.
    """
    file = path / _LOG if path.is_dir() else path
    if not file.is_file():
        problem = "holds no metrics.jsonl" if path.is_dir() else "does not exist"
        raise MissingInputError(
            f"{path} {problem}; name the folder given to --save. A run writes its log there from the first interval on."
        )
    *lines, last = file.read_text(encoding="utf-8", errors="replace").split("\n")
    entries = [_parse(line) for line in lines if line.strip()]
    # The last line has no line feed. It may be complete, or still being written.
    last_entry = _parse(last)
    run = _merge([entry for entry in (*entries, last_entry) if entry is not None], name, unreadable=entries.count(None))
    if not run.values:
        raise DataError(
            f"{file} has no whole line with an iteration and a value. Name the log of a run, and wait until its first "
            "interval (--log-interval) has ended."
        )
    return run


def _parse(line: str) -> dict[str, float] | None:
    """Return the numbers of a log line by name, including "iteration"; None if the line has no valid iteration."""
    try:
        content = parse_json(line[max(line.rfind(_LINE_START), 0) :])
    except ValueError:
        return None
    iteration = content.get("iteration") if isinstance(content, dict) else None
    if type(iteration) is not int or not 0 <= iteration <= _LARGEST:
        return None
    return {name: value for name, value in content.items() if _NAME.fullmatch(name) and _is_number(value)}


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= (_LARGEST if isinstance(value, int) else _LARGEST_VALUE)  # False for NaN


def _merge(entries: list[dict[str, float]], name: str, *, unreadable: int) -> RunLog:
    """Merge log lines by iteration. A restart removes the values of later iterations. This changes `entries`."""
    values: dict[int, dict[str, float]] = {}
    restarts: list[int] = []
    for entry in entries:
        iteration = int(entry.pop("iteration"))
        if entry.pop(RESTARTED, None) is not None:
            values = {at: logged for at, logged in values.items() if at <= iteration}
            restarts = [*(at for at in restarts if at < iteration), iteration]
        if entry:
            values[iteration] = {**values.get(iteration, {}), **entry}
    return RunLog(name=name, values=dict(sorted(values.items())), restarts=restarts, unreadable=unreadable)
