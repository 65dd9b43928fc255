"""One page of all results: tables and figures beside the paper's numbers, and how each model was measured.

Results are the records of evaluations, found below some folders by their names. Numbers of the paper are in rows of
their own and enter no average. Missing results are named.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_neobert.errors import DataError, MissingInputError, short_reason
from megatron_neobert.evaluation import paper
from megatron_neobert.evaluation.ledger import read_record
from megatron_neobert.evaluation.options import GLUE_TASKS
from megatron_neobert.evaluation.pages import code, figure, heading, paragraph, table
from megatron_neobert.evaluation.paper import MTEB_CATEGORIES, MTEB_PAPER, Reported
from megatron_neobert.evaluation.plots import Curve, plot_curves
from megatron_neobert.runtime.atomic_files import replace_file
from megatron_neobert.text import in_bytes

# Kind -> its heading and the command that writes its record, in the order of the report.
KINDS = {
    "pseudo_perplexity": ("Pseudo-perplexity", "neobert evaluate ppl"),
    "throughput": ("Throughput", "neobert evaluate throughput"),
    "glue": ("GLUE", "neobert evaluate glue"),
    "ner": ("Named-entity recognition", "neobert evaluate ner"),
    "mteb": ("MTEB", "neobert evaluate mteb"),
    "contrastive": ("Contrastive fine-tuning", "neobert finetune"),
}
# Settings that differ between models by nature, and MTEB's tasks, which have tables of their own.
_OWN_SETTINGS = {"model", "tasks"}


class _Model(msgspec.Struct):
    name: str
    fingerprint: str


class Record(msgspec.Struct):
    """Record of one evaluation of one model."""

    kind: str
    model: _Model
    command: str
    settings: dict[str, Any]
    results: dict[str, Any]
    machine: str
    versions: dict[str, str]
    path: str = ""  # of the file


def write_report(folders: Sequence[Path], output: Path) -> list[Record]:
    """Write report.md and the figures from all records below the folders, and return the records.

    Raises:
        MissingInputError, DataError: There are no records, or some file is none.
    """
    runs = find_runs(folders)
    output.mkdir(parents=True, exist_ok=True)
    parts = [heading("Evaluation", 1)]
    for kind, (title, command) in KINDS.items():
        blocks = [paragraph(f"Missing: no record; {command} writes it.")]
        if of_kind := [run for run in runs if run.kind == kind]:
            try:
                blocks = SECTIONS[kind](of_kind, output)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                files, reason = ", ".join(run.path for run in of_kind), short_reason(error)
                raise DataError(
                    f"{files}: results that are not of this version's {command} ({reason}); measure again."
                ) from error
        parts += [heading(title), *blocks]
    parts += [heading("Measurements"), *(block for run in runs for block in _describe(run))]
    replace_file(output / "report.md", "\n\n".join(parts) + "\n")
    return runs


def write_page(kind: str, records: Sequence[Path], output: Path) -> str:
    """Write OUTPUT/KIND.md and its figures: the part of the report about records that were just written."""
    runs = [read(path, kind) for path in records]
    page = "\n\n".join([heading(KINDS[kind][0], 1), *SECTIONS[kind](runs, output)]) + "\n"
    replace_file(output / f"{kind}.md", page)
    return page


def find_runs(folders: Sequence[Path]) -> list[Record]:
    """Return all records, kind by kind; if one kind has two models of one name, their folders tell them apart.

    Raises:
        MissingInputError: No folder has a record.
        DataError: A file of a record's name is none.
    """
    runs = list[Record]()
    for kind in KINDS:
        paths = {path.resolve(): path for folder in folders for path in sorted(folder.rglob(f"{kind}.json"))}
        runs += [read(path, kind) for path in paths.values()]
    if not runs:
        wanted = ", ".join(f"{kind}.json" for kind in KINDS)
        raise MissingInputError(f"--results {' '.join(map(str, folders))}: none of {wanted} is there; evaluate first.")
    count = Counter((run.kind, run.model.name) for run in runs)
    for run in runs:
        if count[run.kind, run.model.name] > 1:
            run.model.name += f" ({Path(run.path).parent})"
    return runs


def read(path: Path, kind: str) -> Record:
    """Return a record.

    Raises:
        DataError: The file is no record of this kind.
    """
    try:
        record = msgspec.convert(read_record(path), Record)
        if record.kind != kind:
            raise ValueError(f"its kind is {record.kind!r:.80}")
    except (ValueError, RecursionError, OSError) as error:  # not UTF-8, not JSON, nested too deeply, or a pipe
        raise DataError(
            f"{path}: not a record of kind {kind} ({short_reason(error)}); remove it and measure again with "
            f"{KINDS[kind][1]}."
        ) from None
    record.path = str(path)
    return record


# --- sections


def pseudo_perplexity(runs: Sequence[Record], output: Path) -> list[str]:
    """Return pseudo-perplexity over all tokens and by length."""
    rows, curves, nan = [], [], float("nan")
    for run in runs:
        values = [_number(run.results[name], ".4g") for name in ("pseudo_perplexity", "standard_error")]
        counts = [f"{run.results[name]:,}" for name in ("documents", "positions", "truncated")]
        rows.append([run.model.name, *values, *counts])
        points = run.results["curve"]
        low, high = ([nan if point[end] is None else point[end] for point in points] for end in ("low", "high"))
        middle = [point["pseudo_perplexity"] for point in points]
        curves.append(Curve(run.model.name, [round(point["mean_length"]) for point in points], middle, low, high))
    header = ("model", "pseudo-perplexity", "standard error", "documents", "masked positions", "truncated")
    path = output / "pseudo_perplexity.png"
    bands = " or ".join(sorted({run.results["band"] for run in runs}))
    title, x_label = f"Pseudo-perplexity by length; band: {bands}", "tokens (average of the documents of a bin)"
    plot_curves(path, curves, x_label=x_label, y_label="pseudo-perplexity", title=title, log_x=True, log_y=True)
    return [
        table(header, rows),
        *_differences([run.settings for run in runs]),
        figure(path, "Pseudo-perplexity against the length of documents"),
        paragraph(f"Band: {bands}. The paper draws its curves (figure 2) and prints no numbers."),
    ]


def throughput(runs: Sequence[Record], output: Path) -> list[str]:
    """Return the tokens per second of the batch size that was fastest, by length."""
    machines = sorted({run.machine for run in runs})
    different = "; of different machines, so that lines cannot be compared" if len(machines) > 1 else ""
    first = runs[0].settings
    what = f"{first['dtype']}, {first['attention']}, medians of {first['steps']} steps (quartiles)"
    best = [fastest(run.results["rows"]) for run in runs]
    lengths = sorted({length for rows in best for length in rows})
    cells, curves = [], []
    for run, rows in zip(runs, best, strict=True):
        found = {length: speed_cell(row["batch_size"], row["measured"]) for length, row in rows.items()}
        cells.append([run.model.name, *(found.get(length, "-") for length in lengths)])
        speeds = {length: row["measured"]["tokens_per_second"] for length, row in rows.items() if row["measured"]}
        if speeds:
            low, middle, high = zip(*speeds.values(), strict=True)
            curves.append(Curve(run.model.name, list(speeds), middle, low, high))
    reported, path = paper.THROUGHPUT, output / "throughput.png"
    blocks = [
        *_differences([run.settings for run in runs]),
        paragraph(f"Tokens per second by length, measured on {'; '.join(machines)}{different}; {what}."),
        table(("model", *(f"{length:,}" for length in lengths)), cells),
    ]
    if curves:
        title = f"Throughput, {' / '.join(machines)}"
        plot_curves(path, curves, x_label="tokens of a document", y_label="tokens/s", title=title, log_x=True)
        blocks.append(figure(path, "Throughput against length"))
    for run in runs:
        for length, reason in run.results["not_run"].items():
            blocks.append(paragraph(f"Not measured: {run.model.name}, {length}: {reason}."))
    caption = paragraph(f"{reported.title}: {reported.note}.")
    return [*blocks, caption, table(("model", *reported.columns), (), _reported_rows(reported))]


def fastest(rows: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the row of the fastest batch size by length; `measured` is None where no batch size fitted into memory."""
    best: dict[int, dict[str, Any]] = {}
    # Earlier versions also measured packed rows and the backward pass.
    forward = [
        row for row in rows if row.get("layout", "padded") == "padded" and row.get("passes", "forward") == "forward"
    ]
    for row in sorted(forward, key=lambda row: (row["length"], row["batch_size"])):
        before, found = best.get(row["length"]), row["measured"]
        if before is None or (found and found["tokens_per_second"][1] > before["measured"]["tokens_per_second"][1]):
            best[row["length"]] = row
    return best


def speed_cell(batch_size: int, measured: dict[str, Any] | None) -> str:
    """Format the speed of one batch size."""
    if measured is None:
        return f"out of memory (batch {batch_size})"
    lower, middle, upper = measured["tokens_per_second"]
    memory = "" if measured["peak_bytes"] is None else f", {in_bytes(measured['peak_bytes'])}"
    return f"{middle:,.0f} ({lower:,.0f} to {upper:,.0f}), batch {batch_size}{memory}"


def _best_points(runs: Sequence[Record]) -> list[str]:
    """Return the best point of every task. The weights are of the best single run, which may be of another point."""
    rows, compared = [], dict[str, list[dict[str, Any]]]()
    for run in runs:
        for task, result in run.results["tasks"].items():
            metrics = ", ".join(f"{metric} {_percent(value)}" for metric, value in result["metrics"].items())
            point = [f"{result['best_point'][name]:g}" for name in ("batch_size", "learning_rate", "weight_decay")]
            cost = [" ".join(map(str, result["seeds"])), str(result["points"]), f"{result['seconds'] / 3600:.2f}"]
            rows.append(
                [run.model.name, task, _percent(result["score"]), metrics, *point, *cost, result["kept"] or "–"]
            )
        for task, settings in run.settings.items():
            own = {name: settings.get(name) for name in ("grid", "seeds", "data", "from_mnli")}
            compared.setdefault(task, []).append(settings["protocol"] | own)
    names = ("batch size", "learning rate", "weight decay", "seeds", "points", "hours", "weights kept")
    return [table(("model", "task", "score", "metrics", *names), rows), *_differences(*compared.values())]


def glue(runs: Sequence[Record], output: Path) -> list[str]:
    """Return the paper's table with measured rows above, then the best points."""
    reported, measured = paper.GLUE, []
    for run in runs:
        tasks, average = run.results["tasks"], run.results["average"]
        limits = {settings["protocol"]["limit"] for settings in run.settings.values()} - {None}
        name = f"{run.model.name}, at most {max(limits):,} rows a split" if limits else run.model.name
        cells = [_percent(tasks[task]["score"]) if task in tasks else "missing" for task in GLUE_TASKS]
        last = f"– ({run.results['no_average']})" if average is None else f"{100 * average:.1f}"
        measured.append([name, *cells, last])
    return [
        table(("model", *reported.columns), measured, _reported_rows(reported)),
        paragraph(f"Reported rows: {reported.title}; {reported.note}."),
        "Best point of each task's grid:",
        *_best_points(runs),
    ]


def ner(runs: Sequence[Record], output: Path) -> list[str]:
    """Return the scores of every data set, those of its test set included, with the best point."""
    return [
        paragraph(
            "F1 of entities by seqeval, both bounds and the kind right. The validation set has chosen step and point, "
            "and gives the score; test_f1 is of the test set where there is one. The paper has no numbers of this kind."
        ),
        *_best_points(runs),
    ]


def mteb(runs: Sequence[Record], output: Path) -> list[str]:
    """Return averages by category as in the paper's table, for each set of tasks; what is missing; and every task."""
    groups: dict[str, list[tuple[Record, dict[str, Any]]]] = {}
    for run in runs:  # the tasks are the heading of a table
        for entry in run.results["tables"]:
            tasks = entry["settings"]["tasks"]
            name = tasks if isinstance(tasks, str) else ", ".join(sorted(tasks))
            groups.setdefault(name, []).append((run, entry))
    blocks, every, reported = list[str](), list[list[str]](), paper.MTEB
    for name, group in sorted(groups.items()):
        others = sorted({category for _, entry in group for category in entry["categories"]} - set(MTEB_CATEGORIES))
        rows = []
        for run, entry in group:
            means = [entry["categories"].get(category) for category in (*MTEB_CATEGORIES, *others)]
            rows.append([run.model.name, *map(_mean, [*means, entry["average"]])])
        header = ("model", *reported.columns[:-1], *others, reported.columns[-1])
        blocks += [paragraph(f"{name}:"), table(header, rows, _reported_rows(reported) if name == MTEB_PAPER else ())]
        blocks += _differences([entry["settings"] for _, entry in group])
        if name == MTEB_PAPER:
            blocks.append(paragraph(f"Reported rows: {reported.title}; {reported.note}."))
        for run, entry in group:
            if absent := [f"{task} ({entry['tasks'][task]['missing']})" for task in entry["missing"]]:
                blocks.append(paragraph(f"{run.model.name}, without a score: {', '.join(absent)}."))
            for task, score in entry["tasks"].items():
                cells = [run.model.name, task, score["type"], score["metric"], _number(score["score"], ".2f")]
                every += [cells] if cells not in every else []
    blocks.append(
        "A mean is given only where every task asked for has a score, over the number of tasks in brackets. Tables of "
        "different tasks cannot be compared."
    )
    return [*blocks, table(("model", "task", "type", "metric", "score"), every)]


def contrastive(runs: Sequence[Record], output: Path) -> list[str]:
    """Return what models were fine-tuned on, and how the loss fell."""
    rows, curves, path = [], [], output / "contrastive.png"
    for run in runs:
        losses = [f"{run.results[name]:.3f}" for name in ("first_loss_nats", "last_loss_nats")]
        rows.append([run.model.name, *losses, ", ".join(run.results["datasets"])])
        if found := run.results.get("losses_nats"):  # which earlier versions wrote into a file of its own
            steps, values = zip(*found, strict=True)
            curves.append(Curve(run.model.name, steps, values))
    blocks = [table(("model", "first loss, nats", "last loss, nats", "datasets"), rows)]
    if curves:
        plot_curves(path, curves, x_label="step", y_label="InfoNCE (nats)", title="Contrastive fine-tuning")
        blocks.append(figure(path, "Loss of contrastive fine-tuning"))
    return blocks


SECTIONS: dict[str, Callable[[Sequence[Record], Path], list[str]]] = {
    section.__name__: section for section in (pseudo_perplexity, throughput, glue, ner, mteb, contrastive)
}


def _describe(run: Record) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    settings = [f"{name}: {json.dumps(value)}" for name, value in sorted(run.settings.items())]
    text = f"{run.path}; weights {run.model.fingerprint}; {run.machine}; {versions}."
    lines = "\n".join([run.command, "", *settings])
    return [heading(f"{run.model.name}: {run.kind}", 3), paragraph(text), code(lines)]


# --- cells


def _differences(*compared: Sequence[dict[str, Any]]) -> list[str]:
    """Return a warning that names the settings in which runs differ, within each of some groups of settings."""
    differing = {
        name
        for group in compared
        for name in {name for each in group for name in each} - _OWN_SETTINGS
        if any(each.get(name) != group[0].get(name) for each in group)
    }
    text = f"Not the same in all of these runs, so compare with care: {', '.join(sorted(differing))}."
    return [paragraph(text)] if differing else []


def _percent(value: dict[str, Any]) -> str:
    deviation = "" if value["sd"] is None else f" ± {100 * value['sd']:.1f}"
    return f"{100 * value['mean']:.1f}{deviation}"


def _mean(mean: dict[str, Any] | None) -> str:
    if mean is None:
        return "missing"
    if mean["value"] is None:
        return f"– ({mean['there']} of {mean['expected']})"
    return f"{mean['value']:.1f} ({mean['expected']})"


def _number(value: float | None, form: str) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 1000 else format(value, form)


def _reported_rows(numbers: Reported) -> list[list[str]]:
    blank = ["–"] * len(numbers.columns)
    decimals = max(len(str(value).partition(".")[2]) for values in numbers.rows.values() for value in values)
    return [
        [name, *(f"{value:.{decimals}f}" for value in values), *blank[len(values) :]]
        for name, values in numbers.rows.items()
    ]
