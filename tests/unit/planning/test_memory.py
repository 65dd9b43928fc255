"""Planned memory equals formulas that are written out here; tests/gpu_path counts what autograd keeps."""

from pathlib import Path

import pytest

from megatron_neobert.config.cli import read_settings
from megatron_neobert.config.schema import Settings
from megatron_neobert.model.flops import count_parameters
from megatron_neobert.planning.memory import layer_bytes, plan_memory

VOCAB = 30_522  # google-bert/bert-base-uncased


def test_a_token_of_the_250m_model_keeps_24_632_bytes_per_layer_under_transformer_engine():
    """Norms: input, output, statistics. Attention: q, k, v, result, logsumexp. SwiGLU: both halves and the product."""
    settings = Settings().with_section("training", bf16=True)
    per_token = 2 * (2 * 2 * 768 + 4) + (4 * 2 * 768 + 4 * 12) + 3 * 2 * 2048
    assert layer_bytes(settings) == (per_token * 64 * 1024,) * 2 == (24_632 * 64 * 1024,) * 2
    recomputed = settings.with_section("compute", recompute_granularity="full")
    assert layer_bytes(recomputed) == (24_632 * 64 * 1024, 2 * 768 * 64 * 1024)


def test_the_first_of_four_stages_keeps_seven_layers_of_four_micro_batches():
    settings = Settings().with_section("training", bf16=True).with_section("parallel", pipeline_model_parallel_size=4)
    plan = plan_memory(settings, vocab_size=VOCAB, world_size=4)
    assert (plan.stage, plan.activations) == (0, 4 * 7 * 24_632 * 64 * 1024)


# ---- weights, gradients, optimizer


def state_bytes(settings: Settings, *, world_size: int) -> int:
    plan = plan_memory(settings, vocab_size=VOCAB, world_size=world_size)
    return plan.weights + plan.gradients + plan.optimizer


@pytest.mark.parametrize(("bf16", "stages"), [(False, 1), (True, 2)])
def test_muon_keeps_one_moment_for_the_matrices_of_layers(bf16, stages):
    settings = Settings().with_section("training", bf16=bf16)
    settings = settings.with_section("parallel", pipeline_model_parallel_size=stages)
    adamw, muon = (
        state_bytes(settings.with_section("optimizer", optimizer=name), world_size=stages) for name in ("adamw", "muon")
    )
    matrices = 28 // stages * (4 * 768**2 + 3 * 768 * 2048)
    assert adamw - muon == 4 * matrices


def test_the_distributed_optimizer_divides_moments_and_main_weights_between_ranks():
    settings = Settings().with_section("training", bf16=True)
    padded = count_parameters(settings.model, vocab_size=30_592).total
    assert state_bytes(settings, world_size=8) == padded * 6 + padded * 12 // 8
    muon = settings.with_section("optimizer", optimizer="muon")
    matrices = 28 * (4 * 768**2 + 3 * 768 * 2048)
    assert state_bytes(muon, world_size=8) == padded * 18 - 4 * matrices


def test_tensor_parallel_ranks_divide_all_state_and_context_parallel_ranks_only_the_optimizer():
    settings = Settings().with_section("training", bf16=True)
    padded = count_parameters(settings.model, vocab_size=30_592).total
    halved = settings.with_section("parallel", tensor_model_parallel_size=2, context_parallel_size=2)
    share = count_parameters(settings.model, vocab_size=30_720).total // 2  # padded to a multiple of 2 x 128
    assert state_bytes(halved, world_size=8) == share * 6 + share * 12 // 4
    context = settings.with_section("parallel", context_parallel_size=2)
    assert state_bytes(context, world_size=8) == padded * 6 + padded * 12 // 8


# ---- the table in docs/cluster.md

PAGE = Path(__file__).resolve().parents[3] / "docs" / "cluster.md"
STAGE_1 = read_settings(PAGE.parents[1] / "examples" / "configs" / "neobert_stage1.yaml")
CHANGES = {
    "as it is": {},
    "`--micro-batch-size 16`": {"training": {"micro_batch_size": 16}},
    "`--micro-batch-size 32`": {"training": {"micro_batch_size": 32}},
    "`--bf16` instead of float32": {"training": {"bf16": False}},
    "`--recompute-granularity full`": {"compute": {"recompute_granularity": "full"}},
    "`--tensor-model-parallel-size 2`": {"parallel": {"tensor_model_parallel_size": 2}},
    "`--context-parallel-size 2`": {"parallel": {"context_parallel_size": 2}},
    "`--pipeline-model-parallel-size 2`": {"parallel": {"pipeline_model_parallel_size": 2}},
    "80 GiB and more": {},
    "40 GiB": {"training": {"micro_batch_size": 32}},
    "24 GiB": {"training": {"micro_batch_size": 16}},
}


@pytest.mark.parametrize("title", CHANGES)
def test_page_has_the_gib_of_the_plan(title):
    settings = STAGE_1
    for section, changes in CHANGES[title].items():
        settings = settings.with_section(section, **changes)
    plan = plan_memory(settings, vocab_size=VOCAB, world_size=8)
    (line,) = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if f"| {title} |" in line]
    assert f" {plan.total / 2**30:.2f} |" in line
