"""Grids, and the tables that their runs are condensed to."""

import csv
import statistics

import pytest

from megatron_neobert.errors import ConfigError
from megatron_neobert.evaluation.glue.results import (
    describe,
    load_results,
    paper_average,
    save_result,
    summarise,
    why_no_average,
    write_results,
)
from megatron_neobert.evaluation.glue.run import GRIDS, choose_grid
from megatron_neobert.evaluation.glue.tasks import PAPER_TASKS, TASKS
from megatron_neobert.evaluation.glue.training import Outcome, Point
from megatron_neobert.evaluation.records import read_record

SETTINGS = {"protocol": {"epochs": 10, "limit": None}}


def outcome(score: float, task: str = "rte") -> Outcome:
    scores = dict.fromkeys(TASKS[task].metrics, score)
    return Outcome(scores=scores, average=score, best_step=1, steps=2, seconds=60.0)


def point(batch_size: int, seed: int) -> Point:
    return Point(batch_size=batch_size, learning_rate=1e-5, weight_decay=1e-2, seed=seed)


def result(task: str = "rte", *scores: float, settings=SETTINGS, from_mnli=False, kept=None):
    outcomes = {point(8, seed): outcome(score, task) for seed, score in enumerate(scores or [0.5])}
    return summarise(task, outcomes, from_mnli=from_mnli, kept=kept, settings=settings)


def test_papers_grid_has_60_points_and_its_ablations_6():
    assert [len(GRIDS[name].points(seeds=[0])) for name in ("paper", "small")] == [5 * 6 * 2, 2 * 3]
    assert len(set(GRIDS["paper"].points(seeds=[0, 1, 2]))) == 3 * 60


def test_best_point_is_the_papers_and_single_values_can_be_replaced():
    assert choose_grid("best", "sst2").points([7]) == [
        Point(batch_size=32, learning_rate=8e-6, weight_decay=1e-2, seed=7)
    ]
    replaced = choose_grid("best", "sst2", batch_sizes=[4, 8])
    assert [(p.batch_size, p.learning_rate) for p in replaced.points([0])] == [(4, 8e-6), (8, 8e-6)]
    with pytest.raises(ConfigError, match="no best point for wnli"):
        choose_grid("best", "wnli")
    assert (
        len(choose_grid("best", "wnli", batch_sizes=[4], learning_rates=[1e-5], weight_decays=[0.0]).points([0])) == 1
    )


def test_point_with_the_best_mean_wins_not_the_one_with_the_best_run():
    outcomes = {
        point(8, 0): outcome(0.9),
        point(8, 1): outcome(0.1),
        point(16, 0): outcome(0.6),
        point(16, 1): outcome(0.7),
    }
    found = summarise("rte", outcomes, from_mnli=True, kept=None, settings=SETTINGS)
    assert (found.batch_size, found.seeds, found.points) == (16, (0, 1), 2)
    assert found.score.mean == pytest.approx(0.65)
    assert found.score.sd == pytest.approx(statistics.stdev([0.6, 0.7]))
    assert found.seconds == 4 * 60


def test_average_is_of_the_papers_eight_tasks_by_one_protocol():
    eight = [result(task, number / 10) for number, task in enumerate(PAPER_TASKS)]
    assert paper_average([*eight, result("wnli", 1.0)]) == pytest.approx(sum(range(8)) / 10 / 8)
    assert why_no_average(eight) is None
    assert why_no_average(eight[1:]) == "7 of 8 tasks"


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (result("rte", 0.0, settings={"protocol": {"epochs": 3, "limit": None}}), "protocols differ"),
        (result("rte", 0.0, 0.1), "seeds differ"),
        (result("rte", 0.0, from_mnli=True), "only some of the tasks that may start from MNLI do"),
    ],
)
def test_tasks_that_were_not_run_alike_have_no_average_and_the_reason_is_said(tmp_path, other, reason):
    results = [other if task == "rte" else result(task) for task in PAPER_TASKS]
    assert why_no_average(results) == reason
    assert f"No average ({reason})" in describe("mine", results)
    (tmp_path / "config.json").write_text("{}")
    write_results(tmp_path, tmp_path, results, device="cpu")
    found = read_record(tmp_path / "glue.json")["results"]
    assert (found["average"], found["no_average"]) == (None, reason)


def test_weights_of_another_point_than_the_tables_are_named():
    name = point(8, 0).name
    assert "weights kept" not in describe("mine", [result(kept=name)])
    other = point(16, 0).name
    assert f"RTE: the weights kept are of {other}, the best single run" in describe("mine", [result(kept=other)])


def test_markdown_has_the_measured_row_above_the_reported_ones_and_names_what_was_not_run():
    lines = describe("mine", [result("rte", 0.5, 0.6)]).splitlines()
    assert lines[0].split(" | ")[1:5] == ["MNLI", "QNLI", "QQP", "RTE"]
    assert (
        lines[2]
        == "| **mine** (measured) | " + " | ".join(["not run"] * 3 + ["55.0 ± 7.1"] + ["not run"] * 4) + " | none |"
    )
    assert "| NeoBERT-4096 (reported) | 89.0 | 93.7 | 90.7 | 91.3 | 95.6 | 93.4 | 66.2 | 91.8 | 89.0 |" in lines
    assert any("table 3" in line for line in lines)


def test_csv_has_a_line_per_task_and_metric_in_percent(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    write_results(tmp_path, tmp_path, [result("mrpc", 0.5, 0.6)], device="cpu")
    rows = list(csv.DictReader((tmp_path / "glue.csv").read_text().splitlines()))
    assert [row["metric"] for row in rows] == ["average", "accuracy", "f1"]
    assert (rows[1]["mean"], rows[1]["sd"], rows[1]["batch_size"]) == ("55.000", "7.071", "8")


def test_results_come_back_as_they_were_and_only_those_of_the_model(tmp_path):
    kept = result("stsb", 0.25, 0.5)
    for task, model in (("stsb", "this"), ("rte", "another")):
        (tmp_path / task).mkdir()
        save_result(tmp_path / task / "result.json", kept, model=model)
    assert load_results(tmp_path, model="this") == [kept]


def test_table_of_a_quick_look_says_so():
    limited = result(settings={"protocol": {"epochs": 10, "limit": 2_000}})
    assert "at most 2,000 rows" in describe("mine", [limited])
    assert "quick look" not in describe("mine", [result()])
