"""What a conversion writes: complete, right and loadable by anybody."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from saved_model import MODEL, WORDS, SavedModel, convert
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, pipeline

from checkpoint_conversion.comparison import compare_logits
from megatron_neobert.config.cli import write_record
from megatron_neobert.config.schema import CheckpointConfig, Settings
from megatron_neobert.runtime.atomic_files import sha256_of

REPOSITORY = Path(__file__).resolve().parents[3]


@torch.no_grad()
def test_exported_model_computes_the_logits_of_the_saved_weights(saved: SavedModel, tmp_path: Path):
    convert(saved, tmp_path / "model")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "model", trust_remote_code=False).eval()
    tokens_bs = torch.arange(len(WORDS)).roll(3)[None]
    comparison = compare_logits(saved.reference(tokens_bs), model(tokens_bs).logits, torch.ones_like(tokens_bs))
    assert comparison.relative < 1e-5  # measured 5.8e-7 on logits up to 3.4


def test_exported_config_says_everything_that_differs_from_a_default(saved: SavedModel, tmp_path: Path):
    convert(saved, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    expected = {
        "architectures": ["EuroBertForMaskedLM"],
        "model_type": "eurobert",
        "vocab_size": len(WORDS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "mlp_bias": True,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "classifier_pooling": "bos",
        "pad_token_id": WORDS.index("[PAD]"),
        "bos_token_id": WORDS.index("[CLS]"),
        "eos_token_id": WORDS.index("[SEP]"),
        "mask_token_id": WORDS.index("[MASK]"),
        "dtype": "float32",
    }
    assert {name: config.get(name) for name in expected} == expected
    assert not {"auto_map", "max_length", "use_cache", "trust_remote_code", "_name_or_path"} & config.keys()


def test_exported_tokenizer_frames_a_text_and_knows_the_longest_input(saved: SavedModel, tmp_path: Path):
    convert(saved, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", trust_remote_code=False)
    encoded = tokenizer("The cats [MASK].")
    assert tokenizer.convert_ids_to_tokens(encoded["input_ids"]) == [
        "[CLS]",
        "the",
        "cat",
        "##s",
        "[MASK]",
        ".",
        "[SEP]",
    ]
    assert set(encoded) == {"input_ids", "attention_mask"}
    assert tokenizer.model_max_length == 64


def test_exported_folder_answers_a_fill_mask_pipeline(saved: SavedModel, tmp_path: Path):
    convert(saved, tmp_path / "model")
    answers = pipeline("fill-mask", model=str(tmp_path / "model"), device="cpu")("the [MASK] sat", top_k=3)
    assert len(answers) == 3
    assert all(answer["token_str"] in WORDS for answer in answers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exported_weights_have_the_dtype_asked_for_and_the_format_pt(saved: SavedModel, tmp_path: Path, dtype: str):
    checks = convert(saved, tmp_path / "model", dtype=getattr(torch, dtype))
    with safe_open(tmp_path / "model" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert {str(file.get_tensor(name).dtype) for name in file.keys()} == {f"torch.{dtype}"}  # noqa: SIM118
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == dtype
    assert max(checks[how].relative for how in ("padded", "packed")) < 1e-5, "after rounding, so as exact as fp32"
    assert ("padded in bfloat16" in checks) == (dtype == "bfloat16")


def test_exported_files_can_be_read_by_the_same_people(saved: SavedModel, tmp_path: Path):
    convert(saved, tmp_path / "model")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    (tmp_path / "plain").touch()
    assert set(modes.values()) == {(tmp_path / "plain").stat().st_mode & 0o777}, modes


def test_report_names_the_source_the_files_and_the_difference(saved: SavedModel, tmp_path: Path):
    checks = convert(saved, tmp_path / "model")
    report = json.loads((tmp_path / "model" / "conversion_report.json").read_text())
    assert report["source"]["iteration"] == 30
    assert report["source"]["manifest_sha256"] == sha256_of(saved.iteration_folder / "MANIFEST.json")
    assert {how: figures["max_abs"] for how, figures in report["verification"].items()} == {
        "padded": checks["padded"].max_abs,
        "packed": checks["packed"].max_abs,
    }
    assert report["compared"]["weights"] == 16
    assert {"rotary_base", "norm_epsilon"} <= set(report["compared"]["settings"])
    written = {path.name for path in (tmp_path / "model").iterdir()} - {"conversion_report.json", "README.md"}
    assert report["files"] == {name: sha256_of(tmp_path / "model" / name) for name in written}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= written


def test_large_weights_are_cut_into_files_that_transformers_puts_together(saved: SavedModel, tmp_path: Path):
    whole, cut = tmp_path / "whole", tmp_path / "model"
    convert(saved, whole)
    convert(saved, cut, max_shard_size="20KB")
    files = sorted(cut.glob("*.safetensors"))
    assert len(files) > 2
    index = json.loads((cut / "model.safetensors.index.json").read_text())
    assert {path.name for path in files} == set(index["weight_map"].values())
    assert max(path.stat().st_size for path in files) < 24_000
    models = [AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=False) for folder in (whole, cut)]
    first, second = (model.state_dict() for model in models)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_llama_folder_is_an_encoder_with_its_head_beside_it(saved: SavedModel, tmp_path: Path):
    convert(saved, tmp_path / "model", layout="llama")
    model = AutoModel.from_pretrained(tmp_path / "model", trust_remote_code=False).eval()
    tokens_bs = torch.arange(len(WORDS))[None]
    changed_bs = tokens_bs.clone()
    changed_bs[0, -1] = 5
    with torch.no_grad():
        first, second = (model(tokens).last_hidden_state[0, 0] for tokens in (tokens_bs, changed_bs))
    assert not torch.allclose(first, second), "the first token does not see the last one"
    assert set(load_file(tmp_path / "model" / "mlm_head" / "model.safetensors")) == {"decoder.weight", "decoder.bias"}


def test_neobert_folder_carries_the_modelling_file_and_maps_every_class_to_it(saved: SavedModel, tmp_path: Path):
    convert(saved, tmp_path / "model", layout="neobert")
    source = (REPOSITORY / "megatron_neobert" / "huggingface" / "modeling_neobert.py").read_text()
    assert (tmp_path / "model" / "modeling_neobert.py").read_text() == source
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert all(f"class {name.removeprefix('modeling_neobert.')}(" in source for name in config["auto_map"].values())


def test_sentence_transformers_loads_the_folder_when_asked_for(saved: SavedModel, tmp_path: Path):
    convert(saved, tmp_path / "model", sentence_transformers=True)
    model = SentenceTransformer(str(tmp_path / "model"), device="cpu", local_files_only=True)
    assert model.encode(["the cat sat", "on a mat"]).shape == (2, 32)


def test_report_of_a_trained_checkpoint_holds_its_settings_without_paths(saved: SavedModel, tmp_path: Path):
    convert(saved, tmp_path / "model")
    report = json.loads((tmp_path / "model" / "conversion_report.json").read_text())
    assert report["training"]["model"]["rotary_base"] == 5000
    assert report["source"]["consumed_tokens"] == 9_000
    assert not {"data_path", "tokenizer_model"} & report["training"]["data"].keys()


def test_a_run_that_began_from_other_weights_says_so(saved: SavedModel, tmp_path: Path):
    settings = Settings(model=MODEL, checkpoint=CheckpointConfig(continue_from="runs/published"))
    write_record(settings, saved.iteration_folder / "settings.yaml")
    saved.seal()
    convert(saved, tmp_path / "model", base_model="chandar-lab/NeoBERT")
    report = json.loads((tmp_path / "model" / "conversion_report.json").read_text())
    assert report["source"]["continued_from"] == "published"
    card = (tmp_path / "model" / "README.md").read_text()
    assert "It began from the weights of another run or model" in card
    assert "base_model: chandar-lab/NeoBERT" in card
