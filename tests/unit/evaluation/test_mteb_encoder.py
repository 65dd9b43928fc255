"""The encoder that mteb gets: pooling, prompts, lengths, and every kind of task that mteb has."""

import numpy as np
import pytest
import torch

mteb = pytest.importorskip("mteb")

from sentence_transformers import SentenceTransformer  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer  # noqa: E402
from transformers import AutoModel, AutoTokenizer  # noqa: E402
from unit.evaluation.mteb_inputs import make_encoder, write_beir  # noqa: E402

from megatron_neobert.evaluation.models import LoadOptions  # noqa: E402
from megatron_neobert.evaluation.mteb import build_encoder, read_instructions  # noqa: E402
from megatron_neobert.evaluation.mteb_tasks import local_task  # noqa: E402
from megatron_neobert.evaluation.options import MtebOptions  # noqa: E402

TEXTS = ["wing flow", "the card of money of the bank", "gene", "heat food health cell gene wing flow the of"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_encoder(tmp_path_factory.mktemp("encoder") / "tiny")


def encode(folder, texts=TEXTS, **options):
    given = MtebOptions(model=folder, output=folder, data_dir=folder, **options)
    return build_encoder(given, {}, LoadOptions()).model.encode(texts, batch_size=3)


def expected(folder, texts, pooling):
    """One text at a time, so nothing is padded."""
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        states = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in texts]
    return np.stack([(state.mean(0) if pooling == "mean" else state[0]).numpy() for state in states])


def test_embedding_is_the_mean_state_of_plain_transformers_or_what_the_folder_pools(folder, tmp_path):
    # measured 4e-7: batches are padded; the other pooling differs by more than 0.1
    np.testing.assert_allclose(encode(folder), expected(folder, TEXTS, "mean"), atol=2e-6)
    modules = [Transformer(str(folder)), Pooling(32, "cls")]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(tmp_path))
    np.testing.assert_allclose(encode(tmp_path), expected(folder, TEXTS, "cls"), atol=2e-6)
    assert np.abs(encode(folder) - encode(tmp_path)).max() > 0.1


@pytest.mark.parametrize("style", ["prefix", "paper"])
def test_model_gets_the_instruction_before_queries_and_in_style_paper_before_documents(folder, tmp_path, style):
    write_beir(tmp_path / "beir")
    (tmp_path / "file.yaml").write_text("types: {Retrieval: food money}")
    given, texts = MtebOptions(model=folder, output=folder, data_dir=folder), []
    prompts = read_instructions(tmp_path / "file.yaml", style, AutoTokenizer.from_pretrained(folder))
    encoder = build_encoder(given, prompts, LoadOptions())
    decode = encoder.model.tokenizer.batch_decode
    encoder.model.register_forward_pre_hook(lambda _, inputs: texts.extend(decode(inputs[0]["input_ids"])))
    task = local_task("beir", tmp_path)
    mteb.evaluate(encoder, task, cache=None, co2_tracker=False, show_progress_bar=False)
    start = "[CLS] food money [SEP] [CLS] " if style == "paper" else "[CLS] food money "
    found = [text.removeprefix("[CLS] ") for text in texts if not text.startswith(start)]
    assert len(texts) == 4 + 12 and len(found) == (0 if style == "paper" else 12), "queries and documents"


def test_text_is_cut_at_the_given_length_and_at_the_last_position(folder, capsys):
    long = " ".join(["wing"] * 200)
    np.testing.assert_allclose(
        encode(folder, [long, long], max_length=10), expected(folder, [" ".join(["wing"] * 8)] * 2, "mean"), atol=2e-6
    )
    assert capsys.readouterr().out == ""
    np.testing.assert_allclose(
        encode(folder, [long, long]), expected(folder, [" ".join(["wing"] * 62)] * 2, "mean"), atol=2e-6
    )
    assert "truncated after 64 tokens, not 1024" in capsys.readouterr().out
