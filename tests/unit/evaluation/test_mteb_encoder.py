"""The encoder for mteb: pooling, instructions and truncation; and the choice of tasks."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

mteb = pytest.importorskip("mteb")

from sentence_transformers import SentenceTransformer  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer  # noqa: E402
from transformers import AutoModel, AutoTokenizer  # noqa: E402
from unit.evaluation.mteb_inputs import make_encoder, write_beir  # noqa: E402

from megatron_neobert.errors import ConfigError, DataError  # noqa: E402
from megatron_neobert.evaluation.models import LoadOptions  # noqa: E402
from megatron_neobert.evaluation.mteb import build_encoder, read_instructions, require_instructions  # noqa: E402
from megatron_neobert.evaluation.mteb_tasks import choose_tasks, flatten, local_task  # noqa: E402
from megatron_neobert.evaluation.options import MtebOptions  # noqa: E402
from megatron_neobert.evaluation.paper import MTEB_BENCHMARKS, MTEB_PAPER  # noqa: E402

TEXTS = ["wing flow", "the card of money of the bank", "gene", "heat food health cell gene wing flow the of"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_encoder(tmp_path_factory.mktemp("encoder") / "tiny")


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
