"""Tasks from files, from the folder that fetching fills, and their results that outlive a run."""

import json

import pytest

mteb = pytest.importorskip("mteb")

from mteb.mocks import ALL_MOCK_TASK_TEST_GRID  # noqa: E402
from unit.evaluation.mteb_inputs import (  # noqa: E402
    make_encoder,
    write_beir,
)

from megatron_neobert.errors import DataError, MissingInputError  # noqa: E402
from megatron_neobert.evaluation.ledger import open_ledger  # noqa: E402
from megatron_neobert.evaluation.models import LoadOptions  # noqa: E402
from megatron_neobert.evaluation.mteb import build_encoder, run_tasks, units_of  # noqa: E402
from megatron_neobert.evaluation.mteb_tasks import (  # noqa: E402
    flatten,
    load_task,
    local_task,
    store_task,
    stored_revision,
)
from megatron_neobert.evaluation.options import MtebOptions  # noqa: E402

KINDS = ("Classification", "Clustering", "PairClassification", "Reranking", "Retrieval", "STS", "Summarization")
MOCKS = [  # all in one language, and one that has subsets
    task
    for task in ALL_MOCK_TASK_TEST_GRID
    if task.metadata.modalities == ["text"]
    and task.metadata.type in KINDS
    and (not task.metadata.is_multilingual or task.metadata.type in ("STS", "Retrieval"))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_encoder(tmp_path_factory.mktemp("encoder") / "tiny")


@pytest.fixture(scope="module")
def encoder(folder):
    return build_encoder(MtebOptions(model=folder, output=folder, data_dir=folder), {}, LoadOptions())


def evaluate(encoder, task):
    (result,) = mteb.evaluate(encoder, task, cache=None, co2_tracker=False, show_progress_bar=False).task_results
    return result


def run(encoder, tasks, data_dir, output, **protocol):
    """The scores, computed if they are not in the ledger of the output."""
    options = MtebOptions(model=output, output=output, data_dir=data_dir, batch_size=8)
    units = units_of(flatten(tasks), data_dir, {"protocol": protocol})
    with open_ledger(output) as ledger:
        return run_tasks(tasks, units, ledger, options, lambda: encoder)


@pytest.mark.parametrize("mock", MOCKS, ids=lambda task: task.metadata.name)
def test_stored_task_gives_the_scores_of_the_one_that_was_loaded(mock, encoder, tmp_path):
    kind = type(mock)
    store_task(tmp_path, kind())
    again = kind()
    load_task(tmp_path, again)
    assert again.data_loaded
    first, second = evaluate(encoder, kind()), evaluate(encoder, again)
    assert json.dumps(second.scores) == json.dumps(first.scores)  # as text: some are nan


def test_what_loading_sets_on_a_task_is_stored_too(tmp_path):
    kind = type(next(task for task in MOCKS if task.metadata.type == "STS"))

    class Setting(kind):
        max_fraction_of_documents_to_embed = 0.5

        def load_data(self, **kwargs):
            super().load_data(**kwargs)
            self.max_fraction_of_documents_to_embed = None

    store_task(tmp_path, Setting())
    task = Setting()
    load_task(tmp_path, task)
    assert task.max_fraction_of_documents_to_embed is None


def test_data_of_another_revision_is_refused_before_anything_runs(tmp_path):
    task = type(MOCKS[0])()
    store_task(tmp_path, task)
    assert stored_revision(tmp_path, task) == task.metadata.revision
    about = tmp_path / "tasks" / task.metadata.name / "task.json"
    about.write_text(about.read_text().replace(task.metadata.revision, "older"))
    assert stored_revision(tmp_path, task) == "older"
    with pytest.raises(DataError, match="holds revision older"):
        units_of([task], tmp_path, {})


def test_tasks_without_data_have_no_score_and_name_what_is_missing(encoder, tmp_path):
    tasks = [mteb.get_task("CQADupstackRetrieval"), mteb.get_task("STS12"), type(MOCKS[0])()]
    store_task(tmp_path, type(MOCKS[0])())
    assert list(units_of(flatten(tasks), tmp_path, {}).values()).count(None) == 13
    scores = run(encoder, tasks, tmp_path, tmp_path / "out")
    assert [score.score is None for score in scores] == [True, True, False]
    assert scores[1].missing == "no data"
    assert scores[0].missing.count("Retrieval") == 12


def test_result_is_kept_until_data_or_settings_change(encoder, tmp_path, capsys):
    task = type(next(task for task in MOCKS if task.metadata.type == "STS"))
    store_task(tmp_path, task())

    def is_kept(encoder, **protocol):
        run(encoder, [task()], tmp_path, tmp_path / "out", **protocol)
        return "(kept)" in capsys.readouterr().out

    assert not is_kept(encoder)
    assert is_kept(None)  # no encoder: nothing to do
    assert not is_kept(encoder, dtype="bfloat16")
    about = next((tmp_path / "tasks").rglob("task.json"))
    about.write_text(about.read_text() + " ")
    assert not is_kept(encoder)


def test_score_that_is_not_a_number_is_missing(encoder, tmp_path):
    (tmp_path / "sts").mkdir()
    (tmp_path / "sts" / "test.tsv").write_text("sentence1\tsentence2\tscore\n" + "wing\twing\t1\n" * 4)
    (score,) = run(encoder, [local_task("sts", tmp_path)], tmp_path, tmp_path / "out")
    assert (score.score, score.missing) == (None, "not a number: the score of local:sts")


def test_document_that_repeats_its_query_is_found_first(encoder, tmp_path):
    write_beir(tmp_path / "beir")
    task = local_task("beir", tmp_path)
    assert evaluate(encoder, task).get_score() == 1.0  # nDCG@10
    task.load_data()
    task.dataset["default"]["test"]["relevant_docs"] = {f"q{i}": {f"d{i + 5}": 1} for i in range(4)}
    task.data_loaded = True
    assert evaluate(encoder, task).get_score() < 1.0


@pytest.mark.parametrize(
    ("files", "error", "said"),
    [
        ({}, MissingInputError, "is no folder with corpus.jsonl"),
        ({"test.tsv": "a\tb\n1\t2\n"}, DataError, "has the columns a, b, but no sentence1, sentence2, score"),
        ({"test.tsv": "sentence1\tsentence2\tscore\n"}, DataError, "has no rows"),
        ({"test.tsv": "sentence1\tsentence2\tscore\na\tb\thigh\n"}, DataError, "the score 'high' is no number"),
        ({"train.csv": "text,label\na,b\n", "test.csv": "text,label\na,c\n"}, DataError, "train.csv lacks: c"),
        ({"train.csv": "text,topic\na,b\n", "test.csv": "text,topic\na,b\n"}, DataError, "but no label"),
        ({"corpus.jsonl": "{}\n", "queries.jsonl": "", "qrels.tsv": ""}, DataError, "but no _id, text"),
        ({"corpus.jsonl": "x\n", "queries.jsonl": "", "qrels.tsv": ""}, DataError, "JSON parse error"),
    ],
)
def test_files_of_no_known_form_are_refused(files, error, said, tmp_path):
    (tmp_path / "mine").mkdir()
    for name, content in files.items():
        (tmp_path / "mine" / name).write_text(content)
    with pytest.raises(error, match=said):
        local_task("mine", tmp_path).load_data()
