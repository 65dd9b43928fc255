"""MTEB: tasks from stored data, the encoder, instructions, kept scores and their means."""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import mteb
import numpy as np
import pytest
import torch
from json_files import write_jsonl
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer
from unit.evaluation.embedding_inputs import make_encoder, replace_hub, write_card, write_hub

from megatron_neobert.errors import ConfigError, DataError, OutputError
from megatron_neobert.evaluation.mteb import (
    build_encoder,
    choose_tasks,
    describe_task,
    flatten,
    folder_of,
    load_task,
    measure_tasks,
    read_instructions,
    store_task,
    to_score,
)
from megatron_neobert.evaluation.options import MtebOptions
from megatron_neobert.evaluation.paper import MTEB_BENCHMARKS, MTEB_PAPER


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_encoder(tmp_path_factory.mktemp("encoder") / "tiny")


@pytest.fixture(scope="module")
def encoder(folder):
    return build(folder)


def evaluate(encoder, task):
    (result,) = mteb.evaluate(encoder, task, cache=None, co2_tracker=False, show_progress_bar=False).task_results
    return result


def measure(encoder, task, folder):
    """Return the score of a task with data in `folder`; a score in the cache of `folder` is not computed again."""
    options = MtebOptions(model=folder, output=folder, data_dir=folder, batch_size=8)
    name = task.metadata.name
    revision = str(describe_task(task, folder)["data"])
    with mock.patch("megatron_neobert.evaluation.mteb.build_encoder", return_value=encoder):
        return to_score(task, measure_tasks({name: task}, {name: revision}, folder / "cache", options, {}))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    folder = write_hub(tmp_path / "hub")
    replace_hub(monkeypatch, folder)
    return folder


def stored(*names, data_dir):
    tasks = by_name(*names)
    for task in tasks:
        store_task(data_dir, task)
    return tasks


@pytest.mark.parametrize("name", ["BIOSSES", "NFCorpus"])
def test_stored_task_has_the_same_scores_as_a_task_that_mteb_loads(name, encoder, hub, tmp_path, monkeypatch):
    (task,) = stored(name, data_dir=tmp_path)
    load_task(tmp_path, task)
    scores = evaluate(encoder, task).scores
    monkeypatch.chdir(hub)
    assert scores == evaluate(encoder, by_name(name)[0]).scores


def test_data_of_another_revision_is_missing(hub, tmp_path):
    (task,) = stored("BIOSSES", data_dir=tmp_path)
    assert describe_task(task, tmp_path)["task"] == "BIOSSES"
    folder_of(tmp_path, task).rename(tmp_path / "BIOSSES" / "older")
    assert describe_task(task, tmp_path) is None


@pytest.mark.parametrize("path", ["../../elsewhere", "/elsewhere", "~/elsewhere"])
def test_data_that_refers_to_other_files_is_refused(hub, tmp_path, path):
    (task,) = stored("BIOSSES", data_dir=tmp_path)
    write_card(folder_of(tmp_path, task), {"default": {"test": path}})
    with pytest.raises(DataError, match="which is not a file of its folder"):
        load_task(tmp_path, task)


def test_damaged_result_of_a_killed_command_is_measured_again(encoder, hub, tmp_path, capsys):
    (task,) = stored("BIOSSES", data_dir=tmp_path)
    results = measure(encoder, task, tmp_path)
    assert measure(None, task, tmp_path) == results, "no encoder is needed"
    assert "(kept)" in capsys.readouterr().out
    (path,) = (tmp_path / "cache").rglob("BIOSSES.json")
    for content in (b"", path.read_bytes()[:200], b"[]", b"{}"):
        path.write_bytes(content)
        assert measure(encoder, task, tmp_path) == results
        assert "(kept)" not in capsys.readouterr().out
    path.rename(tmp_path / "mine.json")
    path.symlink_to(tmp_path / "mine.json")
    with pytest.raises(OutputError, match="is a link, a pipe"):
        measure(encoder, task, tmp_path)


def test_score_that_is_not_a_number_is_missing(encoder, hub, tmp_path):
    rows = [{"sentence1": "wing", "sentence2": "wing", "score": 1.0}] * 4
    write_jsonl(hub / "mteb/biosses-sts/test.jsonl", rows)
    (task,) = stored("BIOSSES", data_dir=tmp_path)
    for model in (encoder, None):  # measured, then read from the cache
        score = measure(model, task, tmp_path)
        assert (score["score"], score["missing"]) == (None, "not a number: the score of BIOSSES")


def test_score_of_an_aggregate_is_the_mean_of_its_subtasks_and_missing_without_one():
    (task,) = by_name("CQADupstackRetrieval")
    names = [forum.metadata.name for forum in flatten([task])]
    scores = {name: number / 16 for number, name in enumerate(names)}
    assert to_score(task, scores)["score"] == pytest.approx(100 * (11 / 2) / 16)
    del scores[names[3]]
    assert to_score(task, scores)["missing"] == f"no data of {names[3]}"


# --- the encoder


TEXTS = ["wing flow", "the card of money of the bank", "gene", "heat food health cell gene wing flow the of"]


def build(folder, prompts=None, **options):
    return build_encoder(MtebOptions(model=folder, output=folder, data_dir=folder, **options), prompts or {})


def encode(folder, texts=TEXTS, **options):
    return build(folder, **options).model.encode(texts, batch_size=3)


def expected(folder, texts):
    """Return the mean states of plain transformers, for one text at a time and so without padding."""
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        states = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in texts]
    return np.stack([state.mean(0).numpy() for state in states])


def test_embedding_is_the_mean_of_the_token_states(folder):
    np.testing.assert_allclose(encode(folder), expected(folder, TEXTS), atol=2e-6)  # measured 4e-7, from padding


def encoded_texts(encoder, data_dir):
    """Evaluate NFCorpus, which has 3 queries and 9 documents, and return its texts with prompts and special tokens."""
    (task,) = stored("NFCorpus", data_dir=data_dir)
    load_task(data_dir, task)
    texts, decode = [], encoder.model.tokenizer.batch_decode
    encoder.model.register_forward_pre_hook(lambda _, inputs: texts.extend(decode(inputs[0]["input_ids"])))
    evaluate(encoder, task)
    return texts


@pytest.mark.parametrize(
    ("style", "start", "documents_without"),
    [("prefix", "[CLS] food money ", 9), ("paper", "[CLS] food money [SEP] [CLS] ", 0)],
)
def test_instruction_precedes_queries_and_in_style_paper_documents(
    folder, hub, tmp_path, style, start, documents_without
):
    (tmp_path / "file.yaml").write_text("types: {Retrieval: food money}")
    encoder = build(folder, read_instructions(tmp_path / "file.yaml", style, AutoTokenizer.from_pretrained(folder), []))
    texts = encoded_texts(encoder, tmp_path)
    assert len(texts) == 3 + 9
    assert sum(not text.startswith(start) for text in texts) == documents_without


def test_prompts_of_the_folder_precede_queries_and_documents_without_a_file_of_instructions(folder, hub, tmp_path):
    own = SentenceTransformer(
        str(folder), device="cpu", prompts={"query": "food ", "document": "gene ", "OTHER": "card "}
    )
    own.save_pretrained(str(tmp_path / "own"))
    encoder = build(tmp_path / "own")
    texts = encoded_texts(encoder, tmp_path)
    starts = [text.split()[1] for text in texts]
    assert (starts.count("food"), starts.count("gene")) == (3, 9)


def test_text_is_truncated_at_max_length_and_at_the_last_position_of_the_model(folder, capsys):
    long = " ".join(["wing"] * 200)
    for options, words, printed in (
        ({"max_length": 10}, 10 - 2, ""),
        ({}, 64 - 2, f"{folder}: texts are truncated after 64 tokens, not 1024"),
    ):
        truncated = expected(folder, [" ".join(["wing"] * words)] * 2)
        np.testing.assert_allclose(encode(folder, [long, long], **options), truncated, atol=2e-6)
        output = capsys.readouterr().out
        assert output.startswith(printed) and bool(output) == bool(printed)


# --- instructions and tasks


RECIPE = Path(__file__).resolve().parents[3] / "megatron_neobert" / "configs" / "evaluation" / "mteb_instructions.yaml"
TOKENIZER = SimpleNamespace(bos_token=None, cls_token="[CLS]", sep_token="[SEP]")


def by_name(*names, languages=("eng",)):
    return choose_tasks(MTEB_PAPER, names, languages)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "instructions.yaml"
    path.write_text("types: {Retrieval: Find it.}\ntasks: {FEVER: ''}\n")
    return path


def test_prompts_are_by_task_and_type_and_an_empty_instruction_gives_an_empty_prompt(file):
    expected = {"Retrieval": "Find it. ", "Retrieval-document": "", "FEVER": "", "FEVER-document": ""}
    assert read_instructions(file, "prefix", TOKENIZER, []) == expected
    paper = read_instructions(file, "paper", TOKENIZER, [])
    assert paper["Retrieval"] == paper["Retrieval-document"] == "Find it.[SEP] [CLS]"
    assert paper["FEVER"] == paper["FEVER-document"] == ""


def test_task_without_an_instruction_is_refused_by_name(file):
    tasks = [SimpleNamespace(metadata=SimpleNamespace(name="STS12", type="STS"))]
    with pytest.raises(ConfigError, match="no text for STS12"):
        read_instructions(file, "prefix", TOKENIZER, tasks)
    file.write_text("tasks: {STS12: ''}")
    read_instructions(file, "prefix", TOKENIZER, tasks)


@pytest.mark.parametrize("content", ["[1]", "a: {b: c}", "tasks: {b: 3}", "tasks: [x]", "{", ""])
def test_file_with_other_content_is_refused_by_name(content, tmp_path):
    (tmp_path / "bad.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        read_instructions(tmp_path / "bad.yaml", "prefix", TOKENIZER, [])


def test_recipe_has_an_instruction_for_every_task_of_both_english_benchmarks_and_no_unknown_name():
    tasks = [task for name in MTEB_BENCHMARKS for task in flatten(choose_tasks(name, (), ()))]
    prompts = read_instructions(RECIPE, "prefix", TOKENIZER, tasks)
    known = {name for task in tasks for name in (task.metadata.name, task.metadata.type)}
    assert {name.removesuffix("-document") for name in prompts} <= known


def test_task_by_name_has_the_benchmarks_settings_and_an_unknown_or_repeated_name_is_refused():
    (msmarco,) = by_name("MSMARCO")
    assert msmarco.eval_splits == ["dev"]
    with pytest.raises(ConfigError, match="did you mean 'SICK-R'"):
        by_name("SICKR")
    with pytest.raises(ConfigError, match="names a task twice"):
        by_name("STS12", "STS12")
