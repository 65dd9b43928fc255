"""GLUE results of one model: the best point of every task, and the paper's table beside them.

A task's number is the mean over seeds of its metrics' average at the point where that is highest; the spread is the
standard deviation over seeds, n - 1. Chosen on the same rows that it is measured on, as everywhere in the literature.
"""

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_neobert.evaluation.glue.tasks import PAPER_TASKS, TASKS
from megatron_neobert.evaluation.glue.training import Outcome, Point
from megatron_neobert.evaluation.pages import to_csv, to_markdown
from megatron_neobert.evaluation.records import write_record
from megatron_neobert.evaluation.reported_numbers import GLUE
from megatron_neobert.runtime.atomic_files import replace_file

RESULT = "result.json"
_POINT = ("batch_size", "learning_rate", "weight_decay")
_COLUMNS = ("task", "metric", "mean", "sd", "seeds", "batch_size", "learning_rate", "weight_decay", "from_mnli")


@dataclass(frozen=True)
class Spread:
    """Of one number over seeds, as fractions of 1; no deviation of a single one."""

    mean: float
    sd: float | None

    def percent(self) -> str:
        return f"{100 * self.mean:.1f}" + ("" if self.sd is None else f" ± {100 * self.sd:.1f}")


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """Of one task at its best point."""

    task: str
    score: Spread
    metrics: dict[str, Spread]
    batch_size: int
    learning_rate: float
    weight_decay: float
    seeds: tuple[int, ...]
    points: int  # of the grid, seeds apart
    from_mnli: bool
    kept: str | None  # name of the run that has the best weights; None: somebody has removed them
    seconds: float  # of all runs together
    settings: dict[str, Any]  # the protocol


def summarise(
    task: str, outcomes: Mapping[Point, Outcome], *, from_mnli: bool, kept: str | None, settings: dict[str, Any]
) -> TaskResult:
    """The best point of a grid whose runs are all done."""
    by_point: dict[tuple[int, float, float], list[Point]] = {}
    for point in outcomes:
        by_point.setdefault((point.batch_size, point.learning_rate, point.weight_decay), []).append(point)
    (batch_size, learning_rate, weight_decay), best = max(
        by_point.items(), key=lambda item: statistics.fmean(outcomes[point].average for point in item[1])
    )
    return TaskResult(
        task=task,
        score=_spread([outcomes[point].average for point in best]),
        metrics={name: _spread([outcomes[point].scores[name] for point in best]) for name in TASKS[task].metrics},
        batch_size=batch_size,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        seeds=tuple(point.seed for point in best),
        points=len(by_point),
        from_mnli=from_mnli,
        kept=kept,
        seconds=sum(outcome.seconds for outcome in outcomes.values()),
        settings=settings,
    )


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def save_result(path: Path, result: TaskResult, *, model: str) -> None:
    """One task's result; `model` is the fingerprint of the one that was evaluated."""
    replace_file(path, json.dumps({"model": model, "result": dataclasses.asdict(result)}, indent=2) + "\n")


def load_results(folder: Path, *, model: str) -> list[TaskResult]:
    """Of every task of this model that lies in TASK/result.json below the folder."""
    contents = {name: folder / name / RESULT for name in TASKS if (folder / name / RESULT).is_file()}
    results = []
    for path in contents.values():
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["model"] == model:
            values = content["result"]
            values["score"] = Spread(**values["score"])
            values["metrics"] = {name: Spread(**value) for name, value in values["metrics"].items()}
            results.append(TaskResult(**{**values, "seeds": tuple(values["seeds"])}))
    return results


def write_results(folder: Path, model: Path, results: Sequence[TaskResult], *, device: str) -> None:
    """glue.json, glue.csv and glue.md."""
    why_none = why_no_average(results)
    tasks = {}
    for result in results:
        fields = dataclasses.asdict(result)
        point = {name: fields.pop(name) for name in _POINT}
        del fields["settings"]
        tasks[fields.pop("task")] = {**fields, "best_point": point}
    found: dict[str, Any] = {
        "tasks": tasks,
        "average": paper_average(results) if why_none is None else None,
        "no_average": why_none,
        "missing": [task for task in PAPER_TASKS if task not in {result.task for result in results}],
    }
    settings = {result.task: result.settings for result in results}
    write_record(folder / "glue.json", "glue", folder=model, settings=settings, results=found, device=device)
    replace_file(folder / "glue.csv", to_csv(_COLUMNS, [row for result in results for row in _csv_rows(result)]))
    replace_file(folder / "glue.md", describe(folder.name, results))


def why_no_average(results: Sequence[TaskResult]) -> str | None:
    """Why a mean over the paper's eight tasks would mean nothing; None where it means something.

    Grids may differ: the paper's best points do.
    """
    by_task = {result.task: result for result in results}
    eight = [by_task[task] for task in PAPER_TASKS if task in by_task]
    if len(eight) < len(PAPER_TASKS):
        return f"{len(eight)} of {len(PAPER_TASKS)} tasks"
    if any(result.settings["protocol"] != eight[0].settings["protocol"] for result in eight):
        return "protocols differ"
    if any(set(result.seeds) != set(eight[0].seeds) for result in eight):
        return "seeds differ"
    if len({result.from_mnli for result in eight if TASKS[result.task].starts_from_mnli}) > 1:
        return "only some of the tasks that may start from MNLI do"
    return None


def paper_average(results: Sequence[TaskResult]) -> float:
    """The mean over the paper's eight tasks, without WNLI; only where `why_no_average` has nothing against it."""
    return statistics.fmean(result.score.mean for result in results if result.task in PAPER_TASKS)


def _csv_rows(result: TaskResult) -> list[dict[str, Any]]:
    """One per metric, in percent."""
    own = {**vars(result), "seeds": len(result.seeds), "from_mnli": int(result.from_mnli)}
    return [
        {
            **own,
            "metric": name,
            "mean": f"{100 * value.mean:.3f}",
            "sd": None if value.sd is None else f"{100 * value.sd:.3f}",
        }
        for name, value in {"average": result.score, **result.metrics}.items()
    ]


def describe(name: str, results: Sequence[TaskResult]) -> str:
    """The paper's table with this model above its rows, and each task's point below."""
    tasks = [TASKS[task] for task in PAPER_TASKS]
    why_none = why_no_average(results)
    average = "none" if why_none is not None else f"{100 * paper_average(results):.1f}"
    by_task = {result.task: result for result in results}
    own = [by_task[task.name].score.percent() if task.name in by_task else "not run" for task in tasks]
    table = [["GLUE dev, %", *(task.title for task in tasks), "average"], [f"**{name}** (measured)", *own, average]]
    table += [[f"{model} (reported)", *(f"{value:.1f}" for value in values)] for model, values in GLUE.rows.items()]
    points: list[list[Any]] = [
        ["task", "metrics", "batch", "learning rate", "weight decay", "seeds", "starts from", "points", "hours"]
    ]
    for result in results:
        metrics = ", ".join(f"{name} {value.percent()}" for name, value in result.metrics.items())
        numbers = [result.batch_size, f"{result.learning_rate:g}", f"{result.weight_decay:g}"]
        seeds, start = " ".join(map(str, result.seeds)), "MNLI" if result.from_mnli else "the model"
        hours = f"{result.seconds / 3600:.2f}"
        points.append([TASKS[result.task].title, metrics, *numbers, seeds, start, result.points, hours])
    paragraphs = [to_markdown(table), to_markdown(points)]
    if limits := {result.settings["protocol"]["limit"] for result in results} - {None}:
        paragraphs.append(f"A quick look: of some splits at most {max(limits):,} rows were used.")
    if why_none is not None:
        paragraphs.append(f"No average ({why_none}): it is over the eight tasks, all of them run alike.")
    for result in results:  # the weights that are kept are of the best single run, which may be of another point
        point = {name: getattr(result, name) for name in _POINT}
        own_runs = {Point(**point, seed=seed).name for seed in result.seeds}
        if result.kept is not None and result.kept not in own_runs:
            title = TASKS[result.task].title
            paragraphs.append(f"{title}: the weights kept are of {result.kept}, the best single run so far.")
    paragraphs.append(f"Reported rows: {GLUE.title}; {GLUE.note}.")
    return "\n\n".join(paragraphs) + "\n"
