"""Every recipe in examples/configs: its changes, the size of its model, its plan, and two iterations of training.

Plan and parameters have the full size. The two iterations run on the CPU with a smaller model, in this process, because
a process that has had a process group cannot fork another one that needs one.
"""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import REPOSITORY
from distributed.ranks import read_metrics
from security.small_sentencepiece import write_model
from unit.data.small_corpus import random_documents, write_corpus

from megatron_neobert.config.cli import PlanOptions, parse_command_line, read_settings
from megatron_neobert.config.phases import phase_at
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.corpora import open_phases
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.errors import EXIT_STOPPED_EARLY
from megatron_neobert.model.flops import count_parameters
from megatron_neobert.model.neobert import NeoBERTModel
from megatron_neobert.planning.plan import print_plan
from megatron_neobert.runtime import distributed
from megatron_neobert.runtime.watcher import Watcher
from megatron_neobert.training.loop import run_training

CONFIGS = REPOSITORY / "examples" / "configs"
EVALUATIONS = set(CONFIGS.glob("evaluation/*"))  # not recipes of neobert train
RECIPES = sorted(  # links are skipped: M9 is a second name of the stages
    path for path in CONFIGS.rglob("*.yaml") if not path.is_symlink() and path not in EVALUATIONS
)
WIDTH, TOKENS = 96, 64
SMALL = (
    f"--num-layers 2 --hidden-size {WIDTH} --num-attention-heads 4 --seq-length {TOKENS} "
    f"--max-position-embeddings {TOKENS} --micro-batch-size 2 --global-batch-size 4 --lr-warmup-iters 1 "
    "--lr-decay-iters 2 --eval-iters 1 --num-workers 0 --log-interval 1"
).split()

# (recipe, parent) -> settings that differ.
LENGTH = "train_iters keep_every save_interval lr_decay_iters"
SCHEDULE = "seq_length max_position_embeddings global_batch_size"
CHANGES = {
    ("m1", "m0"): "swiglu normalization norm_epsilon position_embedding_type",
    ("m2", "m1"): "",  # another corpus
    ("m3", "m2"): "",  # another tokenizer
    ("m4", "m2"): "optimizer lr_decay_style weight_decay adam_beta2",
    ("m5", "m4"): "mask_prob mask_replacement",
    ("m6", "m5"): "batch_layout long_documents",
    ("m7", "m5"): "num_layers hidden_size",
    ("m7_released", "m7"): "hidden_size",
    ("m8", "m7"): "num_layers hidden_size",
    ("m9_stage1", "m8"): f"{SCHEDULE} micro_batch_size lr min_lr weight_decay",
    ("m9_stage2", "m9_stage1"): f"{SCHEDULE} {LENGTH} micro_batch_size seed",
}

each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)


@pytest.fixture
def corpus(recipe: Path, tiny_corpus: Any, tmp_path: Path) -> Any:
    """A tiny corpus, tokenized for m3 with a SentencePiece model."""
    if recipe.stem != "m3":
        return tiny_corpus
    model = write_model(tmp_path / "tokenizer.model")
    tokenizer = load_tokenizer(model)
    write_corpus(tmp_path / "tiny", random_documents([*range(1, 100)] * 3, vocab_size=8), tokenizer)
    return tiny_corpus._replace(prefix=str(tmp_path / "tiny"), tokenizer=str(model), vocab_size=tokenizer.vocab_size)


def settings_of(recipe: Path, corpus: Any, *flags: str, data_path: tuple[str, ...] = (), ranks: int = 1) -> Settings:
    command = ["--config", str(recipe), "--data-path", *(data_path or (corpus.prefix,))]
    command += ["--tokenizer-model", corpus.tokenizer, *phase_flags(recipe, corpus), *flags]
    return parse_command_line(command, world_size=ranks).settings


def phase_flags(recipe: Path, corpus: Any, *, are_short: bool = False, **changes: int) -> list[str]:
    """Return --phases of the recipe, with the tiny corpus, shorter documents and the given changes.

    With `are_short`, a phase begins after each iteration.
    """
    blend = ("0.2", corpus.prefix, "0.8", f"{corpus.prefix}:min=16")
    phases = [replace(phase, data_path=blend, **changes) for phase in read_settings(recipe).training.phases]
    if are_short:
        phases = [replace(phase, after_iters=number) for number, phase in enumerate(phases, start=1)]
    return ["--phases", f"[{', '.join(map(repr, phases))}]"]


def flatten(settings: Settings | str) -> dict[str, Any]:
    """Return the values of settings, or of the recipe of this name, by setting."""
    resolved = read_settings(CONFIGS / f"{settings}.yaml") if isinstance(settings, str) else settings
    return {name: value for section in asdict(resolved).values() for name, value in section.items()}


@pytest.mark.parametrize(("recipe", "parent"), CHANGES)
def test_recipe_differs_from_its_parent_only_in_the_listed_settings(recipe, parent):
    values, parent_values = flatten(f"ablations/{recipe}"), flatten(f"ablations/{parent}")
    assert {name for name in values if values[name] != parent_values[name]} == set(CHANGES[recipe, parent].split())


@pytest.mark.parametrize(
    ("pattern", "tokens"), [("ablations/m[0-8]*", 131_072), ("neobert_stage?", 2_097_152)], ids=["ablations", "stages"]
)
def test_recipes_read_as_many_tokens_per_iteration_as_the_paper(pattern, tokens):
    recipes = list(CONFIGS.glob(f"{pattern}.yaml"))
    assert {read_settings(path).tokens_per_iteration for path in recipes} == {tokens}


@pytest.mark.parametrize(("stage", "iteration"), [(1, 1_000_000), (2, 1_000_001)])
def test_file_with_both_stages_has_the_settings_of_the_single_files(stage, iteration):
    """Except the length of the run, the kept checkpoints, and the corpus, which the single files do not set."""
    of_both = phase_at(read_settings(CONFIGS / "neobert_both_stages.yaml"), iteration).settings
    both, single = flatten(of_both), flatten(f"neobert_stage{stage}")
    assert of_both.lr_decay_end == read_settings(CONFIGS / f"neobert_stage{stage}.yaml").lr_decay_end
    may_differ = f"{LENGTH} data_path max_position_embeddings".split()
    assert {name for name in single if single[name] != both[name]} <= set(may_differ)
    assert (both["seq_length"], both["max_position_embeddings"]) == ((1024, 4096)[stage - 1], 4096)


@pytest.mark.parametrize("recipe", [path for path in RECIPES if path.stem != "tiny"], ids=lambda path: path.stem)
def test_documentation_lists_the_recipe_with_its_parameters(recipe):
    model = read_settings(recipe).model
    # M3 has the vocabulary of LLaMA 2 and two added tokens, which the paper's code pads to a multiple of 64 and counts.
    vocab_size = 32_064 if recipe.stem == "m3" else 30_522
    page = (REPOSITORY / "docs" / "recipes.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if f"| `{recipe.relative_to(CONFIGS)}` |" in line]
    assert f"| {count_parameters(model, vocab_size=vocab_size).total:,} |" in row


@each_recipe
def test_recipe_is_valid_and_has_the_planned_parameters(recipe, corpus, no_process_group_left, monkeypatch, capsys):
    """The model is built at full size on the meta device, where no weight is allocated."""
    settings = settings_of(recipe, corpus)
    assert print_plan(settings, open_phases(settings), PlanOptions(), world_size=1) == 0
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
    """Or as many as it has phases."""
    sizes = {"seq_length": TOKENS, "micro_batch_size": 2, "global_batch_size": 4}
    phases = phase_flags(recipe, corpus, are_short=True, **sizes)
    iterations = max(2, 1 + len(read_settings(recipe).training.phases))
    settings = settings_of(recipe, corpus, *SMALL, *phases, "--train-iters", str(iterations), "--save", str(tmp_path))
    assert run_training(settings, Watcher(limit_seconds=600)) == 0
    losses = read_metrics(tmp_path, "loss")
    assert list(losses) == [*range(1, iterations + 1)]
    assert losses[1] == pytest.approx(math.log(corpus.vocab_size), abs=0.3), "loss of random weights"


def test_stage_2_continues_stage_1_at_the_lowest_rate_and_resumes(tiny_corpus, tmp_path, no_process_group_left):
    first, second = (str(tmp_path / name) for name in ("stage1", "stage2"))
    stage1 = settings_of(CONFIGS / "neobert_stage1.yaml", tiny_corpus, *SMALL, "--train-iters", "2", "--save", first)
    assert run_training(stage1, Watcher(limit_seconds=600)) == 0

    prefix = tiny_corpus.prefix
    blend = ("0.2", prefix, "0.4", f"{prefix}:min=16", "0.4", f"{prefix}:min=32")  # a quarter and a half of a sequence
    flags = ["--continue-from", first, "--save", second, "--load", second, "--train-iters", "4", "--exit-interval", "3"]
    stage2 = settings_of(CONFIGS / "neobert_stage2.yaml", tiny_corpus, *SMALL, *flags, data_path=blend)
    assert run_training(stage2, Watcher(limit_seconds=600)) == EXIT_STOPPED_EARLY
    assert run_training(stage2, Watcher(limit_seconds=600)) == 0, "the second start resumes the first"
    assert read_metrics(second, "lr") == {3: 6e-5, 4: 6e-5}


@pytest.mark.parametrize("ranks", [1, 2, 8, 32])
@each_recipe
def test_recipe_plans_its_batch_on_any_number_of_ranks(recipe, ranks, corpus, capsys):
    ranks = math.gcd(ranks, read_settings(recipe).training.global_batch_size)
    settings = settings_of(recipe, corpus, ranks=ranks)
    assert print_plan(settings, open_phases(settings), PlanOptions(), world_size=ranks) == 0
    batch = settings.training.global_batch_size
    assert settings.micro_batches_per_rank(ranks) * settings.training.micro_batch_size * ranks == batch
    assert f"of {settings.training.micro_batch_size} per rank" in " ".join(capsys.readouterr().out.split())
