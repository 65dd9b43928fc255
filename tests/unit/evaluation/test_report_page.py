"""The report: the paper's numbers are marked, what is missing or differs is named, and text stays text."""

import json
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from megatron_neobert.errors import DataError, MissingInputError
from megatron_neobert.evaluation.glue import TASKS
from megatron_neobert.evaluation.ledger import write_record
from megatron_neobert.evaluation.paper import MTEB
from megatron_neobert.evaluation.report import write_report

HOSTILE = "<script>alert(1)</script> | `x` [a](b)"
LINE = {"origin": {"machine": "a machine", "versions": {"torch": "2.13.0"}}}


def score(mean):
    return {"mean": mean, "sd": 0.01}


def glue_of(tasks):
    point = {"batch_size": 16, "learning_rate": 1e-5, "weight_decay": 0.01}
    one = {"score": score(0.612), "metrics": {"accuracy": score(0.612)}, "best_point": point, "seeds": [0, 1]}
    one |= {"points": 6, "seconds": 1800.0, "kept": "runs/1/model"}
    reason = None if len(tasks) == len(TASKS) else f"{len(tasks)} of 8 tasks"
    return {"tasks": dict.fromkeys(tasks, one), "average": None if reason else 0.612, "no_average": reason}


CURVE = [
    {"mean_length": 100.0, "pseudo_perplexity": 30.0, "low": 20.0, "high": 40.0},
    {"mean_length": 400.0, "pseudo_perplexity": 25.0, "low": None, "high": None},
]
RESULTS = {
    "pseudo_perplexity": {
        "pseudo_perplexity": 23.456,
        "standard_error": None,
        "documents": 7,
        "positions": 4321,
        "truncated": 0,
        "curve": CURVE,
        "band": "95 %",
    },
    "glue": glue_of(TASKS),
    "mteb": {
        "average": {"value": None, "there": 1, "expected": 2},
        "categories": {
            "Classification": {"value": 71.23, "there": 1, "expected": 1},
            "STS": {"value": None, "there": 0, "expected": 1},
        },
        "tasks": {
            "Banking": {"type": "Classification", "metric": "accuracy", "score": 71.23, "missing": None},
            "STS17": {"type": "STS", "metric": "cosine_spearman", "score": None, "missing": "no data"},
        },
        "missing": ["STS17"],
    },
    "contrastive": {
        "first_loss_nats": 2.345,
        "last_loss_nats": 0.456,
        "losses_nats": [[10, 2.345], [20, 0.456]],
        "datasets": {"ALLNLI": {}},
    },
}


def put(results_folder, kind, results, *, name="mine", seed=17, tasks="MTEB(eng, v1)", moved=()):
    """A record of a model that consists of a config, which is all that a fingerprint needs."""
    model = results_folder / "models" / "m"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text("{}")
    path = results_folder / name.replace("/", "-") / f"{kind}.json"
    settings = {"seed": seed, "tasks": tasks}
    if kind == "glue":
        one = {"protocol": {"epochs": 10, "limit": None}, "seeds": [seed], "data": {}, "grid": {}, "device": name}
        settings = {task: one | {"from_mnli": task == "rte" and task not in moved} for task in results["tasks"]}
    if kind == "mteb":
        results = {"tables": [results | {"settings": settings}]}
    write_record(path, kind, folder=model, settings=settings, results=results, lines=[LINE])
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"model": record["model"] | {"name": name}}))
    return path


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    for kind, content in RESULTS.items():
        put(folder, kind, content)
    return folder


def report_of(results, tmp_path):
    output = tmp_path / "report"
    runs = write_report([results], output)
    return (output / "report.md").read_text(), runs


def line_of(text, beginning):
    return next(line for line in text.splitlines() if line.startswith(beginning))


def test_measured_and_reported_numbers_are_told_apart_and_every_measurement_is_described(results, tmp_path):
    text, runs = report_of(results, tmp_path)
    assert line_of(text, "| mine | 61.2") == f"| {' | '.join(['mine', *['61.2 ± 1.0'] * 8, '61.2', 'measured'])} |"
    assert line_of(text, "| NeoBERT-4096 | 89.0").endswith("| 89.0 | reported |")
    assert len(runs) == 4
    for run in runs:
        section = text.split(f"### mine: {run.kind}\n")[1].split("### ")[0]
        record = json.loads(Path(run.path).read_text())
        assert record["command"] in section and "a machine; torch 2.13.0" in section
        assert ('"seeds": [17]' if run.kind == "glue" else "seed: 17") in section


def test_a_mean_over_some_tasks_only_is_not_given_and_they_are_named(results, tmp_path):
    put(results, "glue", glue_of([task for task in TASKS if task != "qqp"]))
    text, _ = report_of(results, tmp_path)
    cells = line_of(text, "| mine | 61.2").split(" | ")
    assert cells[3] == "missing" and cells[9] == "– (7 of 8 tasks)"
    assert line_of(text, "| mine | 71.2 (1)").split(" | ")[-3:-1] == ["missing", "– (1 of 2)"]
    assert "mine, without a score: STS17 (no data)." in text


def test_settings_that_differ_between_models_are_named_task_by_task(results, tmp_path):
    put(results, "glue", glue_of(["cola"]), name="fewer tasks, other device")
    assert "compare with care" not in report_of(results, tmp_path)[0]
    put(results, "glue", glue_of(TASKS), name="other", seed=19, moved=["rte"])
    put(results, "mteb", RESULTS["mteb"], name="other", seed=18)
    text, _ = report_of(results, tmp_path)
    assert text.count("Not the same in all of these runs, so compare with care: seed.") == 1
    assert "so compare with care: from_mnli, seeds." in text


def test_mteb_on_other_tasks_is_in_a_table_without_the_papers_rows(results, tmp_path):
    put(results, "mteb", RESULTS["mteb"], name="second", tasks="MTEB(eng, v2)")
    put(results, "mteb", RESULTS["mteb"], name="local", tasks=["local:b", "local:a"])
    put(results, "mteb", RESULTS["mteb"], name="too", tasks=["local:a", "local:b"])
    text, _ = report_of(results, tmp_path)
    section = text.split("## MTEB\n")[1].split("A mean is given only")[0]
    rows: dict[str, list[str]] = {}
    for line in filter(None, section.splitlines()):
        if line.endswith(":") and not line.startswith("|"):
            models = rows.setdefault(line.removesuffix(":"), [])
        elif line.startswith("| ") and not line.startswith(("| model", "| ---")):
            models.append(line.split(" | ")[0].removeprefix("| "))
    assert rows.pop("MTEB(eng, v1)") == ["mine", *MTEB.rows]
    assert rows == {"MTEB(eng, v2)": ["second"], "local:a, local:b": ["local", "too"]}


def test_kinds_without_a_record_are_named(results, tmp_path):
    assert "Missing: no record; neobert evaluate throughput writes it." in report_of(results, tmp_path)[0]


@pytest.mark.parametrize("name", ["~~~fence", "- item", "1. item", HOSTILE])
def test_what_records_say_is_text_and_never_markup(results, tmp_path, name):
    put(results, "contrastive", RESULTS["contrastive"], name=name)
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(report_of(results, tmp_path)[0])
    inner = [child for token in tokens for child in token.children or []]
    assert f"{name}: contrastive" in "".join(child.content for child in inner)
    types = {token.type for token in (*tokens, *inner)}
    assert types.isdisjoint({"fence", "list_item_open", "html_inline", "html_block"})


def test_two_models_of_one_name_are_told_apart_by_their_folders(results, tmp_path):
    again = put(tmp_path / "results" / "second", "contrastive", RESULTS["contrastive"])
    _, runs = report_of(results, tmp_path)
    names = [run.model.name for run in runs if run.kind == "contrastive"]
    assert names == [f"mine ({path})" for path in sorted([again.parent, results / "mine"])]


@pytest.mark.parametrize("content", ["{", "[]", '{"kind": "glue"}', b"\xff"])
def test_a_file_that_is_no_record_is_named(results, tmp_path, content):
    path = results / "mine" / "glue.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=r"mine/glue\.json"):
        report_of(results, tmp_path)


def test_folders_without_records_are_refused(tmp_path):
    with pytest.raises(MissingInputError, match=r"none of pseudo_perplexity\.json, throughput\.json"):
        write_report([tmp_path], tmp_path / "report")
    assert not (tmp_path / "report").exists()
