"""Converting: what cannot be right is refused and leaves nothing behind; the command says what it does."""

import re
from dataclasses import replace

import pytest
from commands import call
from saved_model import MODEL, assert_nothing_written, convert

from checkpoint_conversion import export
from megatron_neobert.config.schema import Settings
from megatron_neobert.errors import CheckpointError, ConversionError


def exchange_queries_and_keys(tensors):
    query, key = (f"model.layers.0.self_attn.{letter}_proj.weight" for letter in "qk")
    tensors |= {query: tensors[key], key: tensors[query] * 2}


def change_a_bias(tensors):
    tensors["lm_head.bias"][3] += 1e-6


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (exchange_queries_and_keys, r"logits differ from the source's by [\d.]+ of the largest, more than 0\.0001"),
        (change_a_bias, r"the exported model: 1 weights .* output_layer\.bias;.* nothing was written"),
        (lambda tensors: tensors.pop("lm_head.bias"), r"missing_keys.*lm_head.bias"),
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.bias"), r"missing_keys.*layers.1.mlp.up_proj.bias"),
    ],
    ids=["mapping", "one value", "head that transformers would invent", "layer that transformers would invent"],
)
def test_weights_that_arrive_otherwise_are_refused_and_leave_nothing(saved, tmp_path, monkeypatch, spoil, said):
    right = export.to_published

    def wrong(*arguments):
        tensors = right(*arguments)
        spoil(tensors)
        return tensors

    monkeypatch.setattr(export, "to_published", wrong)
    with pytest.raises(ConversionError, match=said):
        convert(saved, tmp_path / "model")
    assert_nothing_written(tmp_path)


def test_setting_whose_difference_logits_do_not_show_is_refused_and_leaves_nothing(saved, tmp_path, monkeypatch):
    right = export.build_config
    monkeypatch.setattr(export, "build_config", lambda *a: {**right(*a), "rms_norm_eps": 1.0001e-5})
    said = r"the exported model: norm_epsilon is 1e-05 and 1\.0001e-05.* nothing was written"
    with pytest.raises(ConversionError, match=said):
        convert(saved, tmp_path / "model")
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_attention_heads": 0}, "--num-attention-heads 0 is below 1"),
        ({"ffn_hidden_size": -8}, "--ffn-hidden-size -8 is below 1"),
        ({"hidden_size": 2**31}, "shape"),
        ({"num_layers": 3}, r"of 2 layers; settings.yaml has --num-layers 3\."),
        ({"num_layers": 10**9}, r"of 2 layers; settings.yaml has --num-layers 1000000000\."),
        ({"swiglu": False}, "iter_0000030 was trained with .*swiglu False.* have SwiGLU"),
        ({"normalization": "LayerNorm"}, "iter_0000030 was trained with .*normalization LayerNorm.* have SwiGLU"),
    ],
)
def test_record_of_another_model_or_of_none_that_has_a_layout_is_refused(saved, tmp_path, change, said):
    saved.record(Settings(model=replace(MODEL, **change)))
    with pytest.raises((CheckpointError, ConversionError), match=said):
        convert(saved, tmp_path / "model")
    assert_nothing_written(tmp_path)


# --- the command ---


def to_hf(saved, output, *flags):
    return call("convert", "megatron-to-hf", "--load", saved.save, "--output", output, *flags)


@pytest.mark.parametrize("load", ["checkpoints", "checkpoints/iter_0000030"])
def test_command_fills_an_empty_folder_and_prints_the_comparison(saved, tmp_path, load):
    (tmp_path / "model").mkdir()
    code, shown, complaints = call(
        "convert", "megatron-to-hf", "--load", tmp_path / load, "--output", tmp_path / "model"
    )
    assert (code, complaints) == (0, "")
    assert "iter_0000030" in shown and "same token" in shown
    assert re.search(r"wrote \S+model in \d+ s", shown)
    assert {"config.json", "conversion_report.json"} <= {path.name for path in (tmp_path / "model").iterdir()}


@pytest.mark.parametrize("kind", ["file", "folder with a file"])
def test_existing_output_is_refused_and_kept(saved, tmp_path, kind):
    output = tmp_path / "model"
    mine = output if kind == "file" else output / "notes.txt"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    code, _, complaint = to_hf(saved, output)
    assert code == 73 and "model exists already and is not empty" in complaint
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(
    ("flags", "lost", "code", "sentence"),
    [
        (["--load", "nowhere"], None, 66, "nowhere holds no checkpoint; name the folder given to --save"),
        (["--load", "loop"], None, 66, "loop holds no checkpoint"),
        (["--iteration", "77"], None, 66, "holds no checkpoint of iteration 77; it holds those of 30."),
        ([], "MANIFEST.json", 66, "checkpoints holds no checkpoint"),
        ([], "rank_00000.safetensors", 78, "rank_00000.safetensors: missing"),
    ],
)
def test_command_ends_with_the_sentence_and_exit_code_of_the_problem(
    saved, tmp_path, monkeypatch, flags, lost, code, sentence
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    if lost:
        (saved.iteration_folder / lost).unlink()
    ended, _, complaint = call("convert", "megatron-to-hf", "--load", "checkpoints", "--output", "model", *flags)
    assert ended == code and sentence in complaint
    assert_nothing_written(tmp_path)
