"""The report marks the paper's numbers, names what is missing or differs, and shows text of records as text."""

import json
import math

import pytest
from markdown_it import MarkdownIt
from matplotlib.image import imread

from megatron_neobert.errors import DataError, MissingInputError
from megatron_neobert.evaluation.glue import TASKS
from megatron_neobert.evaluation.ledger import write_record
from megatron_neobert.evaluation.paper import MTEB
from megatron_neobert.evaluation.plots import Curve, plot_curves
from megatron_neobert.evaluation.report import write_report

HOSTILE = "<script>alert(1)</script> | `x` [a](b)"
ORIGIN = {"machine": "a machine", "versions": {"torch": "2.13.0"}}


def glue_of(tasks):
    score = {"mean": 0.612, "sd": 0.01}
    point = {"batch_size": 16, "learning_rate": 1e-5, "weight_decay": 0.01}
    result = {"score": score, "metrics": {"accuracy": score}, "best_point": point, "seeds": [0, 1]}
    result |= {"best_steps": [10, 1200], "steps": [900, 1234], "points": 6, "seconds": 1800.0, "kept": "runs/1/model"}
    return {
        "tasks": {task: result | ({"score": {"mean": 0.212, "sd": None}} if task == "qqp" else {}) for task in tasks}
    }


RESULTS = {
    "pseudo_perplexity": {
        "pseudo_perplexity": 23.456,
        "standard_error": None,
        "documents": 7,
        "positions": 4321,
        "truncated": 0,
        "curve": [
            {"mean_length": 100.0, "pseudo_perplexity": 30.0, "low": 20.0, "high": 40.0},
            {"mean_length": 400.0, "pseudo_perplexity": 25.0, "low": None, "high": None},
        ],
        "band": "95 %",
    },
    "glue": glue_of(TASKS),
    "mteb": {
        "tasks": {
            "Banking": {"type": "Classification", "metric": "accuracy", "score": 71.23, "missing": None},
            "Emotion": {"type": "Classification", "metric": "accuracy", "score": 61.23, "missing": None},
            "STS17": {"type": "STS", "metric": "cosine_spearman", "score": None, "missing": "no data"},
        },
    },
    "contrastive": {
        "first_loss_nats": 2.345,
        "last_loss_nats": 0.456,
        "losses_nats": [[10, 2.345], [20, 0.456]],
        "validation_ndcg@10": [],
    },
}


def put(folder, kind, results=None, *, name="mine", seed=17, tasks="MTEB(eng, v1)"):
    """Write the record of a model."""
    results = results or RESULTS[kind]
    path = folder / name.replace("/", "-") / f"{kind}.json"
    settings = {"seed": seed, "tasks": tasks, "rows": {"ALLNLI": 7}}
    if kind == "glue":
        common = {"protocol": {"epochs": 10, "limit": None}, "seeds": [seed], "data": {}, "grid": {}, "device": name}
        settings = dict.fromkeys(results["tasks"], common | {"rows": {"train": 2490}})
    write_record(path, folder=folder, fingerprint="0", settings=settings, results=results, origin=ORIGIN)
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"model": record["model"] | {"name": name}}))
    return path


@pytest.fixture
def results(tmp_path):
    for kind in RESULTS:
        put(tmp_path / "results", kind)
    return tmp_path / "results"


@pytest.fixture
def report(results, tmp_path):
    """Return a function that writes the report and returns its text and records."""

    def write():
        records = write_report([results], tmp_path / "report")
        return (tmp_path / "report" / "report.md").read_text(), records

    return write


def line_of(text, beginning):
    return next(line for line in text.splitlines() if line.startswith(beginning))


def test_measured_and_reported_rows_are_marked_and_every_measurement_is_described(report):
    text, records = report()
    scores = [*["61.2 ± 1.0"] * 2, "21.2", *["61.2 ± 1.0"] * 5]
    assert line_of(text, "| mine | 61.2") == f"| {' | '.join(['mine', *scores, '56.2', 'measured'])} |"
    assert line_of(text, "| NeoBERT-4096 | 89.0").endswith("| 89.0 | reported |")
    assert "Missing: no record; neobert evaluate throughput writes it." in text
    assert len(records) == 4
    assert all(f"| mine | {record.path} | a machine |" in text for record in records)


def test_mean_over_some_of_the_tasks_is_left_out_and_missing_tasks_are_named(results, report):
    put(results, "glue", glue_of([task for task in TASKS if task != "qqp"]))
    text, _ = report()
    cells = line_of(text, "| mine | 61.2").split(" | ")
    assert cells[3] == "missing" and cells[9] == "–"
    assert line_of(text, "| mine | 66.2").split(" | ")[2:-1] == ["–"] * 7, "(71.23 + 61.23) / 2; no average"
    assert "| mine | STS17 | STS | cosine_spearman | no data |" in text


def test_settings_that_differ_between_models_are_named_task_by_task(results, report):
    put(results, "glue", glue_of(["cola"]), name="fewer tasks, other device")
    assert "compare with care" not in report()[0]
    put(results, "glue", name="other", seed=19)
    put(results, "mteb", name="other", seed=18)
    text, _ = report()
    assert text.count("Not the same in all of these runs, so compare with care: seed.") == 1
    assert "so compare with care: seeds." in text


def test_mteb_has_a_table_for_each_selection_of_tasks_and_the_papers_rows_are_in_its_own(results, report):
    put(results, "mteb", name="second", tasks="MTEB(eng, v2)")
    put(results, "mteb", name="local", tasks=["STS12", "FEVER"])
    put(results, "mteb", name="too", tasks=["FEVER", "STS12"])
    section = report()[0].split("## MTEB\n")[1].split("Reported rows")[0]
    models: dict[str, list[str]] = {}
    for line in filter(None, section.splitlines()):
        if line.endswith(":") and not line.startswith("|"):
            names = models.setdefault(line.removesuffix(":"), [])
        elif line.startswith("| ") and not line.startswith(("| model", "| ---")):
            names.append(line.split(" | ")[0].removeprefix("| "))
    assert models.pop("MTEB(eng, v1)") == ["mine", *MTEB.rows]
    assert models == {"MTEB(eng, v2)": ["second"], "FEVER, STS12": ["local", "too"]}


@pytest.mark.parametrize("name", ["~~~fence", "- item", "1. item", HOSTILE])
def test_text_of_records_never_becomes_markup(results, report, name):
    put(results, "contrastive", name=name)
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(report()[0])
    inner = [child for token in tokens for child in token.children or []]
    assert name in "".join(child.content for child in inner)
    types = {token.type for token in (*tokens, *inner)}
    assert types.isdisjoint({"fence", "list_item_open", "html_inline", "html_block"})


def test_models_with_the_same_name_are_shown_with_their_folders(results, report):
    second = put(results / "second", "contrastive")
    names = [record.model.name for record in report()[1] if record.kind == "contrastive"]
    assert names == [f"mine ({path})" for path in sorted([second.parent, results / "mine"])]


@pytest.mark.parametrize("change", [{"curve": []}, {"pseudo_perplexity": 10**400}, {"band": None}, {"documents": "7"}])
def test_damaged_results_are_refused_with_the_files(results, report, change):
    put(results, "pseudo_perplexity", RESULTS["pseudo_perplexity"] | change)
    with pytest.raises(DataError, match=r"pseudo_perplexity\.json: the results are damaged"):
        report()


def test_folders_without_records_are_refused(tmp_path):
    with pytest.raises(MissingInputError, match=r"has none of pseudo_perplexity\.json, throughput\.json"):
        write_report([tmp_path], tmp_path / "report")
    assert not (tmp_path / "report").exists()


# --- figures


@pytest.fixture
def drawn(monkeypatch):
    """Figures, which are kept instead of saved."""
    figures = []
    monkeypatch.setattr("megatron_neobert.evaluation.plots.save_figure", lambda figure, _: figures.append(figure))
    return figures


def draw(path, name, label="tokens"):
    plot_curves(path, [Curve(name, [512, 1024], [3, 2])], x_label=label, y_label=label, title=label)
    return path.read_bytes()


def test_names_with_an_underscore_or_dollars_are_shown_as_they_are(tmp_path):
    """matplotlib hides labels that begin with an underscore, and reads text between dollars as TeX."""
    assert len({draw(tmp_path / "a.png", name) for name in ("_a", "_b", r"$\frac$", r"$\no$")}) == 4
    draw(tmp_path / "a.png", "a", label=r"$\frac$")


def test_band_of_a_single_length_is_visible(tmp_path):
    curve = Curve("a", [97], [3.0], [2.0], [4.0])
    plot_curves(tmp_path / "a.png", [curve], x_label="x", y_label="y", title="t", log_x=True, log_y=True)
    pixels = imread(tmp_path / "a.png")
    is_coloured = (pixels[..., :3].max(axis=2) - pixels[..., :3].min(axis=2)) > 0.1
    assert is_coloured.sum(axis=0).max() > 300, "a vertical line over half of the figure; a marker has 12 pixels"


def test_point_without_an_interval_is_hollow_and_the_title_says_so(tmp_path, drawn):
    put(tmp_path, "pseudo_perplexity")
    write_report([tmp_path], tmp_path / "report")
    (axes,) = drawn[0].axes
    (hollow,) = (line for line in axes.lines if line.get_markerfacecolor() == "white")
    assert hollow.get_xdata().tolist() == [100, 400]
    assert hollow.get_ydata().tolist() == pytest.approx([math.nan, 25.0], nan_ok=True)
    assert axes.get_title().endswith("\nbars: 95 %; hollow: too few documents")
    assert len(axes.get_legend().get_texts()) == 1


def test_axis_of_a_single_length_is_labelled_with_this_length_alone(tmp_path, drawn):
    for lengths in ([97], [97, 194]):
        curve = Curve("a", lengths, [3.0] * len(lengths))
        plot_curves(tmp_path / "a.png", [curve], x_label="x", y_label="y", title="t", log_x=True)
    single, several = (figure.axes[0] for figure in drawn)
    assert single.get_xticks().tolist() == [97] and several.get_xscale() == "log"
