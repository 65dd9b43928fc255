"""Means by category: complete or not given."""

from megatron_neobert.evaluation.mteb import TaskScore, to_results


def score(name, type_, value, missing=None):
    return TaskScore(name=name, type=type_, metric="accuracy", score=value, missing=missing)


COMPLETE = [score("b", "STS", 30.0), score("a", "Classification", 50.0), score("c", "Classification", 70.0)]
GAPS = [*COMPLETE, score("d", "STS", None, "no data")]


def test_average_is_over_tasks_and_not_over_categories():
    results = to_results(COMPLETE)
    assert results["average"] == {"value": (30.0 + 50.0 + 70.0) / 3, "there": 3, "expected": 3}
    assert results["categories"]["Classification"]["value"] == (50.0 + 70.0) / 2


def test_category_with_a_missing_task_has_no_mean_and_names_the_task():
    results = to_results(GAPS)
    assert results["categories"]["STS"] == {"value": None, "there": 1, "expected": 2}
    assert results["average"] == {"value": None, "there": 3, "expected": 4}
    assert results["categories"]["Classification"]["value"] == 60.0
    assert results["missing"] == ["d"]


def test_categories_come_in_the_order_of_the_papers_table():
    kinds = ["Summarization", "STS", "Retrieval", "Reranking", "PairClassification", "Clustering", "Classification"]
    scores = [score(kind, kind, 1.0) for kind in ["BitextMining", *kinds]]
    assert list(to_results(scores)["categories"]) == [*reversed(kinds), "BitextMining"]
