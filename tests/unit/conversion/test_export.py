"""Files of an exported folder: config.json, weights, report, model card, and the files of sentence-transformers."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import PUBLISHED, succeed
from huggingface_hub import ModelCard
from json_files import read_json
from packaging.specifiers import SpecifierSet
from safetensors import safe_open
from saved_model import MODEL, SHAPE, WORDS, SavedModel, build_reference, convert
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer
from unit.huggingface.tiny_neobert import FlashKernel

from checkpoint_conversion.checkpoint import model_shape
from checkpoint_conversion.compare import Checks
from checkpoint_conversion.config_json import build_config
from megatron_neobert.config.schema import CheckpointConfig, DataConfig, PhaseChange, Settings
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.errors import ConversionError
from megatron_neobert.huggingface.auto_classes import register_neobert
from megatron_neobert.huggingface.folder_files import write_module_files
from megatron_neobert.huggingface.modeling_neobert import AUTO_MAP
from megatron_neobert.runtime.atomic_files import sha256_of

Exported = Callable[..., tuple[Path, Checks]]


def test_exported_config_states_conventions_that_no_comparison_shows(exported: Exported):
    config = read_json(exported()[0] / "config.json")
    expected = {
        "architectures": ["EuroBertForMaskedLM"],
        "num_key_value_heads": 4,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "classifier_pooling": "bos",
        "pad_token_id": WORDS.index("[PAD]"),
        "bos_token_id": WORDS.index("[CLS]"),
        "eos_token_id": WORDS.index("[SEP]"),
        "mask_token_id": WORDS.index("[MASK]"),
    }
    assert {name: config.get(name) for name in expected} == expected
    assert not {"auto_map", "max_length", "use_cache", "trust_remote_code", "_name_or_path"} & config.keys()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exported_weights_have_the_chosen_dtype_and_the_format_pt(exported: Exported, dtype: str):
    folder, checks = exported(dtype=dtype)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert {str(file.get_tensor(name).dtype) for name in file.keys()} == {f"torch.{dtype}"}  # noqa: SIM118
    assert read_json(folder / "config.json")["dtype"] == dtype
    assert max(checks[how].relative for how in ("padded", "packed")) < 1e-5, "the source is rounded too"
    assert ("padded in bfloat16" in checks) == (dtype == "bfloat16")


def test_report_has_source_settings_and_differences(exported: Exported):
    folder, checks = exported()
    report = read_json(folder / "conversion_report.json")
    assert (report["source"]["iteration"], report["source"]["consumed_tokens"]) == (30, 9_000)
    assert report["training"]["model"]["rotary_base"] == 5000
    manifest = folder.parent / "checkpoints" / "iter_0000030" / "MANIFEST.json"
    assert report["source"]["manifest_sha256"] == sha256_of(manifest)
    assert report["verification"] == {how: asdict(check) for how, check in checks.items()}
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
    assert read_json(folder / "sentence_bert_config.json")["max_seq_length"] == longest
    assert read_json(folder / "config.json")["max_position_embeddings"] == 64
    assert f"no input longer than {longest} tokens" in (folder / "README.md").read_text()


def test_report_has_the_settings_of_the_last_phase_and_no_paths(saved: SavedModel, tmp_path: Path):
    path_fields = [item for item in fields(DataConfig) if "str" in str(item.type) and item.default in (None, ())]
    paths = {item.name: "/private/path" if item.default is None else ("/private/path",) for item in path_fields}
    phases = (
        PhaseChange(after_iters=29, seq_length=64, data_path=("/private/path",)),
        PhaseChange(after_iters=30, seq_length=32),
    )
    saved.record(Settings(model=MODEL, data=DataConfig(**paths)).with_section("training", phases=phases))
    convert(saved, tmp_path / "model", verified=False)
    assert "/private/path" in (saved.iteration_folder / "settings.yaml").read_text()
    report = (tmp_path / "model" / "conversion_report.json").read_text()
    assert json.loads(report)["training"]["data"]["seq_length"] == 64
    assert "/private/path" not in report


def test_report_and_card_state_that_a_run_continued_from_other_weights(saved: SavedModel, tmp_path: Path):
    saved.record(Settings(model=MODEL, checkpoint=CheckpointConfig(continue_from="runs/published")))
    convert(saved, tmp_path / "model", verified=False)
    assert read_json(tmp_path / "model" / "conversion_report.json")["source"]["continued_from"] == "published"
    card = (tmp_path / "model" / "README.md").read_text()
    assert "It continued from the weights of another run or model" in card


def test_neobert_config_has_the_published_fields(bert_vocabulary: Path):
    published = read_json(PUBLISHED / "config.json")
    bert = load_tokenizer(bert_vocabulary)
    shape = model_shape(Settings(), vocab_size=bert.vocab_size)
    config = build_config("neobert", shape, bert)
    missing = {"auto_map", "kwargs", "pretrained_model_name_or_path", "transformers_version", "trust_remote_code"}
    assert published.keys() - config.keys() == missing, "keys that do not describe the model"
    assert {name for name in published.keys() - missing if config[name] != published[name]} == {"architectures"}
    assert config["max_position_embeddings"] == published["max_length"]
    assert AUTO_MAP.keys() >= published["auto_map"].keys()


def test_feed_forward_width_that_the_neobert_layout_cannot_express_is_refused(saved: SavedModel):
    shape = replace(SHAPE, model=replace(MODEL, ffn_hidden_size=44))
    with pytest.raises(ConversionError, match="--ffn-hidden-size 44 is not a multiple of 8"):
        build_config("neobert", shape, load_tokenizer(saved.vocabulary))


TEXTS = ["the cat sat on a mat .", "a mat"]


def load_embedder(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


def test_embedding_is_the_mean_over_all_tokens(exported: Exported):
    model = load_embedder(exported(sentence_transformers=True)[0])
    states = model.encode(TEXTS, output_value="token_embeddings")
    assert [len(states_of_text) for states_of_text in states] == [9, 4], "[CLS] and [SEP] included, padding excluded"
    expected = torch.stack([states_of_text.mean(dim=0) for states_of_text in states])
    embeddings = model.encode(TEXTS, convert_to_tensor=True)
    torch.testing.assert_close(embeddings, expected, atol=1e-6, rtol=0)  # measured: equal


def test_texts_are_embedded_without_padding_if_flash_attention_is_there(exported: Any, monkeypatch: pytest.MonkeyPatch):
    """The option `unpad_inputs` of sentence-transformers sends document bounds to a folder with this project's code."""
    register_neobert()
    folder, _ = exported(layout="neobert", sentence_transformers=True)
    model = load_embedder(folder)
    expected = model.encode(TEXTS)
    kernel = FlashKernel(monkeypatch)
    model[0].auto_model.config._attn_implementation = "flash_attention_2"
    model[0].unpad_inputs = True
    torch.testing.assert_close(model.encode(TEXTS), expected, atol=1e-6, rtol=0)  # measured: 7.7e-7
    calls = [(call["starts"].tolist(), call["longest"]) for call in kernel.calls]
    assert calls == [([0, 9, 13], (9, 9))] * MODEL.num_layers


@pytest.mark.parametrize(("layout", "oldest"), [("eurobert", "5.3.0"), ("neobert", "4.57.3")])
def test_versions_of_transformers_that_do_not_support_the_layout_are_refused(tmp_path: Path, layout: str, oldest: str):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": layout}))
    pooling = {"embedding_dimension": 32, "pooling_mode": "mean", "include_prompt": True}
    write_module_files(tmp_path, max_seq_length=64, pooling=pooling)
    settings = read_json(tmp_path / "config_sentence_transformers.json")
    supported = SpecifierSet(settings["requirements"]["transformers"]["specifier"])
    versions = ("4.47.1", "4.56.2", "4.57.3", "5.2.0", "5.3.0", "5.23.0")
    assert next(version for version in versions if version in supported) == oldest


# --- the model card


@pytest.mark.parametrize(("layout", "examples", "is_trusted"), [("eurobert", 4, False), ("neobert", 5, True)])
def test_examples_run_without_a_question_and_use_remote_code_only_for_the_neobert_layout(
    exported, layout, examples, is_trusted
):
    folder, _ = exported(layout=layout, sentence_transformers=True)
    text = (folder / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == examples
    assert ("trust_remote_code" in text) == is_trusted
    # A new process: in this one, the neobert classes are registered, and transformers would not ask.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    program = "\n".join(blocks).replace("path/to/this/folder", str(folder))
    output = succeed(sys.executable, "-c", program, env=environment, stdin=subprocess.DEVNULL)
    assert "custom code" not in output
    assert output.splitlines()[0] == "(2, 32)"
    assert "'token_str'" in output and "torch.Size([2, " in output


@pytest.mark.parametrize("sentences", [False, True])
def test_front_matter_has_library_task_and_tags(exported, sentences):
    folder, _ = exported(sentence_transformers=sentences)
    data = ModelCard.load(folder / "README.md").data.to_dict()
    tags = ["neobert", "encoder"] + (["sentence-transformers", "feature-extraction"] if sentences else [])
    assert data == {"license": "unknown", "library_name": "transformers", "pipeline_tag": "fill-mask", "tags": tags}


def test_card_shows_settings_and_differences(exported):
    text = (exported()[0] / "README.md").read_text(encoding="utf-8")
    zero_biases = 2 * (2 * 48 + 32)
    parameters = sum(parameter.numel() for parameter in build_reference().parameters()) + zero_biases
    for row in (
        f"| parameters | {parameters:,} |",
        "| tokens seen | 9,000 |",
        "| attention across packed documents | no |",
        "| Adam betas | 0.9 and 0.95 |",
        "|  | padded | packed |",
        "| same prediction | 100.00% | 100.00% |",
    ):
        assert f"\n{row}\n" in text
    assert f"{zero_biases:,} of its parameters are biases" in text
    assert "All 16 weights were equal to the checkpoint's" in text
    assert "pre-trained only" in text
