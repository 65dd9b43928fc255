"""Time of communication equals formulas that are written out here, and docs/performance.md has the planned scaling.

tests/gpu_path counts the collectives, and compares them with the planned traffic.
"""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_neobert.config.cli import PlanOptions, read_settings
from megatron_neobert.config.phases import fit_micro_batch
from megatron_neobert.config.schema import Settings
from megatron_neobert.planning.forecast import forecast_phases, open_or_assume_phases
from megatron_neobert.planning.network import Traffic, gradient_buckets, plan_step, traffic_seconds
from megatron_neobert.planning.plan import compute_seconds, scaling_lines, step_on
from megatron_neobert.text import duration

REPOSITORY = Path(__file__).resolve().parents[3]
PAGE = REPOSITORY / "docs" / "performance.md"
STAGE_1 = read_settings(REPOSITORY / "examples" / "configs" / "neobert_stage1.yaml")
VOCAB = 30_522
GRAPHED = Settings().with_section("training", bf16=True, micro_batch_size=8)
LAUNCHED = GRAPHED.with_section("compute", cuda_graph_impl="none")
LAUNCHING = 103e-6 * (28 * 38 + 60)  # seconds of the host per micro-batch of the default model


def seconds(group: str, operation: str, size: float, *, ranks: int, **parallel: int) -> float:
    settings = Settings().with_section("parallel", **parallel)
    traffic = Traffic(group, operation, calls=1, bytes=size)
    return traffic_seconds(settings, traffic, world_size=ranks, network_gbps=400)


def test_a_large_collective_takes_the_bandwidth_of_nvlink_or_of_all_adapters_of_a_node():
    """Of 450 GB/s, 369 are reached, and of 400 Gb/s, 41 GB/s.

    Latencies: 8.4 us, 3.4 us per step on NVLink and 14 us per step between nodes.
    """
    gigabyte = 1e9
    assert seconds("data", "reduce-scatter", gigabyte, ranks=8) == pytest.approx(7 / 8 / 369 + 32.2e-6)
    between = 31 / 32 / (8 * 41) + (8.4 + 28 * 3.4 + 3 * 14) * 1e-6
    assert seconds("data", "all-gather", gigabyte, ranks=32) == pytest.approx(between)
    assert seconds("data", "all-reduce", gigabyte, ranks=32) == pytest.approx(2 * between - 8.4e-6)
    # Half of a node's ranks are in a data-parallel group, and have half of the adapters.
    halved = 15 / 16 / (4 * 41) + (8.4 + 12 * 3.4 + 3 * 14) * 1e-6
    parallel = {"tensor_model_parallel_size": 2}
    assert seconds("data", "all-gather", gigabyte, ranks=32, **parallel) == pytest.approx(halved)
    assert seconds("tensor", "all-gather", gigabyte, ranks=32, **parallel) == pytest.approx(1 / 2 / 369 + 11.8e-6)


def test_exchanges_between_nodes_take_the_adapter_of_one_gpu():
    parallel = {"context_parallel_size": 16}
    exchange = 8 / 16 / 41 + 22.4e-6  # half of the ranks are in the other node
    assert seconds("context", "all-to-all", 1e9, ranks=16, **parallel) == pytest.approx(exchange)
    parallel = {"pipeline_model_parallel_size": 2}
    assert seconds("pipeline", "send", 1e9, ranks=8, **parallel) == pytest.approx(1 / 369 + 11.8e-6)
    assert seconds("pipeline", "send", 1e9, ranks=16, **parallel) == pytest.approx(1 / 41 + 22.4e-6)


def step(settings: Settings, *, ranks: int, compute: float, **parallel: Any) -> Any:
    settings = settings.with_section("parallel", **parallel)
    return plan_step(settings, vocab_size=VOCAB, world_size=ranks, compute_seconds=compute, network_gbps=400)


def exchange(parameters: float, *, ranks: int) -> float:
    """Return the seconds to reduce float32 gradients and to gather bf16 weights."""
    reduction = seconds("data", "reduce-scatter", 4 * parameters, ranks=ranks)
    return reduction + seconds("data", "all-gather", 2 * parameters, ranks=ranks)


def test_overlap_hides_all_but_one_bucket_of_gradients_and_of_weights_behind_long_computation():
    buckets = gradient_buckets(LAUNCHED, vocab_size=VOCAB, world_size=64)
    bucket = exchange(sum(buckets) / len(buckets), ranks=64)
    assert step(LAUNCHED, ranks=64, compute=10).exposed == pytest.approx(bucket)
    serial = step(LAUNCHED, ranks=64, compute=10, overlap_grad_reduce=False)
    assert serial.exposed == pytest.approx(exchange(sum(buckets), ranks=64), rel=1e-4)  # other padding
    assert serial.total == 10 + serial.exposed


def test_overlap_hides_at_most_the_backward_and_the_forward_pass_of_a_micro_batch():
    """Small buckets, each with its latency: the sum is longer than the micro-batch, which takes the host 116 ms."""
    settings = LAUNCHED.with_section("training", micro_batch_size=2)
    buckets = gradient_buckets(settings.with_section("parallel", ddp_bucket_size=1), vocab_size=VOCAB, world_size=1024)
    total = len(buckets) * exchange(sum(buckets) / len(buckets), ranks=1024)
    exposed = step(settings, ranks=1024, compute=0.001, ddp_bucket_size=1).exposed
    assert exposed == pytest.approx(total - LAUNCHING)


def test_a_step_waits_for_the_host_if_kernels_are_short_and_for_the_stages_of_a_pipeline():
    def waiting(settings: Settings, compute: float, **parallel: Any) -> float:
        planned = step(settings, ranks=64, compute=compute, **parallel)
        return planned.total - planned.exposed - compute

    micro_batches = 2048 // (8 * 64)
    assert waiting(LAUNCHED, 0.001) == pytest.approx(micro_batches * LAUNCHING - 0.001)
    assert waiting(GRAPHED, 0.001) == pytest.approx(0)
    assert waiting(LAUNCHED, 10) == pytest.approx(0)
    # 16 replicas of four stages: a step has three more micro-batches than a replica computes.
    assert waiting(LAUNCHED, 10, pipeline_model_parallel_size=4) == pytest.approx(3 * 10 / 16)


# ---- docs/performance.md


def scaling_table() -> list[str]:
    """Stage 1 in documents like RefinedWeb's, with 400 Gb/s per GPU and per node of eight GPUs, with CUDA graphs."""
    lines = [
        "| GPUs | micro-batches | step, no graph | step | only network | per node: step | only network | hours |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    flops = forecast_phases(STAGE_1, open_or_assume_phases(STAGE_1), done=0, world_size=8)[0].flops
    for gpus in (8, 64, 256, 1024):
        graphed = fit_micro_batch(STAGE_1, world_size=gpus)
        assert graphed is not None
        launched = step_on(gpus, graphed.with_section("compute", cuda_graph_impl="none"), flops, vocab_size=VOCAB)
        own, shared = (step_on(gpus, graphed, flops, vocab_size=VOCAB, network_gbps=gbps) for gbps in (400, 50))
        cells = [f"{graphed.micro_batches_per_rank(gpus)} x {graphed.tokens_per_micro_batch:,}"]
        cells.append(f"{1e3 * launched.total:.0f} ms")
        for each in (own, shared):
            cells += [f"{1e3 * each.total:.0f} ms", f"{100 * each.exposed / each.total:.1f} %"]
        lines.append(f"| {gpus:,} | {' | '.join(cells)} | {own.total * 1e6 / 3600:.1f} |")
    return lines


def test_documentation_has_the_planned_scaling():
    table = "\n".join(scaling_table())
    assert f"\n{table}\n" in PAGE.read_text(encoding="utf-8"), f"the page needs this table:\n{table}"


MEASURED = {
    "local": {"transformer_impl": "local"},
    "Transformer Engine": {},
    **{
        f"the same in FP8, {recipe}": {"fp8_format": "hybrid", "fp8_recipe": recipe}
        for recipe in ("tensorwise", "delayed", "blockwise")
    },
}


@pytest.mark.parametrize("layers", MEASURED)
def test_plan_of_the_measured_steps_of_28_x_768_takes_their_time(layers):
    """Steps of 131,072 tokens on one H200, whose peak is an H100's. Largest difference: 1.1 %, from rounded shares."""
    rows = [[cell.strip() for cell in line.split("|")] for line in PAGE.read_text(encoding="utf-8").splitlines()]
    (row,) = [row for row in rows if len(row) == 8 and row[1] == layers and row[3] == "A"]
    measured = 131_072 / (1000 * float(row[4]))
    flops = 989e12 * measured * float(row[5].removesuffix(" %")) / 100
    settings = STAGE_1.with_section("compute", **MEASURED[layers])
    assert step_on(1, settings, flops, vocab_size=VOCAB).total == pytest.approx(measured, rel=0.015)


@pytest.mark.parametrize("width", [384, 512, 704, 768])
def test_plan_of_a_model_narrower_than_768_is_as_slow_as_12_x_512(width):
    """Steps of 65,536 tokens. Measured: 0.8 % from the page's step, and 24 % with the share of 28 x 768."""
    page = (REPOSITORY / "docs" / "results.md").read_text(encoding="utf-8")
    rate, share = re.search(r"speed \| ([\d,]+) tokens/s \(median\), MFU ([\d.]+) %", page).groups()
    measured = 65_536 / float(rate.replace(",", ""))
    settings = read_settings(REPOSITORY / "examples" / "configs" / "half_hour.yaml")
    settings = settings.with_section("model", hidden_size=width).with_section("compute", transformer_impl="local")
    planned = step_on(1, settings, 989e12 * measured * float(share) / 100, vocab_size=VOCAB).total
    assert (planned == pytest.approx(measured, rel=0.015)) == (width < 768)


# ---- the printed table


def test_time_and_price_are_those_of_all_phases_and_steps_those_of_the_largest():
    """The table fits a terminal of 80 columns without the name of the section, and names counts that do not fit."""
    forecasts: Any = [
        SimpleNamespace(phase=SimpleNamespace(settings=STAGE_1), flops=flops, iterations=iterations)
        for flops, iterations in ((3e15, 900), (1e15, 100))
    ]
    options = PlanOptions(gpus=(64, 96, 1024), price=2.5)
    header, row, no_multiple, waiting, _ = scaling_lines(forecasts, options, vocab_size=VOCAB, world_size=8)
    settings = STAGE_1.with_section("training", micro_batch_size=32)  # the largest that fits 64 ranks
    large, small = (step_on(64, settings, flops, vocab_size=VOCAB).total for flops in (3e15, 1e15))
    seconds = 900 * large + 100 * small
    assert row.split()[:5] == ["64", "1", "x", "32,768", f"{1e3 * large:.0f}"]
    assert row.endswith(f" {duration(seconds)}{2.5 * 64 * seconds / 3600:>10,.2f}")
    assert no_multiple == "    96  the global batch is no multiple of the data-parallel ranks"
    busy = (
        compute_seconds(1024, STAGE_1, 3e15)
        / step_on(1024, settings.with_section("training", micro_batch_size=2), 3e15, vocab_size=VOCAB).total
    )
    assert f" {100 * busy:.0f} % " in waiting
    assert max(map(len, (header, row, no_multiple, waiting))) <= 68
