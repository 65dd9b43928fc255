"""MTEB: tasks from local files and from stored data, the encoder, instructions, kept scores and their means."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

mteb = pytest.importorskip("mteb")

from mteb.mocks import ALL_MOCK_TASK_TEST_GRID  # noqa: E402
from sentence_transformers import SentenceTransformer  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer  # noqa: E402
from transformers import AutoModel, AutoTokenizer  # noqa: E402
from unit.evaluation.mteb_inputs import make_encoder, write_beir  # noqa: E402

from megatron_neobert.errors import ConfigError, DataError, MissingInputError  # noqa: E402
from megatron_neobert.evaluation.ledger import open_ledger  # noqa: E402
from megatron_neobert.evaluation.models import LoadOptions  # noqa: E402
from megatron_neobert.evaluation.mteb import (  # noqa: E402
    TaskScore,
    build_encoder,
    build_units,
    read_instructions,
    require_instructions,
    run_tasks,
    to_results,
)
from megatron_neobert.evaluation.mteb_tasks import (  # noqa: E402
    choose_tasks,
    flatten,
    load_task,
    local_task,
    store_task,
    stored_revision,
)
from megatron_neobert.evaluation.options import MtebOptions  # noqa: E402
from megatron_neobert.evaluation.paper import MTEB_BENCHMARKS, MTEB_PAPER  # noqa: E402

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
def folder(tmp_path_factory):
    return make_encoder(tmp_path_factory.mktemp("encoder") / "tiny")


@pytest.fixture(scope="module")
def encoder(folder):
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


# --- the encoder


TEXTS = ["wing flow", "the card of money of the bank", "gene", "heat food health cell gene wing flow the of"]


def build(folder, prompts=None, **options):
    return build_encoder(
        MtebOptions(model=folder, output=folder, data_dir=folder, **options), prompts or {}, LoadOptions()
    )


def encode(folder, texts=TEXTS, **options):
    return build(folder, **options).model.encode(texts, batch_size=3)


def expected(folder, texts, pooling):
    """Return the pooled states of plain transformers, for one text at a time and so without padding."""
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        states = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in texts]
    return np.stack([(state.mean(0) if pooling == "mean" else state[0]).numpy() for state in states])


def test_embedding_is_the_mean_of_the_token_states_or_the_folders_pooling(folder, tmp_path):
    # Measured 4e-7, because batches are padded. The two poolings differ by more than 0.1.
    np.testing.assert_allclose(encode(folder), expected(folder, TEXTS, "mean"), atol=2e-6)
    modules = [Transformer(str(folder)), Pooling(32, "cls")]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(tmp_path))
    np.testing.assert_allclose(encode(tmp_path), expected(folder, TEXTS, "cls"), atol=2e-6)
    assert np.abs(encode(folder) - encode(tmp_path)).max() > 0.1


@pytest.mark.parametrize(
    ("style", "start", "documents_without"),
    [("prefix", "[CLS] food money ", 12), ("paper", "[CLS] food money [SEP] [CLS] ", 0)],
)
def test_instruction_precedes_queries_and_in_style_paper_documents(folder, tmp_path, style, start, documents_without):
    write_beir(tmp_path / "beir")  # 4 queries and 12 documents
    (tmp_path / "file.yaml").write_text("types: {Retrieval: food money}")
    encoder = build(folder, read_instructions(tmp_path / "file.yaml", style, AutoTokenizer.from_pretrained(folder)))
    texts, decode = [], encoder.model.tokenizer.batch_decode
    encoder.model.register_forward_pre_hook(lambda _, inputs: texts.extend(decode(inputs[0]["input_ids"])))
    mteb.evaluate(encoder, local_task("beir", tmp_path), cache=None, co2_tracker=False, show_progress_bar=False)
    assert len(texts) == 4 + 12
    assert sum(not text.startswith(start) for text in texts) == documents_without


def test_text_is_truncated_at_max_length_and_at_the_last_position_of_the_model(folder, capsys):
    long = " ".join(["wing"] * 200)
    for options, words, printed in (
        ({"max_length": 10}, 10 - 2, ""),
        ({}, 64 - 2, f"{folder}: texts are truncated after 64 tokens, not 1024"),
    ):
        truncated = expected(folder, [" ".join(["wing"] * words)] * 2, "mean")
        np.testing.assert_allclose(encode(folder, [long, long], **options), truncated, atol=2e-6)
        output = capsys.readouterr().out
        assert output.startswith(printed) and bool(output) == bool(printed)


# --- instructions and tasks


RECIPE = Path(__file__).resolve().parents[3] / "megatron_neobert" / "configs" / "evaluation" / "mteb_instructions.yaml"
TOKENIZER = SimpleNamespace(bos_token=None, cls_token="[CLS]", sep_token="[SEP]")


def by_name(*names, languages=("eng",)):
    return choose_tasks(MTEB_PAPER, names, languages, Path())


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "instructions.yaml"
    path.write_text("types: {Retrieval: Find it.}\ntasks: {FEVER: ''}\n")
    return path


def test_prompts_are_by_task_and_type_and_an_empty_instruction_gives_an_empty_prompt(file):
    expected = {"Retrieval": "Find it. ", "Retrieval-document": "", "FEVER": "", "FEVER-document": ""}
    assert read_instructions(file, "prefix", TOKENIZER) == expected
    paper = read_instructions(file, "paper", TOKENIZER)
    assert paper["Retrieval"] == paper["Retrieval-document"] == "Find it.[SEP] [CLS]"
    assert paper["FEVER"] == paper["FEVER-document"] == ""


def test_task_without_an_instruction_is_refused_by_name(file):
    tasks = [SimpleNamespace(metadata=SimpleNamespace(name="STS12", type="STS"))]
    with pytest.raises(ConfigError, match="no text for STS12"):
        require_instructions(read_instructions(file, "prefix", TOKENIZER), tasks)
    file.write_text("tasks: {STS12: ''}")
    require_instructions(read_instructions(file, "prefix", TOKENIZER), tasks)


@pytest.mark.parametrize("content", ["[1]", "a: {b: c}", "tasks: {b: 3}", "tasks: [x]", "{", ""])
def test_file_with_other_content_is_refused_by_name(content, tmp_path):
    (tmp_path / "bad.yaml").write_text(content)
    with pytest.raises(DataError, match=r"bad\.yaml"):
        read_instructions(tmp_path / "bad.yaml", "prefix", TOKENIZER)


def test_recipe_has_an_instruction_for_every_task_of_both_english_benchmarks_and_no_unknown_name():
    prompts = read_instructions(RECIPE, "prefix", TOKENIZER)
    tasks = [task for name in MTEB_BENCHMARKS for task in flatten(choose_tasks(name, (), (), Path()))]
    require_instructions(prompts, tasks)
    known = {name for task in tasks for name in (task.metadata.name, task.metadata.type)}
    assert {name.removesuffix("-document") for name in prompts} <= known


def test_task_by_name_has_the_benchmarks_settings_and_an_unknown_or_repeated_name_is_refused():
    (msmarco,) = by_name("MSMARCO")
    assert msmarco.eval_splits == ["dev"]
    with pytest.raises(ConfigError, match="did you mean 'SICK-R'"):
        by_name("SICKR")
    with pytest.raises(ConfigError, match="names a task twice"):
        by_name("STS12", "STS12")
