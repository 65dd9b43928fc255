"""One page with the results of all evaluations: tables and figures, beside the paper's numbers.

The input is the JSON records of evaluations, which are found below the given folders by their file names. The paper's
numbers have their own table rows and never enter an average. Missing results are named.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from megatron_neobert.errors import DataError, MissingInputError, short_reason
from megatron_neobert.evaluation import paper
from megatron_neobert.evaluation.options import GLUE_TASKS
from megatron_neobert.evaluation.pages import figure, heading, paragraph, table
from megatron_neobert.evaluation.paper import MTEB_CATEGORIES, MTEB_PAPER, Reported
from megatron_neobert.evaluation.plots import Curve, plot_curves
from megatron_neobert.runtime.atomic_files import read_text, replace_file
from megatron_neobert.text import in_bytes, parse_json

# Kind -> metric that chooses the weights, and the meaning of all metrics.
_METRICS = {
    "ner": ("f1", "Entity F1 by seqeval: an entity counts if its first word, last word and kind are correct."),
    "classify": ("accuracy", "Accuracy, and macro_f1, the mean of F1 over the classes."),
}
# Settings that may differ between the models of a table: "tasks" is the heading of a table of MTEB.
_MAY_DIFFER = {"model", "tasks"}


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
    path: str = ""  # file of the record; not in the file itself


def write_report(folders: Sequence[Path], output: Path) -> list[Record]:
    """Write OUTPUT/report.md and its figures from all records (files named KIND.json) below the folders.

    Return the records. If several records of a kind have the same model name, the folder of each record is added to its
    model name. Raises MissingInputError if there are no records, and DataError if the results of a record are damaged.
    """
    records = list[Record]()
    for kind in KINDS:
        paths = {path.resolve(): path for folder in folders for path in sorted(folder.rglob(f"{kind}.json"))}
        records += [load_record(path, kind) for path in paths.values()]
    if not records:
        names = ", ".join(f"{kind}.json" for kind in KINDS)
        raise MissingInputError(
            f"--results {' '.join(map(str, folders))} has none of {names}; run an evaluation, or name its --output."
        )
    count = Counter((record.kind, record.model.name) for record in records)
    for record in records:
        if count[record.kind, record.model.name] > 1:
            record.model.name += f" ({Path(record.path).parent})"
    output.mkdir(parents=True, exist_ok=True)
    page = [heading("Evaluation", 1)]
    for kind, (title, command, section) in KINDS.items():
        blocks = [paragraph(f"Missing: no record; {command} writes it.")]
        if of_kind := [record for record in records if record.kind == kind]:
            try:
                blocks = section(of_kind, output)
            except Exception as error:  # a damaged record can have any value anywhere
                files, reason = ", ".join(record.path for record in of_kind), short_reason(error)
                raise DataError(
                    f"{files}: the results are damaged ({reason}); measure again with {command}."
                ) from error
        page += [heading(title), *blocks]
    files = table(("model", "record", "machine"), [[r.model.name, r.path, r.machine] for r in records])
    page += [heading("Measurements"), "Each record has the command, the settings and the versions.", files]
    replace_file(output / "report.md", "\n\n".join(page) + "\n")
    return records


def write_page(kind: str, paths: Sequence[Path], output: Path) -> str:
    """Write OUTPUT/KIND.md and its figures from records of one kind; return the page. Invalid files raise DataError."""
    records = [load_record(path, kind) for path in paths]
    page = "\n\n".join([heading(KINDS[kind].title, 1), *KINDS[kind].section(records, output)]) + "\n"
    replace_file(output / f"{kind}.md", page)
    return page


def load_record(path: Path, kind: str) -> Record:
    """Read a record and check its fields, but not the content of `settings` and `results`.

    Raises DataError if the file cannot be read, or is not a record of this kind.
    """
    try:
        record = msgspec.convert(parse_json(read_text(path)), Record)
        if record.kind != kind:
            raise ValueError(f"its kind is {record.kind!r:.80}")
    except (ValueError, RecursionError, OSError) as error:
        raise DataError(
            f"{path}: not a record of kind {kind} ({short_reason(error)}); remove it and measure again with "
            f"{KINDS[kind].command}."
        ) from None
    record.path = str(path)
    return record


# --- sections
# Each returns the Markdown blocks of one kind, and writes its figure into `output`.


def pseudo_perplexity(records: Sequence[Record], output: Path) -> list[str]:
    """Return Markdown blocks with the pseudo-perplexity of each model. Write curves to OUTPUT/pseudo_perplexity.png."""
    rows, curves = [], []
    for record in records:
        results, points = record.results, record.results["curve"]
        values = [_number(results[name], ".4g") for name in ("pseudo_perplexity", "standard_error")]
        counts = [f"{results[name]:,}" for name in ("documents", "positions", "truncated")]
        rows.append([record.model.name, *values, *counts])
        lengths, middle = ([point[name] for point in points] for name in ("mean_length", "pseudo_perplexity"))
        low, high = ([math.nan if point[name] is None else point[name] for point in points] for name in ("low", "high"))
        curves.append(Curve(record.model.name, list(map(round, lengths)), middle, low, high))
    header = ("model", "pseudo-perplexity", "standard error", "documents", "masked positions", "truncated")
    path = output / "pseudo_perplexity.png"
    bands = [record.results["band"] for record in records if any(point["low"] for point in record.results["curve"])]
    band = f"bars: {' or '.join(sorted(set(bands)))}" if bands else "no length has enough documents for an interval"
    if bands and any(None in (point["low"] for point in record.results["curve"]) for record in records):
        band += "; hollow: too few documents"
    title, x_label = f"Pseudo-perplexity by length\n{band}", "tokens (average of the documents of a bin)"
    plot_curves(path, curves, x_label=x_label, y_label="pseudo-perplexity", title=title, log_x=True, log_y=True)
    return [
        table(header, rows),
        *_differences([record.settings for record in records]),
        figure(path, "Pseudo-perplexity against the length of documents"),
        "The paper draws its curves (figure 2) and prints no numbers.",
    ]


def throughput(records: Sequence[Record], output: Path) -> list[str]:
    """Return Markdown blocks with the best tokens/s by length. If any batch fitted, draw OUTPUT/throughput.png."""
    machines = sorted({record.machine for record in records})
    warning = "; the machines differ, so do not compare the models" if len(machines) > 1 else ""
    first = records[0].settings
    protocol = f"{first['dtype']}, {first['attention']}, medians of {first['steps']} steps (quartiles)"
    fastest_rows = [fastest(record.results["rows"]) for record in records]
    lengths = sorted(set().union(*fastest_rows))
    cells, curves = [], []
    for record, by_length in zip(records, fastest_rows, strict=True):
        cells.append([record.model.name, *(speed_cell(by_length.get(length)) for length in lengths)])
        if measured := [row for row in by_length.values() if row["measured"]]:
            low, middle, high = zip(*(row["measured"]["tokens_per_second"] for row in measured), strict=True)
            curves.append(Curve(record.model.name, [row["length"] for row in measured], middle, low, high))
    reported, path = paper.THROUGHPUT, output / "throughput.png"
    blocks = [
        *_differences([record.settings for record in records]),
        paragraph(f"Tokens per second by length, measured on {'; '.join(machines)}{warning}; {protocol}."),
        table(("model", *(f"{length:,}" for length in lengths)), cells),
    ]
    if curves:
        title = f"Throughput, {' / '.join(machines)}"
        plot_curves(path, curves, x_label="tokens per document", y_label="tokens/s", title=title, log_x=True)
        blocks.append(figure(path, "Throughput against length"))
    caption = paragraph(f"{reported.title}: {reported.note}.")
    return [*blocks, caption, table(("model", *reported.columns), (), _reported_rows(reported))]


def fastest(rows: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return {length: row of the fastest batch size}, by increasing length. `rows` come from a throughput record.

    If no batch size of a length fitted into memory, that length's row has the smallest batch size, and `measured` None.
    """
    best: dict[int, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: (row["length"], row["batch_size"])):
        best[row["length"]] = max(
            best.get(row["length"], row),
            row,
            key=lambda row: row["measured"]["tokens_per_second"][1] if row["measured"] else 0.0,
        )
    return best


def speed_cell(row: dict[str, Any] | None) -> str:
    """Format a row as median tokens/s (quartiles), batch size and GPU memory, or "out of memory". None becomes "-"."""
    if row is None:
        return "-"
    measured, batch_size = row["measured"], row["batch_size"]
    if measured is None:
        return f"out of memory (batch {batch_size})"
    lower, middle, upper = measured["tokens_per_second"]
    memory = "" if measured["peak_bytes"] is None else f", {in_bytes(measured['peak_bytes'])}"
    return f"{middle:,.0f} ({lower:,.0f} to {upper:,.0f}), batch {batch_size}{memory}"


def glue(records: Sequence[Record], output: Path) -> list[str]:
    """Return Markdown blocks: a table of measured and reported scores in %, and best points. `output` is not used."""
    reported, measured = paper.GLUE, []
    for record in records:
        tasks = record.results["tasks"]
        average = _mean([100 * tasks[task]["score"]["mean"] if task in tasks else None for task in GLUE_TASKS])
        limits = {settings["protocol"]["limit"] for settings in record.settings.values()} - {None}
        name = f"{record.model.name}, at most {max(limits):,} rows a split" if limits else record.model.name
        cells = [_percent(tasks[task]["score"]) if task in tasks else "missing" for task in GLUE_TASKS]
        measured.append([name, *cells, _number(average, ".1f")])
    return [
        table(("model", *reported.columns), measured, _reported_rows(reported)),
        paragraph(f"Reported rows: {reported.title}; {reported.note}."),
        "Best point of each task's grid:",
        *_best_points(records),
    ]


def fine_tuning(records: Sequence[Record], output: Path) -> list[str]:
    """Return Markdown blocks for ner or classify: the scores' meaning, and the best points. `output` is not used."""
    metric, meaning = _METRICS[records[0].kind]
    note = "The validation set chooses the step and the hyper-parameters. Metrics with test_ are the test set's."
    return [paragraph(f"{meaning} {note}"), *_best_points(records, metric=metric)]


def _best_points(records: Sequence[Record], *, metric: str | None = None) -> list[str]:
    """Return Markdown blocks: the best point of each task, and a warning if the models' settings differ.

    The table has a validation and a test column for `metric`, or a single column for the score. Seeds and steps belong
    to the runs of the best point. The column "weights kept" names the weights of the best single run, which may belong
    to another point.
    """
    rows, settings_of = [], dict[str, list[dict[str, Any]]]()  # task -> settings of each model
    for record in records:
        for task, result in record.results["tasks"].items():
            scores = dict(result["metrics"])
            chosen = [scores.pop(name, None) for name in (metric, f"test_{metric}")] if metric else [result["score"]]
            metrics = ", ".join(f"{name} {_percent(value)}" for name, value in scores.items())
            counted = ", ".join(f"{split} {count:,}" for split, count in record.settings[task]["rows"].items())
            point = [f"{result['best_point'][name]:g}" for name in ("batch_size", "learning_rate", "weight_decay")]
            by_seed = [" ".join(map(str, result[name])) for name in ("seeds", "best_steps", "steps")]
            cost = [*by_seed, str(result["points"]), f"{result['seconds'] / 3600:.2f}"]
            first = ["–" if score is None else _percent(score) for score in chosen]
            rows.append([record.model.name, task, *first, metrics, counted, *point, *cost, result["kept"] or "–"])
        for task, settings in record.settings.items():
            compared = {name: settings.get(name) for name in ("grid", "seeds", "data")}
            settings_of.setdefault(task, []).append(settings["protocol"] | compared)
    columns = (f"validation {metric}", f"test {metric}") if metric else ("score",)
    header = ("model", "task", *columns, "metrics", "rows", "batch size", "learning rate", "weight decay", "seeds")
    return [
        table((*header, "best step", "last step", "points", "hours", "weights kept"), rows),
        *_differences(*settings_of.values()),
    ]


def mteb(records: Sequence[Record], output: Path) -> list[str]:
    """Return Markdown blocks: a table of averages by category for each choice of tasks, then a table of all scores.

    The table for the paper's benchmark also contains the paper's rows. `output` is not used.
    """
    tables: dict[str, list[Record]] = {}  # heading (the tasks) -> records
    for record in records:
        tasks = record.settings["tasks"]
        tables.setdefault(tasks if isinstance(tasks, str) else ", ".join(sorted(tasks)), []).append(record)
    blocks, task_rows, reported = list[str](), list[list[str]](), paper.MTEB
    for title, members in sorted(tables.items()):
        used = {task["type"] for record in members for task in record.results["tasks"].values()}
        categories = [*MTEB_CATEGORIES, *sorted(used - {*MTEB_CATEGORIES})]
        rows = []
        for record in members:
            tasks = record.results["tasks"]
            groups = [[task["score"] for task in tasks.values() if task["type"] == name] for name in categories]
            means = [_mean(group) for group in (*groups, list(chain.from_iterable(groups)))]
            rows.append([record.model.name, *(_number(mean, ".1f") for mean in means)])
            for task, score in tasks.items():
                value = score["missing"] or _number(score["score"], ".2f")
                task_rows.append([record.model.name, task, score["type"], score["metric"], value])
        header = ("model", *reported.columns[:-1], *categories[len(MTEB_CATEGORIES) :], reported.columns[-1])
        paper_rows = _reported_rows(reported) if title == MTEB_PAPER else ()
        blocks += [paragraph(f"{title}:"), table(header, rows, paper_rows)]
        blocks += _differences([record.settings for record in members])
    note = f"Reported rows: {reported.title}; {reported.note}. A mean is given only if every task has a score."
    return [*blocks, paragraph(note), table(("model", "task", "type", "metric", "score"), task_rows)]


def contrastive(records: Sequence[Record], output: Path) -> list[str]:
    """Return Markdown blocks with first and last losses (nats). Draw OUTPUT/contrastive.png."""
    rows, curves, path = [], [], output / "contrastive.png"
    for record in records:
        first_and_last = [f"{record.results[name]:.3f}" for name in ("first_loss_nats", "last_loss_nats")]
        scores = record.results["validation_ndcg@10"]
        score = f"{100 * scores[-1][1]:.1f}" if scores else "–"
        rows.append([record.model.name, *first_and_last, score, ", ".join(record.settings["rows"])])
        steps, values = zip(*record.results["losses_nats"], strict=True)
        curves.append(Curve(record.model.name, steps, values))
    plot_curves(path, curves, x_label="step", y_label="InfoNCE (nats)", title="Contrastive fine-tuning")
    header = ("model", "first loss, nats", "last loss, nats", "last nDCG@10 of validation pairs, %", "datasets")
    return [table(header, rows), figure(path, "Loss of contrastive fine-tuning")]


class Kind(NamedTuple):
    """A kind of records. All records of a kind have the same file name."""

    title: str
    command: str  # that writes the record
    section: Callable[[Sequence[Record], Path], list[str]]


# In the order of the report.
KINDS = {
    "pseudo_perplexity": Kind("Pseudo-perplexity", "neobert evaluate ppl", pseudo_perplexity),
    "throughput": Kind("Throughput", "neobert evaluate throughput", throughput),
    "glue": Kind("GLUE", "neobert evaluate glue", glue),
    "ner": Kind("Named-entity recognition", "neobert evaluate ner", fine_tuning),
    "classify": Kind("Classification", "neobert evaluate classify", fine_tuning),
    "mteb": Kind("MTEB", "neobert evaluate mteb", mteb),
    "contrastive": Kind("Contrastive fine-tuning", "neobert train-embedder", contrastive),
}


# --- cells


def _differences(*groups: Sequence[dict[str, Any]]) -> list[str]:
    """Return [Markdown warning with the names of the settings that differ within a group], or [].

    Each group contains the settings of records that are compared. Settings in _MAY_DIFFER are ignored.
    """
    differing = {
        name
        for group in groups
        for name in {name for settings in group for name in settings} - _MAY_DIFFER
        if any(settings.get(name) != group[0].get(name) for settings in group)
    }
    text = f"Not the same in all of these runs, so compare with care: {', '.join(sorted(differing))}."
    return [paragraph(text)] if differing else []


def _mean(scores: Sequence[float | None]) -> float | None:
    """Return the mean, or None if `scores` is empty or contains None, because partial means are not comparable."""
    values = [score for score in scores if score is not None]
    return fmean(values) if values and len(values) == len(scores) else None


def _percent(score: dict[str, Any]) -> str:
    deviation = "" if score["sd"] is None else f" ± {100 * score['sd']:.1f}"
    return f"{100 * score['mean']:.1f}{deviation}"


def _number(value: float | None, form: str) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 1000 else format(value, form)


def _reported_rows(reported: Reported) -> list[list[str]]:
    """Return the rows of a paper's table: model name, values with equal decimals, and a dash for each missing value."""
    decimals = max(len(str(value).partition(".")[2]) for values in reported.rows.values() for value in values)
    dashes = ["–"] * len(reported.columns)
    return [
        [name, *(f"{value:.{decimals}f}" for value in values), *dashes[len(values) :]]
        for name, values in reported.rows.items()
    ]
