"""Grids, and the tables that their runs are condensed to."""

import statistics

import pytest

from megatron_neobert.evaluation.fine_tune import Outcome, Point
from megatron_neobert.evaluation.glue import TASKS, average_tasks, choose_grid
from megatron_neobert.evaluation.ledger import open_ledger, read_record
from megatron_neobert.evaluation.models import fingerprint
from megatron_neobert.evaluation.options import GlueOptions
from megatron_neobert.evaluation.sweep import GRIDS, summarise, write_results

SETTINGS = {"protocol": {"epochs": 10, "limit": None}, "grid": {}, "seeds": [0], "data": {}, "from_mnli": False}


def outcome(score: float, task: str = "rte") -> Outcome:
    scores = dict.fromkeys(TASKS[task].metrics, score)
    return Outcome(scores=scores, average=score, best_step=1, steps=2, seconds=60.0)


def point(batch_size: int, seed: int) -> Point:
    return Point(batch_size=batch_size, learning_rate=1e-5, weight_decay=1e-2, seed=seed)


def result(task: str = "rte", *scores: float):
    outcomes = {point(8, seed): outcome(score, task) for seed, score in enumerate(scores or [0.5])}
    return summarise(outcomes)


def write(folder, results, settings=None, *, model=None):
    """Write the record of a model that consists of a config, from the sweeps of its tasks."""
    (folder / "config.json").write_text("{}")
    for task, one in results.items():
        with open_ledger(folder / "glue" / task) as ledger:
            unit = {"sweep": {}, "task": task, "model": model or fingerprint(folder)}
            own = (settings or {}).get(task, SETTINGS)
            ledger.add(unit, {"kept": None, "result": one, "settings": own})
    write_results("glue", folder, folder, average_tasks)
    return read_record(folder / "glue.json")["results"]


def options(**given):
    return GlueOptions(model="m", data_dir="d", output="o", **given)


def test_papers_grid_has_60_points_and_its_ablations_6():
    assert [len(GRIDS[name].points(seeds=[0])) for name in ("paper", "small")] == [5 * 6 * 2, 2 * 3]
    assert len(set(GRIDS["paper"].points(seeds=[0, 1, 2]))) == 3 * 60


def test_best_point_is_the_papers_and_single_values_can_be_replaced():
    assert choose_grid(options(), "sst2").points([7]) == [
        Point(batch_size=32, learning_rate=8e-6, weight_decay=1e-2, seed=7)
    ]
    replaced = choose_grid(options(batch_size=(4, 8)), "sst2")
    assert [(p.batch_size, p.learning_rate) for p in replaced.points([0])] == [(4, 8e-6), (8, 8e-6)]


def test_point_with_the_best_mean_wins_not_the_one_with_the_best_run():
    outcomes = {
        point(8, 0): outcome(0.9),
        point(8, 1): outcome(0.1),
        point(16, 0): outcome(0.6),
        point(16, 1): outcome(0.7),
    }
    found = summarise(outcomes)
    assert (found["best_point"]["batch_size"], found["seeds"], found["points"]) == (16, [0, 1], 2)
    assert found["score"] == {"mean": pytest.approx(0.65), "sd": pytest.approx(statistics.stdev([0.6, 0.7]))}
    assert found["seconds"] == 4 * 60


def test_average_is_of_the_papers_eight_tasks_by_one_protocol(tmp_path):
    results = {task: result(task, number / 10) for number, task in enumerate(TASKS)}
    found = write(tmp_path, results)
    assert found["average"] == pytest.approx(sum(range(8)) / 10 / 8)
    assert found["no_average"] is None
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
def test_tasks_that_were_not_run_alike_have_no_average_and_the_reason_is_given(tmp_path, change, reason):
    found = write(tmp_path, {task: result(task) for task in TASKS}, {"rte": SETTINGS | change})
    assert (found["average"], found["no_average"]) == (None, reason)
    assert f"– ({reason})" in (tmp_path / "glue.md").read_text()


def test_results_of_earlier_commands_are_in_the_record_and_those_of_other_weights_are_not(tmp_path):
    write(tmp_path, {"stsb": result("stsb", 0.25, 0.5)})
    write(tmp_path, {"rte": result()}, model="other")
    assert list(write(tmp_path, {"cola": result("cola")})["tasks"]) == ["cola", "stsb"]
