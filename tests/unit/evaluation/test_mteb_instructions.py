"""Instructions and the choice of tasks."""

from pathlib import Path
from types import SimpleNamespace

import pytest

mteb = pytest.importorskip("mteb")

from megatron_neobert.errors import ConfigError, DataError  # noqa: E402
from megatron_neobert.evaluation.mteb import read_instructions, require_instructions  # noqa: E402
from megatron_neobert.evaluation.mteb_tasks import choose_tasks, flatten  # noqa: E402
from megatron_neobert.evaluation.paper import MTEB_BENCHMARKS, MTEB_PAPER  # noqa: E402

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
