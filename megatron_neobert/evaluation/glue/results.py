"""GLUE results of one model: every task's best point as record, CSV and page, and their average."""

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_neobert.evaluation.fine_tuning.study import Result, read_results
from megatron_neobert.evaluation.glue.tasks import PAPER_TASKS, TASKS
from megatron_neobert.evaluation.pages import to_csv
from megatron_neobert.evaluation.records import write_record
from megatron_neobert.evaluation.report import write_page
from megatron_neobert.runtime.atomic_files import replace_file

_COLUMNS = ("task", "metric", "mean", "sd", "seeds", "batch_size", "learning_rate", "weight_decay", "from_mnli")


def write_results(folder: Path, model: Path, *, fingerprint: str, device: str) -> None:
    """glue.json, glue.csv and glue.md from the results of every task of this model, also those of earlier commands."""
    tasks, settings = read_results({task: folder / "glue" / task for task in TASKS}, fingerprint=fingerprint)
    why_none = why_no_average(tasks, settings)
    scores = [result["score"]["mean"] for task, result in tasks.items() if task in PAPER_TASKS]  # without WNLI
    results = {
        "tasks": tasks,
        "average": statistics.fmean(scores) if why_none is None else None,
        "no_average": why_none,
        "missing": [task for task in PAPER_TASKS if task not in tasks],
    }
    record = folder / "glue.json"
    write_record(record, "glue", folder=model, settings=settings, results=results, device=device)
    replace_file(folder / "glue.csv", to_csv(_COLUMNS, _csv_rows(tasks)))
    write_page("glue", [record], folder)


def why_no_average(tasks: Mapping[str, Result], settings: Mapping[str, dict[str, Any]]) -> str | None:
    """Why a mean over the paper's eight tasks would mean nothing; None where it means something.

    Grids may differ: the paper's best points do.
    """
    eight = [task for task in PAPER_TASKS if task in tasks]
    if len(eight) < len(PAPER_TASKS):
        return f"{len(eight)} of {len(PAPER_TASKS)} tasks"
    if any(settings[task]["protocol"] != settings[eight[0]]["protocol"] for task in eight):
        return "protocols differ"
    if any(set(tasks[task]["seeds"]) != set(tasks[eight[0]]["seeds"]) for task in eight):
        return "seeds differ"
    if len({tasks[task]["from_mnli"] for task in eight if TASKS[task].starts_from_mnli}) > 1:
        return "only some of the tasks that may start from MNLI do"
    return None


def _csv_rows(tasks: Mapping[str, Result]) -> Iterator[dict[str, Any]]:
    """One per metric, in percent."""
    for task, result in tasks.items():
        own = {**result["best_point"], "task": task, "seeds": len(result["seeds"])}
        for name, value in {"average": result["score"], **result["metrics"]}.items():
            mean, sd = (None if part is None else f"{100 * part:.3f}" for part in (value["mean"], value["sd"]))
            yield {**own, "metric": name, "mean": mean, "sd": sd, "from_mnli": int(result["from_mnli"])}
