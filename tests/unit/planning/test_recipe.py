"""`neobert recipe`: rules that give NeoBERT's own recipe for its size and tokens."""

from dataclasses import replace
from pathlib import Path

import pytest
from processes import run_command

from megatron_neobert.config.cli import read_settings
from megatron_neobert.config.rules import find_problems
from megatron_neobert.config.schema import DataConfig, Settings
from megatron_neobert.model.flops import count_parameters, training_flops_per_token

COMMAND = "megatron_neobert.__main__"


def recipe(folder: Path, *flags: str) -> Settings:
    ended = run_command(COMMAND, "recipe", *flags, "--output", folder / "recipe.yaml")
    assert ended.code == 0, ended.output
    return read_settings(folder / "recipe.yaml")


def flops_of(settings: Settings) -> float:
    per_token = training_flops_per_token(settings, vocab_size=30_522, document_tokens=1024)
    return per_token * settings.tokens_per_iteration * settings.training.train_iters


def test_rules_give_the_recipe_of_neobert_for_its_parameters_and_tokens(tmp_path):
    settings = recipe(tmp_path, "--parameters", "245M", "--tokens", "2.1T")
    model, training = settings.model, settings.training
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (28, 768, 12)
    assert (settings.optimizer.lr, settings.optimizer.lr_warmup_iters) == (6e-4, 2000)
    assert settings.optimizer.lr_decay_iters is None  # the end of the decay follows --train-iters, also for WSD
    assert (training.micro_batch_size, training.global_batch_size) == (64, 2048)
    assert training.train_iters == 1_001_359  # the paper: 1,050,000, a part of them at 4,096 tokens
    assert (settings.checkpoint.save_interval, settings.checkpoint.keep_last) == (2000, 3)  # and not all 501


@pytest.mark.parametrize(
    ("flags", "parameters", "flops"),
    [
        (("--parameters", "60M"), 60e6, None),
        (("--budget-flop", "2e11"), None, None),
        (("--budget-flop", "1e19"), None, 1e19),
        (("--budget-flop", "1e19", "--tokens", "20B"), None, 1e19),
        (("--parameters", "60M", "--budget-flop", "1e20"), 60e6, 1e20),
    ],
)
def test_a_recipe_has_the_size_and_the_computation_that_were_asked_for(tmp_path, flags, parameters, flops):
    """Widths are multiples of 64, so a size of 60 M is met within 15 %."""
    settings = recipe(tmp_path, *flags)
    data = DataConfig(data_path=("corpus",), tokenizer_model="tokenizer")
    assert find_problems(replace(settings, data=data), world_size=1) == []
    count = count_parameters(settings.model, vocab_size=30_522).total
    if parameters is not None:
        assert count == pytest.approx(parameters, rel=0.15)
    if flops is not None:
        assert flops_of(settings) == pytest.approx(flops, rel=0.15)
    elif "--parameters" in flags:
        assert settings.tokens_per_iteration * settings.training.train_iters == pytest.approx(100 * count, rel=0.01)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "give --parameters or --budget-flop"),
        (("--tokens", "1B"), "give --parameters or --budget-flop"),
        (("--parameters", "60X"), "60M, 2.5B or 1e19"),
        (("--parameters", "0"), "60M, 2.5B or 1e19"),
        (("--parameters", "1M"), "recipes have 8.64 M to 12.1 G parameters"),
        (("--budget-flop", "1"), "--budget-flop 1: a run of 6.3"),
        (("--budget-flop", "1e-300"), "recipes have 8,192 (one batch) to 1e+15 tokens"),
        (("--budget-flop", "1e30"), "recipes have 8,192 (one batch) to 1e+15 tokens"),
        (("--parameters", "60M", "--tokens", "1e300"), "--parameters 6e+07 --tokens 1e+300: a run of 1e+300 tokens"),
        (("--parameters", "60M", "--budget-flop", "1"), "recipes have 8,192 (one batch) to 1e+15 tokens"),
        (("--budget-flop", "1e19", "--tokens", "20M"), "15.7 M to 74.4 G floating-point operations per token"),
    ],
)
def test_missing_or_malformed_quantities_are_refused(tmp_path, flags, message):
    ended = run_command(COMMAND, "recipe", *flags, "--output", tmp_path / "recipe.yaml")
    assert ended.refused(2) and message in ended.output
    assert not list(tmp_path.iterdir())


def test_an_existing_file_is_not_replaced(tmp_path):
    recipe(tmp_path, "--parameters", "20M")
    content = (tmp_path / "recipe.yaml").read_bytes()
    ended = run_command(COMMAND, "recipe", "--parameters", "30M", "--output", tmp_path / "recipe.yaml")
    assert ended.refused(73) and (tmp_path / "recipe.yaml").read_bytes() == content
