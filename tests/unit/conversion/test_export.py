"""What a conversion writes: complete, right and loadable by anybody."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from saved_model import MODEL, SHAPE, WORDS, SavedModel, convert
from transformers import AutoTokenizer

from checkpoint_conversion.checkpoint import model_shape
from checkpoint_conversion.compare import Checks
from checkpoint_conversion.config_json import FolderSpec, build_config
from megatron_neobert.config.schema import CheckpointConfig, DataConfig, PhaseChange, Settings
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from megatron_neobert.errors import ConversionError
from megatron_neobert.runtime.atomic_files import sha256_of

REPOSITORY = Path(__file__).resolve().parents[3]
# Of the published config.json: loading options that leaked into it, and versions.
NOT_OF_THE_MODEL = {
    "architectures",
    "auto_map",
    "kwargs",
    "pretrained_model_name_or_path",
    "transformers_version",
    "trust_remote_code",
}


@pytest.fixture(scope="module")
def folder(exported: Callable[..., tuple[Path, Checks]]) -> Path:
    """The export without any option."""
    return exported()[0]


def test_exported_config_says_everything_that_differs_from_a_default(folder: Path):
    config = json.loads((folder / "config.json").read_text())
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exported_weights_have_the_dtype_asked_for_and_the_format_pt(exported: Any, dtype: str):
    folder, checks = exported(dtype=dtype)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert {str(file.get_tensor(name).dtype) for name in file.keys()} == {f"torch.{dtype}"}  # noqa: SIM118
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    assert max(checks[how].relative for how in ("padded", "packed")) < 1e-5, "after rounding, so as exact as fp32"
    assert ("padded in bfloat16" in checks) == (dtype == "bfloat16")


def test_report_names_the_source_its_settings_and_the_difference(exported: Any):
    folder, checks = exported()
    report = json.loads((folder / "conversion_report.json").read_text())
    assert (report["source"]["iteration"], report["source"]["consumed_tokens"]) == (30, 9_000)
    assert report["training"]["model"]["rotary_base"] == 5000
    manifest = folder.parent / "checkpoints" / "iter_0000030" / "MANIFEST.json"
    assert report["source"]["manifest_sha256"] == sha256_of(manifest)
    assert {how: figures["max_abs"] for how, figures in report["verification"].items()} == {
        "padded": checks["padded"].max_abs,
        "packed": checks["packed"].max_abs,
    }
    assert report["compared"]["weights"] == 16
    assert {"rotary_base", "norm_epsilon"} <= set(report["compared"]["settings"])
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("longest", [16, 48])
def test_texts_are_truncated_at_the_last_trained_sequence_length(saved: SavedModel, tmp_path: Path, longest: int):
    data, phases = DataConfig(seq_length=32), (PhaseChange(after_iters=20, seq_length=longest),)
    saved.record(Settings(model=MODEL, data=data).with_section("training", phases=phases))
    folder = tmp_path / "model"
    convert(saved, folder, verified=False, sentence_transformers=True)
    assert AutoTokenizer.from_pretrained(folder, trust_remote_code=False).model_max_length == longest
    assert json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"] == longest
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 64


def test_report_of_a_run_in_phases_has_the_settings_of_the_last_one_and_no_path_of_the_machine(
    saved: SavedModel, tmp_path: Path
):
    free = [item for item in fields(DataConfig) if "str" in str(item.type) and item.default in (None, ())]
    private = {item.name: "/of/a/machine" if item.default is None else ("/of/a/machine",) for item in free}
    phases = (
        PhaseChange(after_iters=29, seq_length=64, data_path=("/of/a/machine",)),
        PhaseChange(after_iters=30, seq_length=32),
    )
    saved.record(Settings(model=MODEL, data=DataConfig(**private)).with_section("training", phases=phases))
    convert(saved, tmp_path / "model", verified=False)
    assert "/of/a/machine" in (saved.iteration_folder / "settings.yaml").read_text()
    report = (tmp_path / "model" / "conversion_report.json").read_text()
    assert json.loads(report)["training"]["data"]["seq_length"] == 64
    assert "/of/a/machine" not in report


def test_a_run_that_began_from_other_weights_says_so(saved: SavedModel, tmp_path: Path):
    saved.record(Settings(model=MODEL, checkpoint=CheckpointConfig(continue_from="runs/published")))
    convert(saved, tmp_path / "model", verified=False)
    report = json.loads((tmp_path / "model" / "conversion_report.json").read_text())
    assert report["source"]["continued_from"] == "published"
    card = (tmp_path / "model" / "README.md").read_text()
    assert "It began from the weights of another run or model" in card


# --- config.json ---


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in WORDS))
    return load_tokenizer(tmp_path / "vocab.txt")


def test_neobert_config_has_the_published_fields(shared_data: Path):
    published = json.loads((shared_data / "fixtures" / "hf_config.json").read_text())
    bert = load_tokenizer(shared_data / "tokenizers" / "bert-base-uncased" / "vocab.txt")
    shape = model_shape(Settings(), vocab_size=bert.vocab_size)
    config = build_config("neobert", FolderSpec(shape, bert))
    expected = {name: value for name, value in published.items() if name not in NOT_OF_THE_MODEL}
    assert {name: config.get(name) for name in expected} == expected
    assert config["max_position_embeddings"] == published["max_length"]
    assert config["auto_map"].keys() >= published["auto_map"].keys()
    assert not {"trust_remote_code", "kwargs"} & config.keys()


def test_a_width_that_the_published_fields_cannot_say_is_refused(tokenizer: Tokenizer):
    shape = replace(SHAPE, model=replace(MODEL, ffn_hidden_size=44))
    with pytest.raises(ConversionError, match="--ffn-hidden-size 44 is not a multiple of 8"):
        build_config("neobert", FolderSpec(shape, tokenizer))
