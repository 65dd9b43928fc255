"""Contrastive fine-tuning of a tiny encoder: its loss, its instructions, and runs that stop and go on."""

import shutil
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import BertForMaskedLM
from unit.evaluation.contrastive_place import INSTRUCTIONS, make_pairs, write_datasets, write_encoder, write_yaml

from megatron_neobert.errors import ConfigError, OutputError
from megatron_neobert.evaluation.embed import (
    Places,
    Training,
    build_loss,
    build_prompts,
    newest_checkpoint,
    prepare_folder,
    save_final,
)
from megatron_neobert.evaluation.embed import train as run_training
from megatron_neobert.evaluation.embed_data import TrainingSettings, find_local, load_pairs, read_config
from megatron_neobert.evaluation.embed_sampling import PairCollator
from megatron_neobert.evaluation.ledger import open_ledger
from megatron_neobert.evaluation.models import fingerprint, load_sentence_transformer

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


def train(place: Path, output: Path, *, resume: bool = False, seed: int = 0, **changes: object) -> tuple[Places, dict]:
    config = read_config(place / "run.yaml")
    training = replace(config.training, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", place / "cache")
        paths = find_local(place / "data", KEYS, skip_missing=False)
        pairs = {key: load_pairs(key, config.datasets[key], path) for key, path in paths.items()}
    places = Places(output, "bert")
    with open_ledger(places.ledger) as ledger:
        prepare_folder(places, ledger, {"seed": seed}, resume=resume)
    run = Training(places=places, settings=training, seed=seed, device="cpu", resume=resume)
    results = run_training(place / "bert", pairs, config.datasets, run)
    assert results is not None
    return places, results


@pytest.fixture(scope="module")
def trained(place: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Places, dict]:
    """100 steps without a stop."""
    return train(place, tmp_path_factory.mktemp("trained"))


def weights_of(places: Places) -> bytes:
    return (places.final / "model.safetensors").read_bytes()


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
    places, results = trained
    rows = make_pairs(100, negatives=0, seed=77)  # not among those it was trained on

    def share_of_hits(folder: Path) -> float:
        model = load_sentence_transformer(folder, max_length=32)
        queries, documents = (model.encode([row[name] for row in rows]) for name in ("query", "positive"))
        return float((model.similarity(queries, documents).argmax(1) == torch.arange(100)).float().mean())

    assert results["last_loss_nats"] < 0.5 * results["first_loss_nats"]
    before, after = share_of_hits(place / "bert"), share_of_hits(places.final)
    assert after > before + 0.1, f"{before=} {after=}"


def test_final_folder_loads_by_itself_with_a_prompt_per_dataset(trained):
    model = SentenceTransformer(str(trained[0].final), device="cpu")
    assert {key: model.prompts[key] for key in KEYS} == {key: f"{text} " for key, text in INSTRUCTIONS.items()}
    assert model.default_prompt_name is None
    assert model.prompts["query"] == f"{INSTRUCTIONS['LARGE']} ", "of the data set that is drawn most often"
    assert (model.encode_query("ba ce di") == model.encode("find : ba ce di")).all()
    assert (model.encode_document("ba ce di") == model.encode("ba ce di")).all()
    plain, prompted = model.encode("ba ce di"), model.encode("ba ce di", prompt_name="SMALL")
    assert abs(plain - prompted).max() > 1e-3
    assert (model.encode("similar : ba ce di") == prompted).all()


def test_loss_is_logged_once_per_interval(trained):
    places, results = trained
    header, *lines = places.file("_loss.csv").read_text(encoding="utf-8").splitlines()
    assert header == "step,loss,learning_rate,grad_norm"
    assert [line.split(",")[0] for line in lines] == ["25", "50", "75", "100"]
    assert float(lines[-1].split(",")[1]) == results["last_loss_nats"]
    assert places.file("_loss.png").read_bytes().startswith(b"\x89PNG")


def test_resumed_run_ends_with_the_weights_of_the_uninterrupted_one(place, trained, tmp_path, capsys):
    whole, _ = trained
    shutil.copytree(whole.checkpoints, tmp_path / "bert" / "checkpoints")
    shutil.copytree(whole.ledger, tmp_path / "bert" / "contrastive")
    # As if the process had been killed while it wrote the last checkpoint.
    (tmp_path / "bert" / "checkpoints" / "checkpoint-100" / "trainer_state.json").write_text('{"epoch": ')
    resumed, results = train(place, tmp_path, resume=True)
    said = capsys.readouterr().out
    assert "resuming from" in said
    assert "step 75/100" in said and "step 50/100" not in said, "it began at the checkpoint"
    assert results["started_from"] == "checkpoint-50"
    assert weights_of(resumed) == weights_of(whole)
    assert resumed.file("_loss.csv").read_text() == whole.file("_loss.csv").read_text()


@pytest.mark.parametrize("name", ["1_Pooling/config.json", "config_sentence_transformers.json", "modules.json"])
def test_fingerprint_tells_folders_with_other_modules_apart(trained, tmp_path, name):
    folder = shutil.copytree(trained[0].final, tmp_path / "model")
    before = fingerprint(folder)
    (folder / name).write_text((folder / name).read_text() + " ")
    assert fingerprint(folder) != before


def test_training_is_not_resumed_unasked_or_with_other_settings(trained, tmp_path):
    shutil.copytree(trained[0].output / "bert", tmp_path / "bert")
    places = Places(tmp_path, "bert")
    for without in ((), (places.final,)):
        for folder in without:
            shutil.rmtree(folder)
        with open_ledger(places.ledger) as ledger:
            with pytest.raises(OutputError, match="is there already; resume with --resume"):
                prepare_folder(places, ledger, {"seed": 0}, resume=False)
            with pytest.raises(ConfigError, match=r"other settings or data \(seed\)"):
                prepare_folder(places, ledger, {"seed": 1}, resume=True)
    (places.checkpoints / "checkpoint-100" / "trainer_state.json").unlink()
    with open_ledger(places.ledger) as ledger:
        prepare_folder(places, ledger, {"seed": 0}, resume=True)
    assert newest_checkpoint(places.checkpoints) == places.checkpoints / "checkpoint-50"
    assert not (places.checkpoints / "checkpoint-100").exists()


def test_weights_are_float32_whatever_the_folder_holds(place, tmp_path):
    shutil.copytree(place / "bert", tmp_path / "bert")
    BertForMaskedLM.from_pretrained(place / "bert", dtype=torch.bfloat16).save_pretrained(tmp_path / "bert")
    assert {tensor.dtype for tensor in load_file(tmp_path / "bert" / "model.safetensors").values()} == {torch.bfloat16}
    model = load_sentence_transformer(tmp_path / "bert", max_length=16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    save_final(model, tmp_path / "bert", tmp_path / "final")
    written = load_file(tmp_path / "final" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}
