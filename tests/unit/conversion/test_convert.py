"""`neobert convert megatron-to-hf`, `average` and `verify`: wrong results and inputs are refused, without output."""

import math
import re
import signal
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch
from commands import call, largest_file
from safetensors.torch import load_file, save_file
from saved_model import MODEL, READ, WORDS, SavedModel, assert_nothing_written, build_internal, change_config, convert
from torch import Tensor

from checkpoint_conversion import checkpoint, compare, export
from checkpoint_conversion.checkpoint import read_checkpoint
from checkpoint_conversion.compare import Comparison, build_prompts, compare_logits
from megatron_neobert.checkpoint.train_state import TrainState
from megatron_neobert.config.schema import ModelConfig, PhaseChange, Settings
from megatron_neobert.errors import CheckpointError, ConversionError, OutputError
from megatron_neobert.runtime.atomic_files import build_folder


def swap_queries_and_keys(tensors):
    query, key = (f"model.layers.0.self_attn.{letter}_proj.weight" for letter in "qk")
    tensors |= {query: tensors[key], key: tensors[query] * 2}


def change_a_bias(tensors):
    tensors["lm_head.bias"][3] += 1e-6


DIFFERS = r"the exported model differs .*: "


@pytest.mark.parametrize(
    ("step", "change", "message"),
    [
        ("to_published", swap_queries_and_keys, r"logits differ by [\d.]+ of the largest, more than 0\.0001"),
        ("to_published", change_a_bias, rf"{DIFFERS}1 weights .* output_layer\.bias; nothing was written"),
        ("to_published", lambda tensors: tensors.pop("lm_head.bias"), "lm_head.bias is not there"),
        (
            "build_config",
            lambda config: config.update(rms_norm_eps=1.0001e-5),
            rf"{DIFFERS}norm_epsilon is 1e-05 and 1\.0001e-05; nothing was written",
        ),
    ],
    ids=["wrong mapping", "one value", "missing", "setting that logits do not show"],
)
def test_export_with_wrong_or_missing_weights_or_settings_is_refused(
    saved, tmp_path, monkeypatch, step, change, message
):
    convert_rightly = getattr(export, step)

    def convert_wrongly(*arguments):
        content = convert_rightly(*arguments)
        change(content)
        return content

    monkeypatch.setattr(export, step, convert_wrongly)
    with pytest.raises(ConversionError, match=message):
        convert(saved, tmp_path / "model")
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 0}, "--num-attention-heads 0 is below 1"),
        ({"hidden_size": 2**31}, "shape"),
        ({"num_layers": 3}, r"of 2 layers, but settings.yaml has --num-layers 3\."),
        ({"normalization": "LayerNorm"}, "iter_0000030 has normalization LayerNorm, which no published"),
    ],
)
def test_settings_of_another_model_or_of_a_model_without_a_layout_are_refused(saved, tmp_path, change, message):
    saved.record(Settings(model=replace(MODEL, **change)))
    with pytest.raises((CheckpointError, ConversionError), match=message):
        convert(saved, tmp_path / "model")
    assert_nothing_written(tmp_path)


@dataclass(frozen=True, kw_only=True)
class ModelConfigWithGeGLU(ModelConfig):
    """The settings of the model with a new one, as a contributor adds it."""

    gate: str = "silu"


def test_model_with_a_setting_that_conversion_does_not_know_is_refused(saved, tmp_path, monkeypatch):
    """The reference would compute SwiGLU with any value, so a comparison with it would prove nothing."""
    settings = Settings(model=ModelConfigWithGeGLU(**asdict(MODEL)))
    monkeypatch.setattr(checkpoint, "read_record", lambda path: settings)
    with pytest.raises(ConversionError, match="iter_0000030 has gate silu, which no published layout has"):
        convert(saved, tmp_path / "model")
    with pytest.raises(ConversionError, match="the model has gate silu, which"):
        checkpoint.reference_config(settings, vocab_size=len(WORDS))


def to_hf(load, output, *flags):
    return call("convert", "megatron-to-hf", "--load", load, "--output", output, *flags)


@pytest.mark.parametrize("load", ["checkpoints", "checkpoints/iter_0000030"])
def test_command_writes_into_an_empty_folder_and_prints_the_comparison(saved, tmp_path, load):
    (tmp_path / "model").mkdir()
    code, output, errors = to_hf(tmp_path / load, tmp_path / "model")
    assert (code, errors) == (0, "")
    assert "iter_0000030" in output and "same prediction" in output
    assert re.search(r"wrote \S+model in \d+ s", output)
    assert {"config.json", "conversion_report.json"} <= {path.name for path in (tmp_path / "model").iterdir()}


@pytest.mark.parametrize(
    ("objective", "phases", "warns"),
    [
        ("clm", (), True),
        ("clm", (PhaseChange(after_iters=30, objective="mlm"),), True),
        ("clm", (PhaseChange(after_iters=29, objective="mlm"),), False),
        ("mlm", (), False),
    ],
)
def test_model_that_was_trained_with_clm_only_is_converted_with_a_warning(saved, tmp_path, objective, phases, warns):
    run = Settings(model=MODEL).with_section("data", objective=objective)
    saved.record(run.with_section("training", phases=phases))
    code, output, _ = to_hf(saved.save, tmp_path / "model", "--no-verification")
    assert code == 0
    assert ("warning: this run was trained with --objective clm only." in output) == warns


@pytest.mark.parametrize("existing", ["model", "model/notes.txt"])
def test_existing_output_is_refused_and_not_changed(saved, tmp_path, existing):
    (tmp_path / existing).parent.mkdir(exist_ok=True)
    (tmp_path / existing).write_text("mine")
    code, _, error = to_hf(saved.save, tmp_path / "model")
    assert code == 73 and "model exists already and is not empty" in error
    assert (tmp_path / existing).read_text() == "mine"


@pytest.mark.parametrize(
    ("flags", "missing", "code", "message"),
    [
        (["--iteration", "77"], None, 66, "holds no checkpoint of iteration 77. Choose one of 30."),
        ([], "MANIFEST.json", 66, "checkpoints holds no checkpoint"),
        ([], "rank_00000.safetensors", 78, "rank_00000.safetensors: missing"),
    ],
)
def test_missing_checkpoint_or_file_has_its_exit_code(saved, tmp_path, monkeypatch, flags, missing, code, message):
    monkeypatch.chdir(tmp_path)
    if missing:
        (saved.iteration_folder / missing).unlink()
    exit_code, _, error = to_hf("checkpoints", "model", *flags)
    assert exit_code == code and message in error
    assert_nothing_written(tmp_path)


@pytest.fixture
def run(saved: SavedModel, internal: dict[str, Tensor]) -> Path:
    """A save folder with iterations 30, 40 and 50, whose weights are `internal` times 1, 2 and 3."""
    for times, number in ((2, 40), (3, 50), (1, 30)):
        saved.write({name: times * tensor for name, tensor in internal.items()})
        if number != 30:
            saved.iteration_folder.rename(saved.save / f"iter_00000{number}")
    return saved.save


@pytest.mark.parametrize(
    ("options", "iterations", "times"),
    [((2,), (50, 40), 2.5), ((3,), (50, 40, 30), 2.0), ((2, "--iteration", 40), (40, 30), 1.5)],
)
def test_average_of_checkpoints_is_a_checkpoint_with_their_mean(run, tmp_path, internal, options, iterations, times):
    _, output, _ = call("average", "--load", run, "--output", tmp_path / "mean", "--last", *options)
    assert f"the mean of iterations {', '.join(map(str, iterations))}," in output
    mean = read_checkpoint(tmp_path / "mean")
    assert mean.train_state == TrainState("", read_corpora=READ), "a run from it must not repeat the batches"
    assert mean.tensors.keys() == internal.keys()
    for name, tensor in mean.tensors.items():
        torch.testing.assert_close(tensor, times * internal[name], msg=name)


def use_another_tokenizer(saved: SavedModel) -> None:
    path = saved.iteration_folder / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text().replace('"cat"', '"cow"'))


def write_nan(saved: SavedModel) -> None:
    tensors = build_internal()
    tensors["output_layer.bias"][0] = math.nan
    saved.write(tensors)


def change_rotary_base(saved: SavedModel) -> None:
    saved.record(Settings(model=replace(MODEL, rotary_base=7000)))


@pytest.mark.parametrize(
    ("change", "last", "code", "message"),
    [
        (use_another_tokenizer, 3, 78, "have different tokenizers"),
        (write_nan, 3, 78, "is not finite"),
        (change_rotary_base, 3, 78, "are checkpoints of different models"),
        (change_rotary_base, 4, 66, "has 3 checkpoints up to iteration 50, fewer than"),
    ],
)
def test_checkpoints_without_a_mean_are_refused(run, saved, tmp_path, change, last, code, message):
    change(saved)
    saved.seal()
    exit_code, _, error = call("average", "--load", run, "--output", tmp_path / "mean", "--last", last)
    assert exit_code == code and message in error
    assert not (tmp_path / "mean").exists()


# --- neobert verify: a checkpoint and its export are equal, and changed models are not


def test_checkpoint_and_its_export_are_equal(saved, model):
    code, output, _ = call("verify", saved.save, model)
    assert code == 0
    assert "iter_0000030 (Megatron)" in output
    assert "model (EuroBertForMaskedLM)" in output
    assert "logits: equal within 0.0001" in output
    assert "settings: equal" in output
    assert "weights: all 16 tensors equal bit for bit\nequal" in output


def change_unused_row(folder: Path) -> None:
    """Change the embedding of a token that is not in the prompts."""
    used = set(build_prompts(len(WORDS), longest=64).tokens_bs.flatten().tolist())
    unused = next(token for token in range(len(WORDS)) if token not in used)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][unused] += 1.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: change_config(folder, rms_norm_eps=1.0001e-5), "norm_epsilon is 1e-05 and 1.0001e-05 in A and"),
        (change_unused_row, "1 of 16 tensors differ; largest in embedding.word_embeddings.weight, by 0."),
    ],
    ids=["epsilon", "unused row"],
)
def test_difference_that_logits_do_not_show_is_not_equal(saved, model, monkeypatch, change, message):
    monkeypatch.setattr(compare, "PROMPT_TOKENS", (3,))  # fewer tokens than the vocabulary, as at full size
    change(model)
    code, output, _ = call("verify", saved.save, model)
    assert code == 1
    assert "logits: equal within 0.0001" in output
    assert message in output


def test_changed_weight_is_not_equal_and_equal_within_a_larger_tolerance(saved, model, internal):
    internal["decoder.layers.1.self_attention.linear_qkv.weight"][:4] *= 1.1
    saved.write(internal)
    code, output, _ = call("verify", saved.save, model)
    assert code == 1 and "NOT equal within 0.0001" in output
    assert call("verify", saved.save, model, "--tolerance", "2")[0] == 0


def test_comparison_covers_all_tokens_except_padding():
    first = torch.tensor([[[4.0, 0.0], [0.0, 2.0], [0.0, 0.0]]])
    second = torch.tensor([[[4.0, 0.0], [1.0, 0.5], [99.0, 0.0]]])
    comparison = compare_logits(first, second, torch.tensor([[1, 1, 0]]))
    assert comparison == Comparison(2, max_abs=1.5, relative=1.5 / 4, argmax_agreement=0.5)
    assert compare_logits(first, second, torch.ones(1, 3)).max_abs == 99.0


def test_nan_is_never_within_a_tolerance():
    first = torch.ones(1, 1, 3)
    assert not compare_logits(first, first * math.nan, torch.ones(1, 1)).within(1e9)


# --- a conversion that fails or is stopped leaves no output, and does not change files of others


@pytest.mark.parametrize("size", [100, 1000, 20_000], ids=["config", "tokenizer or head", "weights"])
@pytest.mark.parametrize("direction", ["megatron-to-hf", "hf-to-megatron"])
def test_full_disk_ends_with_74_and_leaves_no_output(saved, tmp_path, direction, size):
    source = saved.save
    if direction == "hf-to-megatron":
        source = tmp_path / "source"
        convert(saved, source, verified=False)
    with largest_file(size):
        code, _, error = call("convert", direction, "--load", source, "--output", tmp_path / "model")
    assert code == 74
    assert "model cannot be written (" in error and "File too large" in error
    assert error.count("\n") == 1
    assert_nothing_written(tmp_path)


def test_sigterm_removes_the_unfinished_folder(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt), build_folder(tmp_path / "model") as folder:
        (folder / "half").write_text("half")
        signal.raise_signal(signal.SIGTERM)
    assert_nothing_written(tmp_path)


def test_error_of_an_input_is_not_an_error_of_the_output(tmp_path: Path):
    with pytest.raises(FileNotFoundError), build_folder(tmp_path / "model"):
        (tmp_path / "input").read_bytes()
    assert_nothing_written(tmp_path)


def test_output_that_another_program_created_meanwhile_is_kept(tmp_path: Path):
    with (
        pytest.raises(OutputError, match="model was created by another program at the same time"),
        build_folder(tmp_path / "model"),
    ):
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "notes.txt").write_text("theirs")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["model", "model/notes.txt"]
