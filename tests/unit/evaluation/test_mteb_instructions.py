"""Which text stands before which, and what the file in examples/ covers."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

mteb = pytest.importorskip("mteb")

from megatron_neobert.errors import ConfigError, DataError  # noqa: E402
from megatron_neobert.evaluation.mteb import read_instructions, refuse_gaps  # noqa: E402
from megatron_neobert.evaluation.mteb_tasks import choose_tasks, flatten  # noqa: E402
from megatron_neobert.evaluation.paper import MTEB_BENCHMARKS, MTEB_PAPER  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[3] / "megatron_neobert" / "configs" / "evaluation" / "mteb_instructions.yaml"
TOKENIZER = SimpleNamespace(bos_token=None, cls_token="[CLS]", sep_token="[SEP]")


def by_name(*names, languages=("eng",)):
    return choose_tasks(MTEB_PAPER, names, languages, Path())


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "instructions.yaml"
    path.write_text("types: {Retrieval: Find it.}\ntasks: {FEVER: Check the claim.}\n")
    return path


def test_texts_are_by_task_and_type_and_an_empty_one_puts_nothing_before_a_text(file):
    file.write_text("types: {Retrieval: Find it.}\ntasks: {FEVER: ''}\n")
    expected = {"Retrieval": "Find it. ", "Retrieval-document": "", "FEVER": "", "FEVER-document": ""}
    assert read_instructions(file, "prefix", TOKENIZER) == expected
    paper = read_instructions(file, "paper", TOKENIZER)
    assert paper["Retrieval"] == paper["Retrieval-document"] == "Find it.[SEP] [CLS]"
    assert paper["FEVER"] == paper["FEVER-document"] == ""


def test_task_without_an_instruction_is_refused_by_name(file):
    tasks = [SimpleNamespace(metadata=SimpleNamespace(name="STS12", type="STS"))]
    with pytest.raises(ConfigError, match="no text for STS12"):
        refuse_gaps(read_instructions(file, "prefix", TOKENIZER), tasks)
    file.write_text("tasks: {STS12: ''}")
    refuse_gaps(read_instructions(file, "prefix", TOKENIZER), tasks)


@pytest.mark.parametrize("content", ["[1]", "a: {b: c}", "tasks: {b: 3}", "tasks: [x]", "{", ""])
def test_file_with_something_else_is_refused(content, tmp_path):
    (tmp_path / "bad.yaml").write_text(content)
    with pytest.raises(DataError, match=r"bad\.yaml"):
        read_instructions(tmp_path / "bad.yaml", "prefix", TOKENIZER)


def test_example_serves_every_task_of_both_benchmarks_and_names_no_unknown_one():
    instructions = read_instructions(EXAMPLE, "prefix", TOKENIZER)
    tasks = [task for name in MTEB_BENCHMARKS for task in flatten(choose_tasks(name, (), (), Path()))]
    refuse_gaps(instructions, tasks)
    known = {name for task in tasks for name in (task.metadata.name, task.metadata.type)}
    assert {name.removesuffix("-document") for name in instructions} <= known


def test_papers_benchmark_has_its_56_tasks_with_twelve_forums_as_one():
    tasks = choose_tasks(MTEB_PAPER, (), (), Path())
    kinds = Counter(task.metadata.type for task in tasks)
    assert [kinds[kind] for kind in ("Classification", "Clustering", "PairClassification")] == [12, 11, 3]
    assert [kinds[kind] for kind in ("Reranking", "Retrieval", "STS", "Summarization")] == [4, 15, 10, 1]
    assert len(tasks) == 56
    assert len(flatten(tasks)) == 56 - 1 + 12


def test_task_by_name_is_the_benchmarks_and_an_unknown_one_is_refused_with_a_suggestion():
    (msmarco,) = by_name("MSMARCO")
    assert msmarco.eval_splits == ["dev"]
    with pytest.raises(ConfigError, match="did you mean 'SICK-R'"):
        by_name("SICKR")
    with pytest.raises(ConfigError, match="names a task twice"):
        by_name("STS12", "STS12")


def test_any_benchmark_and_any_language_of_mteb_can_be_asked_for():
    german = choose_tasks("MTEB(deu, v1)", (), (), Path())
    assert german and all("deu" in {code for task in german for code in task.metadata.languages} for _ in german[:1])
    (sts,) = by_name("STS22.v2", languages=("deu", "fra"))
    assert sts.hf_subsets and set(sts.hf_subsets) <= {"de", "fr", "de-fr", "de-en", "fr-pl", "de-pl"}
    with pytest.raises(ConfigError, match=r"no such benchmark; did you mean 'MTEB\(deu, v1\)'"):
        choose_tasks("MTEB(deu, v11)", (), (), Path())
    with pytest.raises(ConfigError, match="--languages"):
        by_name("STS22.v2", languages=("klingon",))
