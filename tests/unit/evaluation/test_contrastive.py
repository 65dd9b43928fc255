"""Contrastive fine-tuning of a tiny encoder: its loss, its prompts, and interrupted runs."""

import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from commands import call, largest_file
from json_files import edit_json, read_json, write_jsonl
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from transformers import BertForMaskedLM
from unit.evaluation.embedding_inputs import (
    INSTRUCTIONS,
    make_pairs,
    read_config,
    write_datasets,
    write_encoder,
    write_yaml,
)

from megatron_neobert.errors import ConfigError, OutputError, SaveError
from megatron_neobert.evaluation import embed
from megatron_neobert.evaluation.embed import build_loss, build_prompts, run_contrastive, save_final
from megatron_neobert.evaluation.embed_data import DatasetSettings, PairCollator, TrainingSettings
from megatron_neobert.evaluation.models import check_modules, fingerprint, load_sentence_transformer, load_tokenizer
from megatron_neobert.evaluation.options import EmbedderOptions

PAIRS = make_pairs(6, negatives=3, seed=9)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an encoder, its data and a YAML file."""
    folder = tmp_path_factory.mktemp("contrastive")
    write_encoder(folder / "bert")
    write_datasets(folder / "data")
    write_yaml(folder / "run.yaml")
    return folder


def train(inputs: Path, output: Path, **changes: object) -> Path:
    """Fine-tune for 100 steps, and return the final folder."""
    options = {"config": str(inputs / "run.yaml"), "data_dir": inputs / "data", "output": output, "device": "cpu"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", inputs / "cache")
        run_contrastive(EmbedderOptions(model=inputs / "bert", **{**options, **changes}))
    return output / "bert" / "bert-contrastive"


@pytest.fixture(scope="module")
def trained(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The final folder of an uninterrupted run."""
    return train(inputs, tmp_path_factory.mktemp("trained"))


def infonce(model: SentenceTransformer, temperature: float) -> float:
    """Compute the paper's InfoNCE loss of PAIRS from separate embeddings."""
    negatives = [text for pair in PAIRS for text in pair["negatives"]]
    assert len({len(pair["negatives"]) for pair in PAIRS}) > 1, "pairs have different numbers of negatives"
    queries, documents = (
        model.encode(texts, convert_to_tensor=True, normalize_embeddings=True)
        for texts in ([pair["query"] for pair in PAIRS], [pair["positive"] for pair in PAIRS] + negatives)
    )
    similarities = queries @ documents.T / temperature
    return float((torch.logsumexp(similarities, 1) - similarities.diagonal()).mean())


def features_of(model: SentenceTransformer) -> list[dict]:
    """Return the inputs of a loss for PAIRS."""
    batch = PairCollator(preprocess_fn=model.preprocess)(PAIRS)
    return [
        {key.removeprefix(f"{name}_"): value for key, value in batch.items() if key.startswith(f"{name}_")}
        for name in ("query", "document")
    ]


@pytest.mark.parametrize("is_link", [True, False])
def test_final_model_replaces_no_folder_of_others(inputs, tmp_path, is_link):
    others, final = tmp_path / "others", tmp_path / "final"
    others.mkdir()
    (others / "thesis.tex").write_text("my thesis")
    final.symlink_to(others) if is_link else others.rename(final)
    with pytest.raises(OutputError, match=f"{final} is in the way"):
        save_final(load_sentence_transformer(inputs / "bert", max_length=16), inputs / "bert", final)
    assert [path.read_text() for path in final.iterdir()] == ["my thesis"]


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_chat_template_of_a_folder_is_never_rendered(inputs, tmp_path, file):
    folder, template = shutil.copytree(inputs / "bert", tmp_path / "bert"), "{% x"
    if file.endswith("json"):
        edit_json(folder / file, chat_template=template)
    else:
        (folder / file).write_text(template)
    with_template, without = (load_sentence_transformer(path, max_length=32) for path in (folder, inputs / "bert"))
    assert (with_template.encode(["wing flow"]) == without.encode(["wing flow"])).all()
    with_template.save_pretrained(str(tmp_path / "saved"))
    assert not any(template in path.read_text() for path in (tmp_path / "saved").glob("*.j*"))
    assert load_tokenizer(folder).chat_template is None


def test_matryoshka_adds_the_loss_of_shorter_embeddings(inputs):
    model = load_sentence_transformer(inputs / "bert", max_length=32).eval()
    loss = build_loss(model, 0.07, None, dimensions=(8,))(features_of(model), torch.zeros(len(PAIRS))).item()
    expected = 0.0
    for model.truncate_dim in (8, None):
        expected += infonce(model, 0.07)
    assert loss == pytest.approx(expected, rel=1e-4) != pytest.approx(infonce(model, 0.07), rel=1e-2)
    with pytest.raises(ConfigError, match="matryoshka 64: the model's embeddings have 32; name smaller ones"):
        build_loss(model, 0.07, None, dimensions=(64, 8))


def test_held_out_pairs_are_scored_at_every_checkpoint(inputs, tmp_path):
    shutil.copytree(inputs / "data", tmp_path / "data")
    write_jsonl(tmp_path / "data" / "validation.jsonl", make_pairs(30, negatives=2, seed=5))
    final = train(inputs, tmp_path, data_dir=tmp_path / "data")
    results = read_json(final.parent / "contrastive.json")["results"]
    (first, low), (last, high) = results["validation_ndcg@10"]
    assert (first, last) == (50, 100) and low < high <= 1
    assert f"| {100 * high:.1f} |" in (final.parent / "contrastive.md").read_text()


def test_record_of_the_command_has_the_settings_and_the_rows_of_each_dataset(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", inputs / "cache")
    where = ("--model", inputs / "bert", "--data-dir", inputs / "data", "--output", tmp_path, "--device", "cpu")
    expected = {"steps": 3, "batch_size": 16, "seed": 5, "gradient_cache": 8}
    flags = [word for name, value in expected.items() for word in (f"--{name.replace('_', '-')}", value)]
    code, _, errors = call("train-embedder", *where, "--config", inputs / "run.yaml", "--limit", 20, *flags)
    assert code == 0, errors
    settings = read_json(tmp_path / "bert" / "contrastive.json")["settings"]
    assert expected.items() <= settings.items() and settings["processes"] == 1
    assert settings["rows"] == {"LARGE": 20, "SMALL": 20, "HARD": 20}


def test_folder_of_pairs_is_enough(inputs, tmp_path):
    for name, count in (("FAQ", 20), ("validation", 5)):
        write_jsonl(tmp_path / "pairs" / f"{name}.jsonl", make_pairs(count, negatives=0, seed=count))
    final = train(inputs, tmp_path, config=None, data_dir=tmp_path / "pairs", steps=3, batch_size=8)
    settings = read_json(final.parent / "contrastive.json")["settings"]
    assert settings["datasets"] == {"FAQ": {"divisor": 1, "instruction": ""}}
    assert settings["rows"] == {"FAQ": 20} and settings["validation"]


@pytest.mark.parametrize("gradient_cache", [None, 2])
def test_loss_is_infonce_over_all_positives_and_negatives_of_the_batch(inputs, gradient_cache):
    model = load_sentence_transformer(inputs / "bert", max_length=32).eval()
    for temperature in (0.07, 0.5):
        loss = build_loss(model, temperature, gradient_cache)(features_of(model), torch.zeros(len(PAIRS)))
        torch.testing.assert_close(loss.item(), infonce(model, temperature), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("setting", "in_queries", "in_documents"), [("query", True, False), ("both", True, True), ("none", False, False)]
)
def test_instruction_precedes_the_texts_that_the_setting_names(inputs, setting, in_queries, in_documents):
    prompts = build_prompts(read_config(inputs / "run.yaml").datasets, TrainingSettings(instructions=setting))
    model = load_sentence_transformer(inputs / "bert", max_length=32)
    collator = PairCollator(preprocess_fn=model.preprocess, prompts=prompts)
    batch = collator([{**pair, "dataset_name": "SMALL"} for pair in PAIRS])
    for name, expected in (("query", in_queries), ("document", in_documents)):
        texts = model.tokenizer.batch_decode(batch[f"{name}_input_ids"], skip_special_tokens=True)
        assert [text.startswith("similar :") for text in texts] == [expected] * len(texts)
    empty = build_prompts({"SMALL": DatasetSettings(instruction=" ")}, TrainingSettings())
    assert empty == {"SMALL": {"query": ""}}


def test_final_folder_loads_in_sentence_transformers_with_a_prompt_per_dataset(trained):
    model = SentenceTransformer(str(trained), device="cpu")
    assert {key: model.prompts[key] for key in INSTRUCTIONS} == {key: f"{text} " for key, text in INSTRUCTIONS.items()}
    assert model.default_prompt_name is None
    assert model.prompts["query"] == f"{INSTRUCTIONS['LARGE']} ", "the prompt of the dataset that is drawn most often"
    assert (model.encode_query("ba ce di") == model.encode("find : ba ce di")).all()
    assert (model.encode_document("ba ce di") == model.encode("ba ce di")).all()
    plain, prompted = model.encode("ba ce di"), model.encode("ba ce di", prompt_name="SMALL")
    assert abs(plain - prompted).max() > 1e-3
    assert (model.encode("similar : ba ce di") == prompted).all()


def test_killed_run_resumes_at_its_newest_complete_checkpoint_with_the_same_weights(
    inputs, trained, tmp_path, capsys, monkeypatch
):
    def kill(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    # Killed when the final folder exists, but not its record.
    monkeypatch.setattr(embed, "write_record", kill)
    with pytest.raises(KeyboardInterrupt):
        train(inputs, tmp_path)
    monkeypatch.undo()
    (newest,) = (tmp_path / "bert" / "contrastive").glob("*/checkpoint-100")
    (newest / "trainer_state.json").write_text('{"epoch": ')  # as if killed while writing it
    capsys.readouterr()
    final = train(inputs, tmp_path)
    assert "checkpoint-50" in capsys.readouterr().out
    assert (final / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
    losses, expected = (
        read_json(folder.with_name("contrastive.json"))["results"]["losses_nats"] for folder in (final, trained)
    )
    assert losses == expected and [step for step, _ in losses] == [25, 50, 75, 100]
    assert final.with_name("contrastive.png").read_bytes().startswith(b"\x89PNG")
    assert not newest.parent.exists()
    train(inputs, tmp_path)
    assert f"{final} already exists" in capsys.readouterr().out


@pytest.mark.parametrize("size", [20_000, 150_000], ids=["weights", "optimizer"])
def test_full_disk_is_an_error_of_the_output(inputs, tmp_path, size):
    with largest_file(size), pytest.raises(SaveError, match=r"bert cannot be written \(.*Free some space"):
        train(inputs, tmp_path)


def test_final_folder_of_other_settings_or_data_is_not_replaced(inputs, trained, tmp_path, monkeypatch):
    output, before = trained.parents[1], fingerprint(trained)
    data = shutil.copytree(inputs / "data", tmp_path / "data")
    write_jsonl(data / "SMALL.jsonl", make_pairs(100, negatives=1, seed=123))
    for change in ({"seed": 1}, {"data_dir": data}):
        with pytest.raises(OutputError, match="was made with other settings or data"):
            train(inputs, output, **change)
    # Checkpoints of a killed run do not change that.
    monkeypatch.setattr(embed, "key_of", lambda _: "stale")
    (trained.with_name("contrastive") / "stale").mkdir()
    with pytest.raises(OutputError, match="was made with other settings or data"):
        train(inputs, output, seed=1)
    assert fingerprint(trained) == before


def test_final_folder_has_the_files_of_older_libraries_and_the_tokenizer_and_embeddings_of_the_model(inputs, tmp_path):
    """Earlier versions of sentence-transformers have no sentence_transformers.base, those of transformers no
    TokenizersBackend."""
    model = load_sentence_transformer(inputs / "bert", max_length=16).eval()
    model.append(modules.Dense(2 * 32, 8)).append(modules.Normalize())
    model[1].pooling_mode = ("cls", "max")
    model.prompts = {"query": "find : "}
    save_final(model, inputs / "bert", tmp_path / "final")
    listed = read_json(tmp_path / "final" / "modules.json")
    assert [entry["type"].rpartition(".") for entry in listed] == [
        ("sentence_transformers.models", ".", name) for name in ("Transformer", "Pooling", "Dense", "Normalize")
    ]
    pooling = read_json(tmp_path / "final" / "1_Pooling" / "config.json")
    chosen = {name for name, value in pooling.items() if value is True}
    assert chosen == {"pooling_mode_cls_token", "pooling_mode_max_tokens", "include_prompt"}
    dense = read_json(tmp_path / "final" / "2_Dense" / "config.json")
    assert dense.keys() == {"in_features", "out_features", "bias", "activation_function"}
    names = ("vocab.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    assert all((tmp_path / "final" / name).read_bytes() == (inputs / "bert" / name).read_bytes() for name in names)
    check_modules(tmp_path / "final")
    loaded = SentenceTransformer(str(tmp_path / "final"), device="cpu", local_files_only=True)
    texts = [" ".join(pair["query"] for pair in PAIRS), PAIRS[0]["query"]]
    assert loaded.max_seq_length == 16 < len(texts[0].split())
    np.testing.assert_allclose(loaded.encode(texts), model.encode(texts), atol=1e-6)  # measured: equal


def test_weights_are_float32_even_if_the_folder_has_bfloat16(inputs, tmp_path):
    shutil.copytree(inputs / "bert", tmp_path / "bert")
    BertForMaskedLM.from_pretrained(inputs / "bert", dtype=torch.bfloat16).save_pretrained(tmp_path / "bert")
    save_final(load_sentence_transformer(tmp_path / "bert", max_length=16), tmp_path / "bert", tmp_path / "final")
    for name, dtype in (("bert", torch.bfloat16), ("final", torch.float32)):
        assert {tensor.dtype for tensor in load_file(tmp_path / name / "model.safetensors").values()} == {dtype}
