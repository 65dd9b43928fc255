"""Scores of tasks as a table by category, in the form of the paper's Table 4.

A category's mean is given only if every one of its tasks has a score, and the overall mean (over tasks, not over
categories) only if all have: a mean over what happens to be there would not compare with anything. What is missing is
named instead.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_neobert.evaluation.pages import to_markdown

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
COLUMNS = ("task", "type", "metric", "score", "missing")  # of the CSV


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


def csv_rows(scores: Sequence[TaskScore]) -> list[dict[str, Any]]:
    """One per task, then one per category, then the average; an empty score is missing."""
    means = [*means_by_category(scores).items(), ("all", mean_of(scores))]
    rows = [{**vars(task), "task": task.name} for task in scores]
    rows += [
        {"task": "mean", "type": name, "metric": f"{mean.there} of {mean.expected} tasks", "score": mean.value}
        for name, mean in means
    ]
    return [row | {"score": None if row["score"] is None else f"{row['score']:.4f}"} for row in rows]


def describe(name: str, scores: Sequence[TaskScore], reported: Mapping[str, Sequence[float]]) -> str:
    """Means beside rows of the paper, what is missing, and every task.

    Args:
        name: Of the model.
        reported: Rows of Table 4: model -> a number per category of CATEGORIES, then the average. For its benchmark
            only, which has tasks in all of them.
    """
    means = means_by_category(scores)
    headings = [f"{CATEGORIES.get(type_, type_)} ({mean.expected})" for type_, mean in means.items()]
    table = [["model", *headings, f"average ({len(scores)})"], [name, *map(str, means.values()), str(mean_of(scores))]]
    table += [[f"{model}, as reported", *(f"{value:.1f}" for value in row)] for model, row in reported.items()]
    parts = [to_markdown(table, numeric=[False, *[True] * (len(headings) + 1)])]
    if missing := [f"- {task.name}: {task.missing}" for task in scores if task.score is None]:
        parts.append(f"No score, so no mean with them ({len(missing)} of {len(scores)} tasks):")
        parts.append("\n".join(missing))
    tasks = [[task.name, task.type, task.metric, "–" if task.score is None else f"{task.score:.2f}"] for task in scores]
    parts.append(to_markdown([["task", "type", "metric", "score"], *tasks], numeric=[False, False, False, True]))
    return "\n\n".join(parts) + "\n"
