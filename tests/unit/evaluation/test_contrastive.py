"""Contrastive fine-tuning of a tiny encoder: its loss, its instructions, and runs that stop and go on."""

import shutil
from pathlib import Path

import datasets
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import BertForMaskedLM
from unit.evaluation.contrastive_place import (
    INSTRUCTIONS,
    make_pairs,
    write_datasets,
    write_encoder,
    write_jsonl,
    write_yaml,
)

from megatron_neobert.errors import OutputError
from megatron_neobert.evaluation import embed
from megatron_neobert.evaluation.embed import PairCollator, build_loss, build_prompts, finetune, save_final
from megatron_neobert.evaluation.embed_data import TrainingSettings, read_config
from megatron_neobert.evaluation.ledger import Ledger, read_record
from megatron_neobert.evaluation.models import fingerprint, load_sentence_transformer
from megatron_neobert.evaluation.options import FinetuneOptions

ROWS = make_pairs(6, negatives=3, seed=9)
KEYS = list(INSTRUCTIONS)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an encoder, its data and a YAML file."""
    folder = tmp_path_factory.mktemp("contrastive")
    write_encoder(folder / "bert")
    write_datasets(folder / "data")
    write_yaml(folder / "run.yaml")
    return folder


def train(place: Path, output: Path, **changes: object) -> Path:
    """Fine-tune for 100 steps, and return the final folder."""
    given = {"config": str(place / "run.yaml"), "data_dir": place / "data", "output": output, "device": "cpu"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", place / "cache")
        finetune(FinetuneOptions(model=place / "bert", **{**given, **changes}))
    return output / "bert" / "bert-contrastive"


@pytest.fixture(scope="module")
def trained(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The final folder of 100 steps without a stop."""
    return train(place, tmp_path_factory.mktemp("trained"))


def expected_loss(model: SentenceTransformer, temperature: float) -> float:
    """InfoNCE as the paper writes it, text by text."""
    negatives = [text for row in ROWS for text in row["negatives"]]
    assert len({len(row["negatives"]) for row in ROWS}) > 1, "rows of different numbers of negatives"
    queries, positives, others = (
        model.encode(texts, convert_to_tensor=True, normalize_embeddings=True)
        for texts in ([row["query"] for row in ROWS], [row["positive"] for row in ROWS], negatives)
    )
    similarities = queries @ torch.cat([positives, others]).T / temperature
    own = torch.arange(len(ROWS))
    return float((torch.logsumexp(similarities, 1) - similarities[own, own]).mean())


@pytest.mark.parametrize("gradient_cache", [None, 2])
def test_loss_is_infonce_over_all_positives_and_negatives_of_the_batch(place, gradient_cache):
    model = load_sentence_transformer(place / "bert", max_length=32).eval()
    batch = PairCollator(preprocess_fn=model.preprocess)(ROWS)
    features = [
        {key.removeprefix(f"{name}_"): value for key, value in batch.items() if key.startswith(f"{name}_")}
        for name in ("query", "document")
    ]
    for temperature in (0.07, 0.5):
        loss = build_loss(model, temperature, gradient_cache)
        measured = loss(features, torch.zeros(len(ROWS)))
        torch.testing.assert_close(measured.item(), expected_loss(model, temperature), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("where", "queries", "documents"), [("query", True, False), ("both", True, True), ("none", False, False)]
)
def test_instruction_stands_before_the_texts_it_is_meant_for(place, where, queries, documents):
    config = read_config(place / "run.yaml")
    prompts = build_prompts(config.datasets, TrainingSettings(instructions=where))
    model = load_sentence_transformer(place / "bert", max_length=32)
    collator = PairCollator(preprocess_fn=model.preprocess, prompts=prompts)
    batch = collator([{**row, "dataset_name": "SMALL"} for row in ROWS])
    for name, wanted in (("query", queries), ("document", documents)):
        texts = model.tokenizer.batch_decode(batch[f"{name}_input_ids"], skip_special_tokens=True)
        assert [text.startswith("similar :") for text in texts] == [wanted] * len(texts)


def test_training_brings_positives_nearer_than_they_were(place, trained):
    rows = make_pairs(100, negatives=0, seed=77)  # not among those it was trained on

    def share_of_hits(folder: Path) -> float:
        model = load_sentence_transformer(folder, max_length=32)
        queries, documents = (model.encode([row[name] for row in rows]) for name in ("query", "positive"))
        return float((model.similarity(queries, documents).argmax(1) == torch.arange(100)).float().mean())

    results = read_record(trained.with_name("contrastive.json"))["results"]
    assert results["last_loss_nats"] < 0.5 * results["first_loss_nats"]
    before, after = share_of_hits(place / "bert"), share_of_hits(trained)
    assert after > before + 0.1, f"{before=} {after=}"


def test_final_folder_loads_by_itself_with_a_prompt_per_dataset(trained):
    model = SentenceTransformer(str(trained), device="cpu")
    assert {key: model.prompts[key] for key in KEYS} == {key: f"{text} " for key, text in INSTRUCTIONS.items()}
    assert model.default_prompt_name is None
    assert model.prompts["query"] == f"{INSTRUCTIONS['LARGE']} ", "of the data set that is drawn most often"
    assert (model.encode_query("ba ce di") == model.encode("find : ba ce di")).all()
    assert (model.encode_document("ba ce di") == model.encode("ba ce di")).all()
    plain, prompted = model.encode("ba ce di"), model.encode("ba ce di", prompt_name="SMALL")
    assert abs(plain - prompted).max() > 1e-3
    assert (model.encode("similar : ba ce di") == prompted).all()


def test_run_that_was_killed_resumes_at_its_newest_whole_checkpoint_and_ends_the_same(
    place, trained, tmp_path, capsys, monkeypatch
):
    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Ledger, "add", kill)  # the final folder is there, and nothing names it
    with pytest.raises(KeyboardInterrupt):
        train(place, tmp_path)
    monkeypatch.undo()
    (newest,) = (tmp_path / "bert" / "contrastive").glob("*/checkpoint-100")
    (newest / "trainer_state.json").write_text('{"epoch": ')  # as a kill would leave it
    capsys.readouterr()
    final = train(place, tmp_path)
    said = capsys.readouterr().out
    assert "checkpoint-50" in said
    assert (final / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
    losses, expected = (
        read_record(folder.with_name("contrastive.json"))["results"]["losses_nats"] for folder in (final, trained)
    )
    assert losses == expected and [step for step, _ in losses] == [25, 50, 75, 100]
    assert final.with_name("contrastive.png").read_bytes().startswith(b"\x89PNG")
    assert not newest.parent.exists()
    train(place, tmp_path)
    assert f"{final} is there already" in capsys.readouterr().out


def test_model_of_other_settings_or_texts_is_not_replaced(place, trained, tmp_path, monkeypatch):
    output, data = trained.parents[1], tmp_path / "data"
    before = fingerprint(trained)
    shutil.copytree(place / "data", data)
    write_jsonl(data / "SMALL.jsonl", make_pairs(100, negatives=1, seed=123))
    write_yaml(tmp_path / "run.yaml")
    text = (tmp_path / "run.yaml").read_text()
    (tmp_path / "run.yaml").write_text(text.replace("divisor: 4", "divisor: 2"))
    for change in ({"seed": 1}, {"steps": 50}, {"data_dir": data}, {"config": str(tmp_path / "run.yaml")}):
        with pytest.raises(OutputError, match="was made with other settings or data"):
            train(place, output, **change)
    monkeypatch.setattr(embed, "key_of", lambda _: "stale")  # left by a start that was killed
    (trained.with_name("contrastive") / "stale").mkdir()
    with pytest.raises(OutputError, match="was made with other settings or data"):
        train(place, output, seed=1)
    assert fingerprint(trained) == before


def test_weights_are_float32_whatever_the_folder_holds(place, tmp_path):
    shutil.copytree(place / "bert", tmp_path / "bert")
    BertForMaskedLM.from_pretrained(place / "bert", dtype=torch.bfloat16).save_pretrained(tmp_path / "bert")
    assert {tensor.dtype for tensor in load_file(tmp_path / "bert" / "model.safetensors").values()} == {torch.bfloat16}
    model = load_sentence_transformer(tmp_path / "bert", max_length=16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    save_final(model, tmp_path / "bert", tmp_path / "final")
    written = load_file(tmp_path / "final" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}
