"""Scores of tasks by category, as in the paper's Table 4.

A category's mean is given only if every one of its tasks has a score, and the overall mean (over tasks, not over
categories) only if all have: a mean over what happens to be there would not compare with anything. What is missing is
named instead.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# mteb's types, in the order of Table 4.
CATEGORIES = ("Classification", "Clustering", "PairClassification", "Reranking", "Retrieval", "STS", "Summarization")
COLUMNS = ("task", "type", "metric", "score", "missing")  # of the CSV


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """One task of the benchmark: 100 x mteb's main score, or None with the reason."""

    name: str
    type: str
    metric: str
    score: float | None
    missing: str | None = None


def mean_of(scores: Sequence[TaskScore]) -> dict[str, Any]:
    """The mean over tasks, each weighing the same; None unless all are there."""
    values = [task.score for task in scores if task.score is not None]
    complete = bool(scores) and len(values) == len(scores)
    mean = math.fsum(values) / len(values) if complete else None
    return {"value": mean, "there": len(values), "expected": len(scores)}


def to_results(scores: Sequence[TaskScore]) -> dict[str, Any]:
    """For the record; of the categories that occur, those of Table 4 first."""
    types = [*CATEGORIES, *sorted({task.type for task in scores} - set(CATEGORIES))]
    groups = {type_: [task for task in scores if task.type == type_] for type_ in types}
    return {
        "average": mean_of(scores),
        "categories": {name: mean_of(group) for name, group in groups.items() if group},
        "tasks": {task.name: vars(task) for task in scores},
        "missing": [task.name for task in scores if task.score is None],
    }


def csv_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """One per task, then one per category, then the average; an empty score is missing."""
    rows = [{**task, "task": name} for name, task in results["tasks"].items()]
    for name, mean in (results["categories"] | {"all": results["average"]}).items():
        metric = f"{mean['there']} of {mean['expected']} tasks"
        rows.append({"task": "mean", "type": name, "metric": metric, "score": mean["value"]})
    return [row | {"score": None if row["score"] is None else f"{row['score']:.4f}"} for row in rows]
