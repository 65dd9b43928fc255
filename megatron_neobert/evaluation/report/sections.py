"""The sections of a report: for each kind of evaluation what was measured, beside what the paper reports.

Numbers of the paper stand in rows of their own and enter no average. Missing results are named.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_neobert.evaluation import reported_numbers
from megatron_neobert.evaluation.glue.tasks import PAPER_TASKS, TASKS
from megatron_neobert.evaluation.mteb.results import CATEGORIES
from megatron_neobert.evaluation.plots import Curve, plot_curves
from megatron_neobert.evaluation.report.blocks import Block, Figure, Row, Table
from megatron_neobert.evaluation.report.records import Run
from megatron_neobert.evaluation.reported_numbers import Reported
from megatron_neobert.evaluation.throughput.tables import draw, to_cells

_PAPERS_MTEB = "MTEB(eng, v1)"
_OWN = {
    "model",
    "models",
    "contenders",
    "tasks",
}  # which model it was; and MTEB's tasks, which have tables of their own


def pseudo_perplexity(runs: Sequence[Run], output: Path) -> list[Block]:
    """Over all tokens, and by length."""
    header = ("model", "pseudo-perplexity", "standard error", "documents", "masked positions", "truncated")
    table = Table(header, [Row(_perplexity_cells(run), run.number) for run in runs])
    path = output / "report_pseudo_perplexity.png"
    plot_curves(
        path,
        [_perplexity_curve(run) for run in runs],
        x_label="tokens (average of the documents of a bin)",
        y_label="pseudo-perplexity",
        title="Pseudo-perplexity by length",
        log_x=True,
        log_y=True,
    )
    bands = " or ".join(sorted({run.results["band"] for run in runs}))
    figure = Figure(path, "Pseudo-perplexity against the length of documents")
    return [
        table,
        *_differences(runs),
        figure,
        f"Band: {bands}. The paper draws its curves (figure 2) and prints no numbers.",
    ]


def throughput(runs: Sequence[Run], output: Path) -> list[Block]:
    """Tokens per second of the best batch size."""
    rows = [{**row, "model": run.model} for run in runs for row in run.results["rows"]]
    numbers = {run.model: run.number for run in runs}
    machines = sorted({run.record["machine"] for run in runs})
    blocks = _differences(runs)
    if len(machines) > 1:
        blocks.append(f"Of different machines, so that lines cannot be compared: {'; '.join(machines)}.")
    for passes in dict.fromkeys(row["passes"] for row in rows):
        blocks.append(f"{passes}, tokens/s by length: median (quartiles), batch size, peak memory")
        header, *lines = to_cells([row for row in rows if row["passes"] == passes])
        blocks.append(Table(header, [Row(line, numbers[line[0]]) for line in lines]))
        path = output / f"report_throughput_{passes.replace('+', '_')}.png"
        if draw(path, rows, passes, machine=" / ".join(machines)):
            blocks.append(Figure(path, f"Throughput against length, {passes}"))
    for run in runs:
        blocks += [f"Not measured: {entry['contender']}: {entry['reason']}." for entry in run.results["not_run"]]
    return [*blocks, *_reported(reported_numbers.THROUGHPUT)]


def glue(runs: Sequence[Run], output: Path) -> list[Block]:
    """The paper's table with measured rows above, then the best points."""
    reported = reported_numbers.GLUE
    measured = []
    for run in runs:
        tasks = run.results["tasks"]
        cells = [_percent(tasks[name]["score"]) if name in tasks else "missing" for name in PAPER_TASKS]
        average = run.results["average"]
        last = f"– ({run.results['no_average']})" if average is None else f"{100 * average:.1f}"
        measured.append(Row([_name_glue(run), *cells, last], run.number))
    table = Table(("model", *reported.columns), measured + _reported_rows(reported))
    header = (
        "model",
        "task",
        "score",
        "metrics",
        "batch size",
        "learning rate",
        "weight decay",
        "seeds",
        "started from",
    )
    points = Table(header, [Row(line, run.number) for run in runs for line in _glue_points(run)])
    return [
        table,
        *_warn(_glue_differences(runs)),
        f"Reported rows: {reported.title}; {reported.note}.",
        "Best point of each task's grid:",
        points,
    ]


def mteb(runs: Sequence[Run], output: Path) -> list[Block]:
    """Averages by category as in the paper's table, for each set of tasks; what is missing; and every task."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_name_mteb(run), []).append(run)
    blocks: list[Block] = [block for name in sorted(groups) for block in _mteb_table(name, groups[name])]
    blocks.append(
        "A mean is given only where every task asked for has a score, over the number of tasks in brackets. Tables of "
        "different tasks cannot be compared."
    )
    for run in runs:
        if run.results["missing"]:
            blocks.append(f"{run.model}, without a score: {', '.join(run.results['missing'])}.")
    tasks = [
        Row([run.model, name, task["type"], task["metric"], _number(task["score"])], run.number)
        for run in runs
        for name, task in run.results["tasks"].items()
    ]
    return [*blocks, Table(("model", "task", "type", "metric", "score"), tasks), *_reported(reported_numbers.MTEB_CDE)]


def _mteb_table(name: str, runs: Sequence[Run]) -> list[Block]:
    """Of runs on the same tasks, beside the paper's rows if these are its tasks."""
    reported = reported_numbers.MTEB
    measured = []
    for run in runs:
        means = [run.results["categories"].get(category) for category in CATEGORIES] + [run.results["average"]]
        measured.append(Row([run.model, *map(_mean, means)], run.number))
    of_paper = name == _PAPERS_MTEB
    table = Table(("model", *reported.columns), measured + (_reported_rows(reported) if of_paper else []))
    note = [f"Reported rows: {reported.title}; {reported.note}."] if of_paper else []
    return [f"{name}:", table, *_differences(runs), *note]


def _name_mteb(run: Run) -> str:
    """What it was run on, as the heading of a table."""
    settings = run.record["settings"]
    tasks, limit = settings["tasks"], settings["limit"]
    what = tasks if isinstance(tasks, str) else ", ".join(sorted(tasks))
    return what if limit is None else f"{what}, a quick look with limit {limit:,}"


def contrastive(runs: Sequence[Run], output: Path) -> list[Block]:
    """What models were fine-tuned on, and how the loss fell."""
    rows = []
    for run in runs:
        losses = [f"{run.results[name]:.3f}" for name in ("first_loss_nats", "last_loss_nats")]
        rows.append(Row([run.model, *losses, ", ".join(run.results["datasets"])], run.number))
    return [Table(("model", "first loss, nats", "last loss, nats", "datasets"), rows)]


SECTIONS: dict[str, tuple[str, Callable[[Sequence[Run], Path], list[Block]]]] = {
    "pseudo_perplexity": ("Pseudo-perplexity", pseudo_perplexity),
    "throughput": ("Throughput", throughput),
    "glue": ("GLUE", glue),
    "mteb": ("MTEB", mteb),
    "contrastive": ("Contrastive fine-tuning", contrastive),
}


def _perplexity_cells(run: Run) -> list[str]:
    results = run.results
    counts = [f"{results[name]:,}" for name in ("documents", "positions", "truncated")]
    return [run.model, _significant(results["pseudo_perplexity"]), _significant(results["standard_error"]), *counts]


def _perplexity_curve(run: Run) -> Curve:
    points = run.results["curve"]
    columns = [round(point["mean_length"]) for point in points], [point["pseudo_perplexity"] for point in points]
    nan = float("nan")
    bands = ([nan if point[name] is None else point[name] for point in points] for name in ("low", "high"))
    return Curve(run.model, *columns, *bands)


def _name_glue(run: Run) -> str:
    limits = {settings["protocol"]["limit"] for settings in run.record["settings"].values()} - {None}
    return f"{run.model}, at most {max(limits):,} rows a split" if limits else run.model


def _glue_differences(runs: Sequence[Run]) -> list[str]:
    """Names of the settings in which runs differ on a task that both have; where it was computed is none of them."""
    differing = set()
    for task in TASKS:
        on_task = [_glue_settings(run, task) for run in runs if task in run.results["tasks"]]
        differing |= {name for each in on_task for name in each if each[name] != on_task[0].get(name)}
    return sorted(differing)


def _glue_settings(run: Run, task: str) -> dict[str, Any]:
    settings = run.record["settings"][task]
    own = {name: settings[name] for name in ("grid", "seeds", "rows")}
    return {**settings["protocol"], **own, "start from MNLI": run.results["tasks"][task]["from_mnli"]}


def _glue_points(run: Run) -> list[list[str]]:
    lines = []
    for name, task in run.results["tasks"].items():
        point = task["best_point"]
        metrics = ", ".join(f"{metric} {_percent(value)}" for metric, value in task["metrics"].items())
        settings = [f"{point[field]:g}" for field in ("batch_size", "learning_rate", "weight_decay")]
        start = "MNLI" if task["from_mnli"] else "the model"
        seeds = " ".join(map(str, task["seeds"]))
        lines.append([run.model, TASKS[name].title, _percent(task["score"]), metrics, *settings, seeds, start])
    return lines


def _percent(value: dict[str, Any]) -> str:
    deviation = "" if value["sd"] is None else f" ± {100 * value['sd']:.1f}"
    return f"{100 * value['mean']:.1f}{deviation}"


def _mean(mean: dict[str, Any] | None) -> str:
    if mean is None:
        return "missing"
    if mean["value"] is None:
        return f"– ({mean['there']} of {mean['expected']})"
    return f"{mean['value']:.1f} ({mean['expected']})"


def _number(value: float | None, form: str = ".2f") -> str:
    return "–" if value is None else format(value, form)


def _significant(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _differences(runs: Sequence[Run]) -> list[Block]:
    """A warning where runs of one kind were not made under the same settings."""
    settings = [run.record["settings"] for run in runs]
    names = sorted({name for each in settings for name in each} - _OWN)
    return _warn([name for name in names if any(each.get(name) != settings[0].get(name) for each in settings)])


def _warn(differing: Sequence[str]) -> list[Block]:
    return [f"Not the same in all of these runs, so compare with care: {', '.join(differing)}."] if differing else []


def _reported(table: Reported) -> list[Block]:
    return [f"{table.title}: {table.note}.", Table(("model", *table.columns), _reported_rows(table))]


def _reported_rows(table: Reported) -> list[Row]:
    blank = ["–"] * len(table.columns)
    decimals = max(len(str(value).partition(".")[2]) for values in table.rows.values() for value in values)
    return [
        Row([name, *(f"{value:.{decimals}f}" for value in values), *blank[len(values) :]], None)
        for name, values in table.rows.items()
    ]
