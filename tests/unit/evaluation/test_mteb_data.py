"""MTEB tasks from local files and from stored data, scores that are kept between commands, and their means."""

import json

import pytest

mteb = pytest.importorskip("mteb")

from mteb.mocks import ALL_MOCK_TASK_TEST_GRID  # noqa: E402
from unit.evaluation.mteb_inputs import make_encoder, write_beir  # noqa: E402

from megatron_neobert.errors import DataError, MissingInputError  # noqa: E402
from megatron_neobert.evaluation.ledger import open_ledger  # noqa: E402
from megatron_neobert.evaluation.models import LoadOptions  # noqa: E402
from megatron_neobert.evaluation.mteb import TaskScore, build_encoder, build_units, run_tasks, to_results  # noqa: E402
from megatron_neobert.evaluation.mteb_tasks import (  # noqa: E402
    flatten,
    load_task,
    local_task,
    store_task,
    stored_revision,
)
from megatron_neobert.evaluation.options import MtebOptions  # noqa: E402

TYPES = ("Classification", "Clustering", "PairClassification", "Reranking", "Retrieval", "STS", "Summarization")
MOCKS = [  # monolingual tasks of every type, and multilingual tasks of two types
    type(task)
    for task in ALL_MOCK_TASK_TEST_GRID
    if task.metadata.modalities == ["text"]
    and task.metadata.type in TYPES
    and (not task.metadata.is_multilingual or task.metadata.type in ("STS", "Retrieval"))
]
STS = next(mock for mock in MOCKS if mock.metadata.type == "STS")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = make_encoder(tmp_path_factory.mktemp("encoder") / "tiny")
    return build_encoder(MtebOptions(model=folder, output=folder, data_dir=folder), {}, LoadOptions())


def evaluate(encoder, task):
    (result,) = mteb.evaluate(encoder, task, cache=None, co2_tracker=False, show_progress_bar=False).task_results
    return result


def run(encoder, tasks, folder, **protocol):
    """Return the scores of tasks with data in `folder`; a score in the ledger of `folder` is not computed again."""
    options = MtebOptions(model=folder, output=folder, data_dir=folder, batch_size=8)
    units = build_units(flatten(tasks), folder, {"protocol": protocol})
    with open_ledger(folder / "out") as ledger:
        return run_tasks(tasks, units, ledger, options, lambda: encoder)


@pytest.mark.parametrize("mock", MOCKS, ids=lambda mock: mock.metadata.name)
def test_stored_task_has_the_same_scores_as_a_loaded_task(mock, encoder, tmp_path):
    store_task(tmp_path, mock())
    stored = mock()
    load_task(tmp_path, stored)
    assert stored.data_loaded
    # Compared as text, because some scores are NaN.
    assert json.dumps(evaluate(encoder, stored).scores) == json.dumps(evaluate(encoder, mock()).scores)


def test_data_of_another_revision_is_refused(tmp_path):
    task = STS()
    store_task(tmp_path, task)
    assert stored_revision(tmp_path, task) == task.metadata.revision
    about = tmp_path / "tasks" / task.metadata.name / "task.json"
    about.write_text(about.read_text().replace(task.metadata.revision, "older"))
    with pytest.raises(DataError, match="holds revision older"):
        build_units([task], tmp_path, {})


def test_score_is_kept_until_data_or_settings_change(encoder, tmp_path, capsys):
    store_task(tmp_path, STS())

    def is_kept(encoder, **protocol):
        run(encoder, [STS()], tmp_path, **protocol)
        return "(kept)" in capsys.readouterr().out

    assert not is_kept(encoder)
    assert is_kept(None), "no encoder is needed"
    assert not is_kept(encoder, dtype="bfloat16")
    about = next((tmp_path / "tasks").rglob("task.json"))
    about.write_text(about.read_text() + " ")
    assert not is_kept(encoder)


def test_score_that_is_not_a_number_is_missing(encoder, tmp_path):
    (tmp_path / "sts").mkdir()
    (tmp_path / "sts" / "test.tsv").write_text("sentence1\tsentence2\tscore\n" + "wing\twing\t1\n" * 4)
    (score,) = run(encoder, [local_task("sts", tmp_path)], tmp_path)
    assert (score.score, score.missing) == (None, "not a number: the score of local:sts")


def test_local_retrieval_ranks_documents_by_similarity(encoder, tmp_path):
    write_beir(tmp_path / "beir")
    assert evaluate(encoder, local_task("beir", tmp_path)).get_score() == 1.0  # nDCG@10
    wrong = "".join(f"q{i}\td{i + 5}\t1\n" for i in range(4))
    (tmp_path / "beir" / "qrels.tsv").write_text(f"query-id\tcorpus-id\tscore\n{wrong}")
    assert evaluate(encoder, local_task("beir", tmp_path)).get_score() < 1.0


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({}, MissingInputError, "is not a folder with corpus.jsonl"),
        ({"test.tsv": "a\tb\n1\t2\n"}, DataError, "has the columns a, b, but no sentence1, sentence2, score"),
        ({"test.tsv": "sentence1\tsentence2\tscore\na\tb\thigh\n"}, DataError, "the score 'high' is not a number"),
        ({"train.csv": "text,label\na,b\n", "test.csv": "text,label\na,c\n"}, DataError, "train.csv lacks: c"),
        ({"corpus.jsonl": "{}\n", "queries.jsonl": "", "qrels.tsv": ""}, DataError, "but no _id, text"),
        ({"README.md": "---\nconfigs: [\n---\n"}, DataError, "cannot be read"),
    ],
)
def test_local_files_of_another_format_are_refused(files, error, message, tmp_path):
    (tmp_path / "mine").mkdir()
    for name, content in files.items():
        (tmp_path / "mine" / name).write_text(content)
    with pytest.raises(error, match=message):
        local_task("mine", tmp_path).load_data()


# --- means


def score(name, type_, value, missing=None):
    return TaskScore(name=name, type=type_, metric="accuracy", score=value, missing=missing)


COMPLETE = [score("b", "STS", 30.0), score("a", "Classification", 50.0), score("c", "Classification", 70.0)]


def test_average_is_over_tasks_and_categories_are_in_the_papers_order():
    results = to_results([score("e", "BitextMining", 10.0), *COMPLETE])
    assert results["average"] == {"value": (10.0 + 30.0 + 50.0 + 70.0) / 4, "there": 4, "expected": 4}
    assert results["categories"]["Classification"]["value"] == (50.0 + 70.0) / 2
    assert list(results["categories"]) == ["Classification", "STS", "BitextMining"]
