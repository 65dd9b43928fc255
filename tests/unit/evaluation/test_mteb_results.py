"""Means over tasks and categories are complete, or absent."""

from megatron_neobert.evaluation.mteb import TaskScore, to_results


def score(name, type_, value, missing=None):
    return TaskScore(name=name, type=type_, metric="accuracy", score=value, missing=missing)


COMPLETE = [score("b", "STS", 30.0), score("a", "Classification", 50.0), score("c", "Classification", 70.0)]


def test_average_is_over_tasks_and_categories_are_in_the_papers_order():
    results = to_results([score("e", "BitextMining", 10.0), *COMPLETE])
    assert results["average"] == {"value": (10.0 + 30.0 + 50.0 + 70.0) / 4, "there": 4, "expected": 4}
    assert results["categories"]["Classification"]["value"] == (50.0 + 70.0) / 2
    assert list(results["categories"]) == ["Classification", "STS", "BitextMining"]


def test_category_with_a_missing_task_has_no_mean_and_the_task_is_listed():
    results = to_results([*COMPLETE, score("d", "STS", None, "no data")])
    assert results["categories"]["STS"] == {"value": None, "there": 1, "expected": 2}
    assert results["average"] == {"value": None, "there": 3, "expected": 4}
    assert results["categories"]["Classification"]["value"] == 60.0
    assert results["missing"] == ["d"]
