"""Every recipe under examples/configs: what it changes, how large its model is, and that it starts and trains.

The plan and the parameters are those of the full size; two iterations run on CPU at a fraction of the width and depth,
in this process: one that has had a process group cannot fork another that wants one.
"""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.ranks import read_metrics
from security.small_sentencepiece import write_model
from unit.data.small_corpus import random_documents, write_corpus

from megatron_neobert.config.cli import parse_command_line, read_settings
from megatron_neobert.config.phases import phase_at
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.errors import EXIT_STOPPED_EARLY
from megatron_neobert.model.flops import count_parameters
from megatron_neobert.model.neobert import NeoBERTModel
from megatron_neobert.planning.plan import print_plan
from megatron_neobert.runtime import distributed
from megatron_neobert.training.loop import run_training

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = REPOSITORY / "examples" / "configs"
EVALUATIONS = set(CONFIGS.glob("evaluation/*"))  # settings of other commands
RECIPES = sorted(  # M9 is another name of the stages
    path for path in CONFIGS.rglob("*.yaml") if not path.is_symlink() and path not in EVALUATIONS
)
WIDTH, ROW = 96, 64
SMALL = (
    f"--num-layers 2 --hidden-size {WIDTH} --num-attention-heads 4 --seq-length {ROW} --max-position-embeddings {ROW} "
    "--micro-batch-size 2 --global-batch-size 4 --lr-warmup-iters 1 --lr-decay-iters 2 --eval-iters 1 --num-workers 0 "
    "--log-interval 1"
).split()

# Settings that each recipe changes against its parent.
SCHEDULE = "seq_length max_position_embeddings global_batch_size"
CHANGES = {
    ("m1", "m0"): "swiglu normalization norm_epsilon position_embedding_type",
    ("m2", "m1"): "",  # another corpus
    ("m3", "m2"): "tokenizer_type make_vocab_size_divisible_by",
    ("m4", "m2"): "optimizer lr_decay_style weight_decay adam_beta2",
    ("m5", "m4"): "mask_prob mask_replacement",
    ("m6", "m5"): "batch_layout long_documents",
    ("m7", "m5"): "num_layers hidden_size",
    ("m7_released", "m7"): "hidden_size",
    ("m8", "m7"): "num_layers hidden_size",
    ("m9_stage1", "m8"): f"{SCHEDULE} lr min_lr weight_decay lr_decay_iters",
    ("m9_stage2", "m9_stage1"): f"{SCHEDULE} micro_batch_size train_iters seed save_interval keep_every",
}

each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)


@pytest.fixture
def corpus(recipe: Path, tiny_corpus: Any, tmp_path: Path) -> Any:
    """A tiny corpus written with the kind of tokenizer that the recipe wants."""
    if read_settings(recipe).data.tokenizer_type != "SentencePieceTokenizer":
        return tiny_corpus
    model = write_model(tmp_path / "tokenizer.model")
    tokenizer = load_tokenizer(model)
    write_corpus(tmp_path / "tiny", random_documents([*range(1, 100)] * 3, vocab_size=8), tokenizer)
    return tiny_corpus._replace(prefix=str(tmp_path / "tiny"), tokenizer=str(model), vocab_size=tokenizer.vocab_size)


def settings_of(recipe: Path, corpus: Any, *flags: str, data_path: tuple[str, ...] = (), ranks: int = 1) -> Settings:
    command = ["--config", str(recipe), "--data-path", *(data_path or (corpus.prefix,))]
    command += ["--tokenizer-model", corpus.tokenizer, *phase_flags(recipe, corpus), *flags]
    return parse_command_line(command, world_size=ranks).settings


def phase_flags(recipe: Path, corpus: Any, **changes: int) -> list[str]:
    """The recipe's phases over the tiny corpus, whose documents are shorter, with some settings changed."""
    blend = ("0.2", corpus.prefix, "0.8", f"{corpus.prefix}:min=16")
    phases = [replace(phase, data_path=blend, **changes) for phase in read_settings(recipe).training.phases]
    return ["--phases", f"[{', '.join(map(repr, phases))}]"]


def flatten(settings: Settings | str) -> dict[str, Any]:
    """Return the values by name, of settings or of the recipe of that name."""
    found = read_settings(CONFIGS / f"{settings}.yaml") if isinstance(settings, str) else settings
    return {name: value for section in asdict(found).values() for name, value in section.items()}


@pytest.mark.parametrize(("recipe", "parent"), CHANGES)
def test_recipe_changes_what_it_is_about_and_nothing_else(recipe, parent):
    own, before = flatten(f"ablations/{recipe}"), flatten(f"ablations/{parent}")
    assert {name for name in own if own[name] != before[name]} == set(CHANGES[recipe, parent].split())


@pytest.mark.parametrize(
    ("pattern", "tokens"), [("ablations/m[0-8]*", 131_072), ("neobert_stage?", 2_097_152)], ids=["ablations", "stages"]
)
def test_recipes_read_as_many_tokens_per_iteration_as_the_paper(pattern, tokens):
    recipes = list(CONFIGS.glob(f"{pattern}.yaml"))
    assert {read_settings(path).tokens_per_iteration for path in recipes} == {tokens}


@pytest.mark.parametrize(("stage", "iteration"), [(1, 1_000_000), (2, 1_000_001)])
def test_both_stages_in_one_file_have_the_settings_of_their_own_files(stage, iteration):
    """But for how long the run is, how many checkpoints it keeps, and the corpus, which those files leave open."""
    both = flatten(phase_at(read_settings(CONFIGS / "neobert_both_stages.yaml"), iteration).settings)
    own = flatten(f"neobert_stage{stage}")
    may_differ = {"train_iters", "keep_every", "save_interval", "data_path", "max_position_embeddings"}
    assert {name for name in own if own[name] != both[name]} - may_differ == set()
    assert (both["seq_length"], both["max_position_embeddings"]) == ((1024, 4096)[stage - 1], 4096)


@pytest.mark.parametrize("recipe", [path for path in RECIPES if path.stem != "tiny"], ids=lambda path: path.stem)
def test_page_names_the_recipe_with_its_parameters(recipe):
    model = read_settings(recipe).model
    # LLaMA 2's pieces and two added tokens, in a table whose every row the paper's code counts.
    vocab_size = model.padded_vocab_size(32_002, tensor_parallel=1) if recipe.stem == "m3" else 30_522
    page = (REPOSITORY / "docs" / "recipes.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if f"| `{recipe.relative_to(CONFIGS)}` |" in line]
    assert f"| {count_parameters(model, vocab_size=vocab_size).total:,} |" in row


@each_recipe
def test_recipe_is_legal_and_its_model_has_the_parameters_that_its_plan_says(
    recipe, corpus, no_process_group_left, monkeypatch, capsys
):
    """The model is built at full size on the meta device, where no weight is allocated."""
    ranks = {"tiny": 2, "laptop": 1, "laptop_plain": 1}.get(recipe.stem, 8)  # 8: the paper's machine
    settings = settings_of(recipe, corpus, ranks=ranks)
    assert print_plan(settings, world_size=ranks) == 0
    planned = count_parameters(settings.model, vocab_size=corpus.vocab_size).total
    assert f"{planned:,} (" in capsys.readouterr().out
    monkeypatch.setattr("megatron_neobert.model.neobert.initialize_weights", lambda *args, **kwargs: None)
    distributed.initialize(settings)
    with torch.device("meta"):
        model = NeoBERTModel(settings, vocab_size=corpus.vocab_size)
    padding = settings.model.padded_vocab_size(corpus.vocab_size, tensor_parallel=1) - corpus.vocab_size
    built = sum(parameter.numel() for parameter in model.parameters())
    assert built - padding * (2 * settings.model.hidden_size + 1) == planned


@each_recipe
def test_recipe_trains_two_iterations_at_reduced_width(recipe, corpus, tmp_path, no_process_group_left):
    sizes = {"seq_length": ROW, "micro_batch_size": 2, "global_batch_size": 4}
    second = phase_flags(recipe, corpus, after_iters=1, **sizes)
    settings = settings_of(recipe, corpus, *SMALL, *second, "--train-iters", "2", "--save", str(tmp_path))
    assert run_training(settings) == 0
    losses = read_metrics(tmp_path, "loss")
    assert list(losses) == [1, 2]
    assert losses[1] == pytest.approx(math.log(corpus.vocab_size), abs=0.3), "fresh weights know nothing"


def test_stage_2_goes_on_from_stage_1_at_the_lowest_rate_and_can_be_started_again(
    tiny_corpus, tmp_path, no_process_group_left
):
    first, second = (str(tmp_path / name) for name in ("stage1", "stage2"))
    stage1 = settings_of(CONFIGS / "neobert_stage1.yaml", tiny_corpus, *SMALL, "--train-iters", "2", "--save", first)
    assert run_training(stage1) == 0

    prefix = tiny_corpus.prefix
    blend = ("0.2", prefix, "0.4", f"{prefix}:min=16", "0.4", f"{prefix}:min=32")  # a quarter and half of a row
    flags = ["--continue-from", first, "--save", second, "--load", second, "--train-iters", "4", "--exit-interval", "3"]
    stage2 = settings_of(CONFIGS / "neobert_stage2.yaml", tiny_corpus, *SMALL, *flags, data_path=blend)
    assert run_training(stage2) == EXIT_STOPPED_EARLY
    assert run_training(stage2) == 0, "the second start finds the checkpoint of the first"
    assert read_metrics(second, "lr") == {3: 6e-5, 4: 6e-5}
