"""Which text stands before which, and what the file in examples/ covers."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

mteb = pytest.importorskip("mteb")

from megatron_neobert.errors import ConfigError, DataError, MissingInputError  # noqa: E402
from megatron_neobert.evaluation.mteb.encoder import Instructions, read_instructions  # noqa: E402
from megatron_neobert.evaluation.mteb.tasks import benchmark_tasks, flatten, tasks_by_name  # noqa: E402
from megatron_neobert.evaluation.reported_numbers import MTEB_BENCHMARKS, MTEB_PAPER  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[3] / "megatron_neobert" / "configs" / "evaluation" / "mteb_instructions.yaml"
TOKENIZER = SimpleNamespace(bos_token=None, cls_token="[CLS]", sep_token="[SEP]")
FEVER = SimpleNamespace(name="FEVER", type="Retrieval")
OTHER = SimpleNamespace(name="local:cranfield", type="Retrieval")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "instructions.yaml"
    path.write_text("types: {Retrieval: Find it.}\ntasks: {FEVER: Check the claim.}\n")
    return path


def test_task_comes_before_its_type_and_documents_stay_plain(file):
    instructions = read_instructions(file, "prefix", TOKENIZER)
    assert instructions.prompt_for(FEVER, side="query") == "Check the claim. "
    assert instructions.prompt_for(OTHER, side=None) == "Find it. "
    assert instructions.prompt_for(FEVER, side="document") is None


def test_style_paper_separates_with_the_models_tokens_and_serves_documents_too(file):
    instructions = read_instructions(file, "paper", TOKENIZER)
    assert instructions.prompt_for(FEVER, side="query") == "Check the claim.[SEP] [CLS]"
    assert instructions.prompt_for(FEVER, side="document") == "Check the claim.[SEP] [CLS]"


@pytest.mark.parametrize("style", ["prefix", "paper"])
def test_empty_instruction_is_one_and_puts_nothing_before_a_text(style, file):
    file.write_text("types: {Retrieval: Find it.}\ntasks: {FEVER: ''}\n")
    instructions = read_instructions(file, style, TOKENIZER)
    instructions.refuse_gaps([SimpleNamespace(metadata=FEVER)])
    assert instructions.prompt_for(FEVER, side="query") is None
    assert instructions.prompt_for(OTHER, side="query") is not None


def test_task_without_an_instruction_is_refused_by_name_unless_there_are_none(file):
    tasks = [SimpleNamespace(metadata=SimpleNamespace(name="STS12", type="STS"))]
    with pytest.raises(ConfigError, match="no text for STS12"):
        read_instructions(file, "prefix", TOKENIZER).refuse_gaps(tasks)
    Instructions().refuse_gaps(tasks)


@pytest.mark.parametrize("content", ["[1]", "a: {b: c}", "tasks: {b: 3}", "tasks: [x]", "{", ""])
def test_file_with_something_else_is_refused(content, tmp_path):
    (tmp_path / "bad.yaml").write_text(content)
    with pytest.raises(DataError, match=r"bad\.yaml"):
        read_instructions(tmp_path / "bad.yaml", "prefix", TOKENIZER)


def test_file_that_is_not_there_and_tokens_that_are_not_are_refused(file, tmp_path):
    with pytest.raises(MissingInputError, match="no such file"):
        read_instructions(tmp_path / "none.yaml", "prefix", TOKENIZER)
    with pytest.raises(ConfigError, match=r"needs a tokenizer with \[SEP\]"):
        read_instructions(file, "paper", SimpleNamespace(bos_token=None, cls_token=None, sep_token=None))


def test_example_serves_every_task_of_both_benchmarks_and_names_no_unknown_one():
    instructions = read_instructions(EXAMPLE, "prefix", TOKENIZER)
    tasks = [task for name in MTEB_BENCHMARKS for task in flatten(benchmark_tasks(name))]
    instructions.refuse_gaps(tasks)
    assert set(instructions.tasks) <= {task.metadata.name for task in tasks}


def test_papers_benchmark_has_its_56_tasks_with_twelve_forums_as_one():
    tasks = benchmark_tasks(MTEB_PAPER)
    kinds = Counter(task.metadata.type for task in tasks)
    assert [kinds[kind] for kind in ("Classification", "Clustering", "PairClassification")] == [12, 11, 3]
    assert [kinds[kind] for kind in ("Reranking", "Retrieval", "STS", "Summarization")] == [4, 15, 10, 1]
    assert len(tasks) == 56
    assert len(flatten(tasks)) == 56 - 1 + 12


@pytest.mark.parametrize("name", ["STS12", "CQADupstackRetrieval", "CQADupstackGamingRetrieval"])
def test_task_that_was_cut_for_a_quick_look_leaves_the_librarys_own_and_the_next_one_whole(name, tmp_path):
    before = flatten(tasks_by_name([name], tmp_path))
    for task in before:
        task.dataset = "cut"
        task.np_rng.random()
    (own,) = [task for task in mteb.get_benchmark(MTEB_PAPER).tasks if task.metadata.name == "CQADupstackRetrieval"]
    sts = [task for task in mteb.get_benchmark(MTEB_PAPER).tasks if task.metadata.name == "STS12"]
    for task in [*flatten(tasks_by_name([name], tmp_path)), *own.metadata.tasks, *sts]:
        assert getattr(task, "dataset", None) is None
        assert task.np_rng.bit_generator.state == type(task)().np_rng.bit_generator.state


def test_task_by_name_is_the_benchmarks_and_an_unknown_one_is_refused_with_a_suggestion(tmp_path):
    (msmarco,) = tasks_by_name(["MSMARCO"], tmp_path)
    assert msmarco.eval_splits == ["dev"]
    with pytest.raises(ConfigError, match="did you mean SICK-R"):
        tasks_by_name(["SICKR"], tmp_path)
    with pytest.raises(ConfigError, match="names a task twice"):
        tasks_by_name(["STS12", "STS12"], tmp_path)
