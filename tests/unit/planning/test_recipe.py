"""`neobert recipe`: rules that give NeoBERT's own recipe for its size and tokens."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from processes import run_command

from megatron_neobert.commands.recipe import RecipeOptions, choose_recipe, summarize
from megatron_neobert.config.cli import read_settings
from megatron_neobert.config.rules import find_problems
from megatron_neobert.config.schema import DataConfig, Settings
from megatron_neobert.model.flops import count_parameters, training_flops_per_token
from megatron_neobert.planning.forecast import forecast_phases, open_or_assume_phases

REPOSITORY = Path(__file__).resolve().parents[3]
COMMAND = "megatron_neobert.__main__"


def recipe(folder: Path, *flags: str) -> Settings:
    ended = run_command(COMMAND, "recipe", *flags, "--output", folder / "recipe.yaml")
    assert ended.code == 0, ended.output
    return read_settings(folder / "recipe.yaml")


def flops_of(settings: Settings) -> float:
    per_token = training_flops_per_token(settings, vocab_size=30_522, document_tokens=707)
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
    """Depth is whole: a size of 60 M is met within 1.1 %, and 1e19 operations with 20 B tokens within 1.4 %."""
    settings = recipe(tmp_path, *flags)
    data = DataConfig(data_path=("corpus",), tokenizer_model="tokenizer")
    assert find_problems(replace(settings, data=data), world_size=1) == []
    count = count_parameters(settings.model, vocab_size=30_522).total
    if parameters is not None:
        assert count == pytest.approx(parameters, rel=0.02)
    if flops is not None:
        assert flops_of(settings) == pytest.approx(flops, rel=0.02)
    elif "--parameters" in flags:
        assert settings.tokens_per_iteration * settings.training.train_iters == pytest.approx(100 * count, rel=0.01)


@pytest.mark.parametrize("size", [20e6, 28.9e6, 43.9e6, 60e6, 62e6, 65e6, 150e6, 1e9])
def test_a_size_is_met_by_the_depth_of_the_nearest_width(size):
    chosen = choose_recipe(RecipeOptions(parameters=size, output=Path("recipe.yaml")))
    assert chosen.parameters == pytest.approx(size, rel=0.02)  # of all sizes from 20M: 0.019 at 43.9M


def test_a_size_that_no_shape_has_is_named_with_the_difference(tmp_path):
    ended = run_command(COMMAND, "recipe", "--parameters", "10.9M", "--output", tmp_path / "recipe.yaml")
    assert "no shape is nearer to --parameters 1.09e+07; this one differs by +24 %\n13.5 million" in ended.output


def test_a_recipe_and_its_plan_count_the_same_operations():
    options = RecipeOptions(parameters=60e6, output=Path("recipe.yaml"))
    chosen = choose_recipe(options)
    settings = Settings(model=chosen.model).with_section("training", global_batch_size=chosen.batch)
    settings = settings.with_section("training", train_iters=chosen.iterations)
    (forecast,) = forecast_phases(settings, open_or_assume_phases(settings), done=0, world_size=1)
    assert forecast.flops * forecast.iterations == pytest.approx(chosen.flops, rel=0.002)  # measured: 0.0006
    assert f"{chosen.flops:.2e}".replace("e+", "e") + " FLOP" in summarize(chosen)


def test_documentation_has_the_recipes_of_its_sizes():
    page = (REPOSITORY / "docs" / "recipes.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| ([\d.]+)([MB]) \| (\d+) x ([\d,]+) \| ([\d.]+) B \| ([\d,]+) \| (\S+) \|$", page, flags=re.M
    )
    assert len(rows) == 5
    for number, unit, layers, width, billions, batch, rate in rows:
        size = float(number) * {"M": 1e6, "B": 1e9}[unit]
        chosen = choose_recipe(RecipeOptions(parameters=size, output=Path("recipe.yaml")))
        assert (chosen.model.num_layers, f"{chosen.model.hidden_size:,}") == (int(layers), width)
        assert (f"{chosen.batch:,}", chosen.rate) == (batch, float(rate))
        assert f"{chosen.iterations * chosen.batch * 1024 / 1e9:.3g}" == billions


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "give --parameters or --budget-flop"),
        (("--tokens", "1B"), "give --parameters or --budget-flop"),
        (("--parameters", "60X"), "60M, 2.5B or 1e19"),
        (("--parameters", "0"), "60M, 2.5B or 1e19"),
        (("--parameters", "1M"), "recipes have 8.64 M to 12.1 G parameters"),
        (("--budget-flop", "1"), "--budget-flop 1: a run of 7.26e-08"),
        (("--budget-flop", "1e30"), "recipes have 8,192 (one batch) to 1e+15 tokens"),
        (("--parameters", "60M", "--tokens", "1e300"), "--parameters 6e+07 --tokens 1e+300: a run of 1e+300 tokens"),
        (("--budget-flop", "1e19", "--tokens", "20M"), "13.8 M to 73.5 G floating-point operations per token"),
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
