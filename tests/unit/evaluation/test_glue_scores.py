"""Scores: metrics, grids, the best point of a grid, and the average over tasks."""

import statistics

import numpy as np
import pytest

from megatron_neobert.evaluation.fine_tune import Outcome, Point
from megatron_neobert.evaluation.glue import TASKS, average_tasks, choose_grid, compute_scores
from megatron_neobert.evaluation.ledger import open_ledger, read_record
from megatron_neobert.evaluation.models import fingerprint
from megatron_neobert.evaluation.options import GlueOptions
from megatron_neobert.evaluation.sweep import GRIDS, summarise, write_results

SETTINGS = {"protocol": {"epochs": 10, "limit": None}, "grid": {}, "seeds": [0], "data": {}, "from_mnli": False}
LABELS = np.array([1, 1, 1, 0, 0, 0, 0, 1])
PREDICTED = np.array([1, 1, 0, 0, 0, 1, 0, 1])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("cola", {"matthews": 0.5}),
        ("mrpc", {"accuracy": 6 / 8, "f1": 6 / 8}),
        ("qqp", {"accuracy": 6 / 8, "f1": 6 / 8}),
        ("rte", {"accuracy": 6 / 8}),
    ],
)
def test_classification_scores_are_the_metrics_of_the_task(task, expected):
    assert compute_scores(TASKS[task], np.eye(2)[PREDICTED], LABELS) == pytest.approx(expected)


def test_stsb_scores_are_pearson_and_spearman_correlations():
    labels, predicted = np.array([0.0, 1.0, 2.5, 4.0, 5.0]), np.array([0.3, 0.1, 2.0, 9.0, 4.0])
    expected = {"pearson": np.corrcoef(labels, predicted)[0, 1], "spearman": 0.8}
    assert compute_scores(TASKS["stsb"], predicted[:, None], labels) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("task", "logits", "warning"),
    [
        ("stsb", np.full((8, 1), 2.0), "every prediction is"),
        ("cola", np.tile([0.0, 1.0], (8, 1)), "every prediction is"),
        ("mrpc", np.full((8, 2), np.nan), "not finite"),
        ("stsb", np.full((8, 1), np.inf), "not finite"),
    ],
)
def test_undefined_metrics_count_as_0_with_a_warning(task, logits, warning):
    with pytest.warns(UserWarning, match=warning):
        assert set(compute_scores(TASKS[task], logits, LABELS).values()) == {0.0}


# --- results


def outcome(score: float, task: str = "rte") -> Outcome:
    scores = dict.fromkeys(TASKS[task].metrics, score)
    return Outcome(scores=scores, average=score, best_step=1, steps=2, seconds=60.0)


def point(batch_size: int, seed: int) -> Point:
    return Point(batch_size=batch_size, learning_rate=1e-5, weight_decay=1e-2, seed=seed)


def result(task: str = "rte", *scores: float):
    return summarise({point(8, seed): outcome(score, task) for seed, score in enumerate(scores or [0.5])})


def write(folder, results, *, settings=None, model=None):
    """Add finished sweeps to ledgers, write the record of a model that is only a config.json, and return the results.

    Args:
        settings: Settings of single tasks; the others have SETTINGS.
        model: Fingerprint in the ledger; default: the fingerprint of the folder.
    """
    (folder / "config.json").write_text("{}")
    for task, task_result in results.items():
        with open_ledger(folder / "glue" / task) as ledger:
            unit = {"sweep": {}, "task": task, "model": model or fingerprint(folder)}
            task_settings = (settings or {}).get(task, SETTINGS)
            ledger.add(unit, {"kept": None, "result": task_result, "settings": task_settings})
    write_results("glue", folder, folder, average_tasks)
    return read_record(folder / "glue.json")["results"]


def options(**changes):
    return GlueOptions(model="m", data_dir="d", output="o", **changes)


def test_papers_grid_has_60_points_and_its_ablations_6():
    assert [len(GRIDS[name].points(seeds=[0])) for name in ("paper", "small")] == [5 * 6 * 2, 2 * 3]
    assert len(set(GRIDS["paper"].points(seeds=[0, 1, 2]))) == 3 * 60


def test_default_is_the_papers_best_point_and_options_replace_its_values():
    assert choose_grid(options(), "sst2").points([7]) == [
        Point(batch_size=32, learning_rate=8e-6, weight_decay=1e-2, seed=7)
    ]
    points = choose_grid(options(batch_size=(4, 8)), "sst2").points([0])
    assert [(point.batch_size, point.learning_rate) for point in points] == [(4, 8e-6), (8, 8e-6)]


def test_point_with_the_best_mean_wins_and_not_the_point_with_the_best_run():
    scores = {point(8, 0): 0.9, point(8, 1): 0.1, point(16, 0): 0.6, point(16, 1): 0.7}
    summary = summarise({run: outcome(score) for run, score in scores.items()})
    assert (summary["best_point"]["batch_size"], summary["seeds"], summary["points"]) == (16, [0, 1], 2)
    assert summary["score"] == {"mean": pytest.approx(0.65), "sd": pytest.approx(statistics.stdev([0.6, 0.7]))}
    assert summary["seconds"] == 4 * 60


def test_average_is_over_the_papers_eight_tasks(tmp_path):
    results = {task: result(task, number / 10) for number, task in enumerate(TASKS)}
    record = write(tmp_path, results)
    assert (record["average"], record["no_average"]) == (pytest.approx(sum(range(8)) / 10 / 8), None)
    del results["mnli"]
    assert average_tasks(results, dict.fromkeys(results, SETTINGS))["no_average"] == "7 of 8 tasks"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"protocol": {"epochs": 3, "limit": None}}, "tasks differ in protocol"),
        ({"seeds": [0, 1]}, "tasks differ in seeds"),
        ({"from_mnli": True}, "tasks differ in start from MNLI"),
    ],
)
def test_tasks_with_different_settings_have_no_average_and_the_reason_is_shown(tmp_path, change, reason):
    record = write(tmp_path, {task: result(task) for task in TASKS}, settings={"rte": SETTINGS | change})
    assert (record["average"], record["no_average"]) == (None, reason)
    assert f"– ({reason})" in (tmp_path / "glue.md").read_text()


def test_record_has_results_of_earlier_commands_but_not_of_other_weights(tmp_path):
    write(tmp_path, {"stsb": result("stsb", 0.25, 0.5)})
    write(tmp_path, {"rte": result()}, model="other")
    assert list(write(tmp_path, {"cola": result("cola")})["tasks"]) == ["cola", "stsb"]
