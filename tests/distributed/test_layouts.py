"""Every parallel layout computes the run of one rank."""

import json
from pathlib import Path

import pytest
from ranks import read_metrics, train_on_ranks
from tolerances import BF16_LAYOUT_LOSS, LAYOUT_GRAD_NORM, LAYOUT_LOSS

DP2_OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 10_000}
LAYOUTS = {
    "data parallel 2": {},
    "data parallel 2, overlapped": DP2_OVERLAP,
    "data parallel 2, whole optimizer": {"use_distributed_optimizer": False},
    "tensor parallel 2": {"tensor_model_parallel_size": 2},
}


def largest_relative_gap(first: dict[int, float], second: dict[int, float]) -> float:
    assert first.keys() == second.keys(), f"{first.keys()=} {second.keys()=}"
    return max(abs(first[key] - second[key]) / abs(first[key]) for key in first)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_give_the_loss_curve_of_one(settings, layout):
    alone, together = settings("alone"), settings("together", parallel=LAYOUTS[layout])
    train_on_ranks(alone)
    train_on_ranks(together, world_size=2)
    saves = alone.checkpoint.save, together.checkpoint.save
    assert largest_relative_gap(*map(read_metrics, saves)) <= LAYOUT_LOSS.gate
    assert largest_relative_gap(*(read_metrics(save, "grad_norm") for save in saves)) <= LAYOUT_GRAD_NORM.gate
    assert largest_relative_gap(*(read_metrics(save, "validation_loss") for save in saves)) <= LAYOUT_LOSS.gate


def test_two_seeds_give_loss_curves_that_the_comparison_tells_apart(settings):
    first, second = settings("first"), settings("second", training={"seed": 1})
    train_on_ranks(first)
    train_on_ranks(second)
    gap = largest_relative_gap(read_metrics(first.checkpoint.save), read_metrics(second.checkpoint.save))
    assert gap > 100 * LAYOUT_LOSS.gate


@pytest.mark.parametrize("parallel", [{}, {"tensor_model_parallel_size": 2}], ids=["data", "tensor"])
def test_two_ranks_in_bfloat16_give_the_loss_curve_of_one(settings, parallel):
    bf16 = {"bf16": True}
    alone, together = settings("alone", training=bf16), settings("together", training=bf16, parallel=parallel)
    train_on_ranks(alone)
    train_on_ranks(together, world_size=2)
    gap = largest_relative_gap(read_metrics(alone.checkpoint.save), read_metrics(together.checkpoint.save))
    assert gap <= BF16_LAYOUT_LOSS.gate


def test_ranks_and_workers_do_not_change_which_rows_are_read(settings):
    """Cursor and token count after every iteration follow from the settings alone."""
    runs = {
        "one rank": (settings("a"), 1),
        "two ranks": (settings("b"), 2),
        "two workers": (settings("c", data={"num_workers": 2}), 1),
    }
    read = {}
    for name, (run, world_size) in runs.items():
        train_on_ranks(run, world_size=world_size)
        lines = [json.loads(line) for line in (Path(run.checkpoint.save) / "metrics.jsonl").read_text().splitlines()]
        read[name] = [(line["cursor"], line.get("consumed_tokens")) for line in lines]
    assert read["two ranks"] == read["one rank"]
    assert read["two workers"] == read["one rank"]


def test_mean_of_micro_batch_means_differs_from_the_mean_over_all_masked_tokens(settings):
    """The switch does something: micro-batches predict different numbers of tokens."""
    overall, means = settings("overall"), settings("means", training={"loss_normalization": "micro_batch"})
    train_on_ranks(overall)
    train_on_ranks(means)
    first, second = read_metrics(overall.checkpoint.save), read_metrics(means.checkpoint.save)
    assert first[1] == second[1], "the same weights see the same batch"
    assert 0 < abs(first[3] - second[3]) / first[3] < 0.01
