"""Scores of tasks as a table by category, in the form of the paper's Table 4.

A category's mean is given only if every one of its tasks has a score, and the overall mean (over tasks, not over
categories) only if all have: a mean over what happens to be there would not compare with anything. What is missing is
named instead.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# mteb's types, in the order and with the headings of Table 4.
CATEGORIES = {
    "Classification": "Class.",
    "Clustering": "Clust.",
    "PairClassification": "PairClass.",
    "Reranking": "Rerank.",
    "Retrieval": "Retriev.",
    "STS": "STS",
    "Summarization": "Summ.",
}


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """One task of the benchmark: 100 x mteb's main score, or None with the reason."""

    name: str
    type: str
    metric: str
    score: float | None
    missing: str | None = None


@dataclass(frozen=True, kw_only=True)
class Mean:
    """Of a category's tasks: None unless all are there."""

    value: float | None
    there: int
    expected: int

    def __str__(self) -> str:
        return f"– ({self.there} of {self.expected})" if self.value is None else f"{self.value:.1f}"


def mean_of(scores: Sequence[TaskScore]) -> Mean:
    """The mean over tasks, each weighing the same."""
    values = [task.score for task in scores if task.score is not None]
    complete = bool(scores) and len(values) == len(scores)
    return Mean(value=math.fsum(values) / len(values) if complete else None, there=len(values), expected=len(scores))


def means_by_category(scores: Sequence[TaskScore]) -> dict[str, Mean]:
    """Of the categories that occur, those of Table 4 first."""
    types = [*CATEGORIES, *sorted({task.type for task in scores} - set(CATEGORIES))]
    groups = {type_: [task for task in scores if task.type == type_] for type_ in types}
    return {type_: mean_of(group) for type_, group in groups.items() if group}


def to_results(scores: Sequence[TaskScore]) -> dict[str, Any]:
    """For the record."""
    return {
        "average": vars(mean_of(scores)),
        "categories": {name: vars(mean) for name, mean in means_by_category(scores).items()},
        "tasks": {task.name: vars(task) for task in scores},
        "missing": [task.name for task in scores if task.score is None],
    }


def to_csv(scores: Sequence[TaskScore]) -> str:
    """One line per task, then one per category, then the average; an empty score is missing."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["task", "type", "metric", "score", "missing"])
    for task in scores:
        score = "" if task.score is None else f"{task.score:.4f}"
        writer.writerow([task.name, task.type, task.metric, score, task.missing or ""])
    for name, mean in [*means_by_category(scores).items(), ("all", mean_of(scores))]:
        value = "" if mean.value is None else f"{mean.value:.4f}"
        writer.writerow(["mean", name, f"{mean.there} of {mean.expected} tasks", value, ""])
    return stream.getvalue()


def to_markdown(name: str, scores: Sequence[TaskScore], reported: Mapping[str, Sequence[float]]) -> str:
    """Means beside rows of the paper, what is missing, and every task.

    Args:
        name: Of the model.
        reported: Rows of Table 4: model -> a number per category of CATEGORIES, then the average. For its benchmark
            only, which has tasks in all of them.
    """
    means = means_by_category(scores)
    headings = [f"{CATEGORIES.get(type_, type_)} ({mean.expected})" for type_, mean in means.items()]
    lines = [
        "| model | " + " | ".join([*headings, f"average ({len(scores)})"]) + " |",
        "|---|" + "---:|" * (len(headings) + 1),
        f"| {name} | " + " | ".join(map(str, [*means.values(), mean_of(scores)])) + " |",
    ]
    for model, row in reported.items():
        lines.append(f"| {model}, as reported | " + " | ".join(f"{value:.1f}" for value in row) + " |")
    missing = [f"- {task.name}: {task.missing}" for task in scores if task.score is None]
    if missing:
        lines += ["", f"No score, so no mean with them ({len(missing)} of {len(scores)} tasks):", "", *missing]
    lines += ["", "| task | type | metric | score |", "|---|---|---|---:|"]
    lines += [
        f"| {task.name} | {task.type} | {task.metric} | {'–' if task.score is None else f'{task.score:.2f}'} |"
        for task in scores
    ]
    return "\n".join(lines) + "\n"
