"""Every parallel layout gives the loss curve of one rank."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import quick_only, read_metrics, train_on_ranks
from tests_tiny import tiny_settings
from tolerances import BF16_LAYOUT_LOSS, LAYOUT_GRAD_NORM, LAYOUT_LOSS

from megatron_neobert.config.schema import Settings

STEPS = 20


DP2_OVERLAP = {"overlap_grad_reduce": True, "ddp_bucket_size": 10_000}
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
RECOMPUTE_ALL = {"recompute_granularity": "full"}
# Number of ranks, and settings that are not those of one rank.
LAYOUTS = {
    "data 2": (2, {}),
    "data 2, overlapped": (2, {"parallel": DP2_OVERLAP}),
    "tensor 2": (2, {"parallel": TP2}),
    "pipeline 2": (2, {"parallel": PP2}),
    "context 2": (2, {"parallel": CP2}),
    "tensor 2 x data 2": (4, {"parallel": TP2}),
    "tensor 2 x pipeline 2": (4, {"parallel": {**TP2, **PP2}}),
    "tensor 2 x context 2": (4, {"parallel": {**TP2, **CP2}}),
    "pipeline 2 x context 2": (4, {"parallel": {**PP2, **CP2}}),
    "pipeline 2 x data 2, overlapped": (4, {"parallel": {**PP2, **DP2_OVERLAP}}),
    "tensor 2 x pipeline 2 x data 2": (8, {"parallel": {**TP2, **PP2}}),
    "recomputed layers": (1, {"compute": RECOMPUTE_ALL}),
    "recomputed layers, pipeline 2": (2, {"parallel": PP2, "compute": RECOMPUTE_ALL}),
    "recomputed attention, tensor 2": (2, {"parallel": TP2, "compute": {"recompute_granularity": "selective"}}),
}
# One layout for each kind of parallelism. Combinations need four ranks, which are slow on two cores.
QUICK = ("data 2, overlapped", "tensor 2", "pipeline 2", "context 2", "recomputed layers")
IN_BF16 = ("data 2", "tensor 2", "pipeline 2", "context 2", "recomputed layers")


@pytest.fixture(scope="module")
def one_rank(tiny_corpus, tmp_path_factory) -> Callable[..., Path]:
    """Return a function that trains on one rank, once per change of the run, and returns the save folder."""

    @functools.cache
    def train(**changes: Any) -> Path:
        save = tmp_path_factory.mktemp("one_rank")
        train_on_ranks(run_of(tiny_corpus, save, **changes))
        return save

    return train


def run_of(
    corpus: Any,
    save: Path,
    *,
    bf16: bool = False,
    objective: str = "mlm",
    optimizer: str = "adamw",
    **layout: dict[str, Any],
) -> Settings:
    return tiny_settings(
        corpus,
        save=save,
        model={"num_layers": 4},
        data={"objective": objective},
        optimizer={"optimizer": optimizer},
        training={"train_iters": STEPS, "eval_interval": STEPS, "bf16": bf16},
        **layout,
    )


def largest_relative_gap(first: dict[int, float], second: dict[int, float]) -> float:
    assert first.keys() == second.keys(), f"{first.keys()=} {second.keys()=}"
    return max(abs(first[key] - second[key]) / abs(first[key]) for key in first)


@pytest.fixture
def gaps_of(tiny_corpus, one_rank, tmp_path) -> Callable[..., dict[str, float]]:
    """Return a function that trains in a layout, and returns the largest gap to one rank for each of these metrics."""

    def train(name: str, *keys: str, **changes: Any) -> dict[str, float]:
        world_size, layout = LAYOUTS[name]
        train_on_ranks(run_of(tiny_corpus, tmp_path, **changes, **layout), world_size=world_size)
        expected = one_rank(**changes)
        gaps = {key: largest_relative_gap(read_metrics(expected, key), read_metrics(tmp_path, key)) for key in keys}
        print(f"{name} {changes}: {gaps}")
        return gaps

    return train


@pytest.mark.parametrize("name", quick_only(LAYOUTS, *QUICK))
def test_every_layout_gives_the_loss_curve_of_one_rank(gaps_of, tmp_path, name):
    gaps = gaps_of(name, "loss", "grad_norm", "validation_loss", "consumed_tokens")
    assert len(read_metrics(tmp_path)) == STEPS
    assert gaps["loss"] <= LAYOUT_LOSS.gate
    assert gaps["grad_norm"] <= LAYOUT_GRAD_NORM.gate
    assert gaps["validation_loss"] <= LAYOUT_LOSS.gate
    assert gaps["consumed_tokens"] == 0


@pytest.mark.parametrize("name", quick_only(IN_BF16))
def test_every_layout_gives_the_loss_curve_of_one_rank_in_bfloat16(gaps_of, name):
    assert gaps_of(name, "loss", bf16=True)["loss"] <= BF16_LAYOUT_LOSS.gate


@pytest.mark.parametrize("name", quick_only(QUICK, "context 2"))
def test_every_layout_gives_the_loss_curve_of_one_rank_with_causal_attention(gaps_of, name):
    gaps = gaps_of(name, "loss", "validation_loss", objective="clm")
    assert max(gaps.values()) <= LAYOUT_LOSS.gate


@pytest.mark.parametrize("name", quick_only(("data 2", "pipeline 2", "context 2"), "pipeline 2"))
def test_every_layout_gives_the_loss_curve_of_one_rank_with_muon(gaps_of, name):
    assert gaps_of(name, "loss", optimizer="muon")["loss"] <= LAYOUT_LOSS.gate
