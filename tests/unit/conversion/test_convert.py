"""Converting: what cannot be right is refused and leaves nothing behind; the command says what it does."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from saved_model import MODEL, WORDS, SavedModel, assert_nothing_written, convert
from torch import Tensor

from checkpoint_conversion import hf_writer
from checkpoint_conversion.convert import main
from checkpoint_conversion.megatron_io import read_checkpoint
from megatron_neobert.config.cli import write_record
from megatron_neobert.config.schema import Settings
from megatron_neobert.errors import (
    CheckpointError,
    ConfigError,
    ConversionError,
    OutputError,
    run_command,
)


def test_wrong_mapping_is_refused_and_leaves_nothing(
    saved: SavedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    right = hf_writer.to_published

    def exchange_queries_and_keys(*arguments: Any) -> dict[str, Tensor]:
        tensors = right(*arguments)
        query, key = (f"model.layers.0.self_attn.{letter}_proj.weight" for letter in "qk")
        return tensors | {query: tensors[key], key: tensors[query] * 2}

    monkeypatch.setattr(hf_writer, "to_published", exchange_queries_and_keys)
    with pytest.raises(
        ConversionError, match=r"logits differ from the source's by [\d.]+ of the largest, more than 0\.0001"
    ):
        convert(saved, tmp_path / "model")
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize("difference", ["a setting", "a weight"])
def test_difference_that_logits_do_not_show_is_refused_and_leaves_nothing(
    saved: SavedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, difference: str
):
    config, weights = hf_writer.build_config, hf_writer.to_published

    def write_another_bias(*arguments: Any) -> dict[str, Tensor]:
        tensors = weights(*arguments)
        tensors["lm_head.bias"][3] += 1e-6
        return tensors

    if difference == "a setting":
        monkeypatch.setattr(hf_writer, "build_config", lambda *a: {**config(*a), "rms_norm_eps": 1.0001e-5})
    else:
        monkeypatch.setattr(hf_writer, "to_published", write_another_bias)
    found = {"a setting": r"norm_epsilon is 1e-05 and 1\.0001e-05", "a weight": r"1 weights .* output_layer\.bias;"}
    with pytest.raises(ConversionError, match=f"the exported model: {found[difference]}.* nothing was written"):
        convert(saved, tmp_path / "model")
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize("name", ["lm_head.bias", "model.layers.1.mlp.up_proj.bias"])
def test_weight_that_transformers_would_invent_is_refused(
    saved: SavedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    right = hf_writer.to_published
    monkeypatch.setattr(hf_writer, "to_published", lambda *a: {k: v for k, v in right(*a).items() if k != name})
    with pytest.raises(ConversionError, match=rf"missing_keys.*{name}"):
        convert(saved, tmp_path / "model")
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_attention_heads": 0}, "--num-attention-heads 0 is below 1"),
        ({"ffn_hidden_size": -8}, "--ffn-hidden-size -8 is below 1"),
        ({"hidden_size": 2**31}, "shape"),
    ],
)
def test_a_record_of_another_or_no_model_is_refused(
    saved: SavedModel, tmp_path: Path, change: dict[str, int], said: str
):
    write_record(Settings(model=replace(MODEL, **change)), saved.iteration_folder / "settings.yaml")
    saved.seal()
    with pytest.raises((CheckpointError, ConversionError), match=said):
        convert(saved, tmp_path / "model")


@pytest.mark.parametrize("num_layers", [3, 10**9])
def test_settings_of_another_depth_are_refused_with_both_numbers(saved: SavedModel, num_layers: int):
    write_record(Settings(model=replace(MODEL, num_layers=num_layers)), saved.iteration_folder / "settings.yaml")
    saved.seal()
    with pytest.raises(ConversionError, match=rf"of 2 layers; settings.yaml has --num-layers {num_layers}\."):
        read_checkpoint(saved.save)


@pytest.mark.parametrize("ablation", [{"swiglu": False}, {"normalization": "LayerNorm"}])
def test_layers_that_no_published_layout_has_are_refused_with_their_settings(
    saved: SavedModel, tmp_path: Path, ablation: dict[str, Any]
):
    write_record(Settings(model=replace(MODEL, **ablation)), saved.iteration_folder / "settings.yaml")
    saved.seal()
    ((name, value),) = ablation.items()
    with pytest.raises(ConversionError, match=rf"iter_0000030 was trained with .*{name} {value}.* have SwiGLU"):
        convert(saved, tmp_path / "model")
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize("kind", ["file", "folder with a file"])
def test_existing_output_is_refused_and_kept(saved: SavedModel, tmp_path: Path, kind: str):
    output = tmp_path / "model"
    mine = output if kind == "file" else output / "notes.txt"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(OutputError, match=r"model exists already and is not empty"):
        convert(saved, output)
    assert mine.read_text() == "mine"


def test_empty_output_folder_is_filled(saved: SavedModel, tmp_path: Path):
    (tmp_path / "model").mkdir()
    convert(saved, tmp_path / "model")
    assert (tmp_path / "model" / "config.json").is_file()


# --- what is read ---


# --- the command ---


def test_every_checkpoint_of_a_run_is_converted_once(
    saved: SavedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "revisions"
    arguments = ["convert.py", "megatron-to-hf", "--load", str(saved.save), "--output", str(output), "--all-iterations"]
    monkeypatch.setattr(sys, "argv", arguments)
    main()
    first = (output / "iter_0000030" / "config.json").stat().st_mtime_ns
    shutil.copytree(saved.iteration_folder, saved.save / "iter_0000040")
    main()
    assert "kept" in capsys.readouterr().out
    assert (output / "iter_0000030" / "config.json").stat().st_mtime_ns == first
    assert json.loads((output / "iter_0000040" / "conversion_report.json").read_text())["source"]["iteration"] == 40
    main()
    assert "nothing new to convert" in capsys.readouterr().out
    for other in (["--dtype", "bfloat16"], ["--max-shard-size", "1MB"], ["--sentence-transformers"]):
        monkeypatch.setattr(sys, "argv", [*arguments, *other])
        with pytest.raises(OutputError, match=r"iter_0000030 is there, but was not made from .* with these options"):
            main()


@pytest.mark.parametrize("size", ["foo", "0GB", "500", "-5MB"])
def test_a_shard_size_that_is_none_is_refused_before_anything_is_read(size: str, monkeypatch: pytest.MonkeyPatch):
    arguments = ["convert.py", "megatron-to-hf", "--load", "nowhere", "--output", "model", f"--max-shard-size={size}"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(ConfigError, match=f"'{size}' is no size such as 500MB or 5GB"):
        main()


def test_command_converts_and_prints_the_comparison(
    saved: SavedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    arguments = ["convert.py", "megatron-to-hf", "--load", str(saved.save), "--output", str(tmp_path / "model")]
    monkeypatch.setattr(sys, "argv", arguments)
    main()
    shown = capsys.readouterr().out
    assert "iter_0000030" in shown
    assert "same token" in shown
    assert re.search(r"wrote \S+model in \d+ s with at most [\d.]+ GiB of memory", shown)
    assert (tmp_path / "model" / "conversion_report.json").is_file()


def lose_a_file(saved: SavedModel) -> None:
    (saved.iteration_folder / "rank_00000.safetensors").unlink()


def lose_the_manifest(saved: SavedModel) -> None:
    (saved.iteration_folder / "MANIFEST.json").unlink()


def add_a_file(saved: SavedModel) -> None:
    (saved.save.parent / "model").write_text("mine")


def add_a_tokenizer(saved: SavedModel) -> None:
    (saved.save.parent / "other.txt").write_text("\n".join([*WORDS, "dog"]))


def link_to_itself(saved: SavedModel) -> None:
    (saved.save.parent / "loop").symlink_to("loop")


@pytest.mark.parametrize(
    ("flags", "change", "code", "sentence"),
    [
        (["--load", "nowhere"], None, 66, "nowhere holds no checkpoint; name the folder given to --save"),
        (["--load", "checkpoints/iter_0000030"], None, 66, "iter_0000030 is a checkpoint itself; name the folder"),
        (["--load", "loop"], link_to_itself, 66, "loop holds no checkpoint"),
        (["--iteration", "77"], None, 66, "holds no checkpoint of iteration 77; it holds those of 30."),
        ([], lose_the_manifest, 66, "checkpoints holds no checkpoint"),
        ([], lose_a_file, 78, "rank_00000.safetensors: missing"),
        ([], add_a_file, 73, "model exists already"),
        (["--output", "checkpoints/model"], None, 73, "which is only read; name a folder elsewhere"),
        (["--tokenizer-model", "other.txt"], add_a_tokenizer, 78, "other.txt (14 tokens) encodes differently from the"),
    ],
)
def test_command_ends_with_the_sentence_and_exit_code_of_the_problem(
    saved: SavedModel,
    tmp_path: Path,
    flags: list[str],
    change: Callable[[SavedModel], None] | None,
    code: int,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    if change is not None:
        change(saved)
    monkeypatch.chdir(tmp_path)
    command = ["convert.py", "megatron-to-hf", "--load", "checkpoints", "--output", "model", *flags]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        run_command(main)
    assert ended.value.code == code
    assert sentence in capsys.readouterr().err
