"""Memory by arithmetic against what autograd keeps, and formulas one can read here."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests_tiny import tiny_settings

from megatron_neobert.config.cli import read_settings
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.rows import usual_masked
from megatron_neobert.model.flops import count_parameters
from megatron_neobert.planning.memory import layer_bytes, plan_memory
from megatron_neobert.training.setup import build_run, join

VOCAB = 30_522  # google-bert/bert-base-uncased
FULL = {"recompute_granularity": "full"}


def count_saved_bytes(run: Any, batch: Any) -> int:
    """Return the bytes that autograd keeps of one micro-batch: every storage once, weights not counted.

    Collective: all ranks.
    """
    weights = {weight.untyped_storage().data_ptr() for weight in run.model.parameters()}
    kept: dict[int, Any] = {}  # the tensors as well: a freed one's place would be taken by another

    def keep(tensor: Any) -> Any:
        tensor = tensor.detach()  # or it would keep its graph, and this graph it, for ever
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            kept[place] = tensor
        return tensor

    batch = batch.to(run.device)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model = run.model
        model(batch.tokens_t, batch.cu_seqlens_n, batch.max_seqlen, batch.masked_positions_m, batch.labels_m)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


BERT = {"model": {"normalization": "LayerNorm", "swiglu": False, "position_embedding_type": "learned_absolute"}}


@pytest.mark.parametrize(
    ("changes", "factor"),
    [(BERT, 1.00), ({}, 1.53), ({"training": {"bf16": True}}, 1.92), ({"compute": FULL}, 1.22)],
    ids=["bert", "fp32", "bf16", "recompute"],
)
def test_autograd_keeps_on_a_cpu_what_is_planned_times_the_stated_factor(
    changes, factor, tiny_corpus, no_process_group_left
):
    """Exactly as planned where torch's CPU kernels are fused; it has no fused RMSNorm and no fused SwiGLU there."""
    settings = tiny_settings(tiny_corpus, **changes)
    run = build_run(settings, *join(settings))
    batch = next(run.training_stream.steps()).micro_batches[0]
    vocab_size, masked = run.tokenizer.vocab_size, len(batch.labels_m)
    plan = plan_memory(settings, vocab_size=vocab_size, world_size=1, masked_tokens=masked)
    assert count_saved_bytes(run, batch) / (plan.activations + plan.head) == pytest.approx(factor, rel=0.005)


def test_a_token_of_the_250m_model_keeps_24_632_bytes_per_layer_under_transformer_engine():
    """Norms: input, output, statistic. Attention: q, k, v, result, logsumexp. SwiGLU: both halves and their product."""
    settings = Settings().with_section("training", bf16=True)
    per_token = 2 * (2 * 2 * 768 + 4) + (4 * 2 * 768 + 4 * 12) + 3 * 2 * 2048
    assert sum(layer_bytes(settings)) == per_token * 64 * 1024 == 24_632 * 64 * 1024


def test_context_and_tensor_parallel_ranks_keep_their_share():
    settings = Settings().with_section("training", bf16=True)

    def layer(**parallel: Any) -> int:
        return sum(layer_bytes(settings.with_section("parallel", **parallel)))

    slots = 64 * 1024
    # An exchange between context-parallel ranks leaves one more copy of the attention's result.
    assert layer(context_parallel_size=2) == (layer() + 2 * 768 * slots) // 2
    assert layer(tensor_model_parallel_size=2) == layer() // 2


# ---- pipelines


def test_the_first_of_four_stages_keeps_four_micro_batches():
    settings = Settings().with_section("training", bf16=True).with_section("parallel", pipeline_model_parallel_size=4)
    plan = plan_memory(settings, vocab_size=VOCAB, world_size=4, masked_tokens=13_107)
    hidden = 2 * 768 * 64 * 1024
    assert plan.stage == 0
    # Four times seven layers with a rotation, what came in and what went out, and the token ids.
    assert plan.activations == 4 * ((7 * 24_632 + 4 * 64) * 64 * 1024 + 2 * hidden + 8 * 64 * 1024)


# ---- weights, gradients, optimizer


def state_bytes(settings: Settings, *, world_size: int) -> int:
    return plan_memory(settings, vocab_size=VOCAB, world_size=world_size, masked_tokens=1000).state


@pytest.mark.parametrize(("bf16", "stages"), [(False, 1), (True, 2)])
def test_muon_keeps_one_moment_for_the_matrices_of_layers(bf16, stages):
    settings = Settings().with_section("training", bf16=bf16)
    settings = settings.with_section("parallel", pipeline_model_parallel_size=stages, use_distributed_optimizer=False)
    adamw, muon = (
        state_bytes(settings.with_section("optimizer", optimizer=name), world_size=stages) for name in ("adamw", "muon")
    )
    matrices = 28 // stages * (4 * 768**2 + 3 * 768 * 2048)
    assert adamw - muon == 4 * matrices


def test_the_distributed_optimizer_splits_moments_and_main_weights():
    settings = Settings().with_section("training", bf16=True)
    padded = count_parameters(settings.model, vocab_size=30_592).total
    assert state_bytes(settings, world_size=8) == padded * 6 + padded * 12 // 8
    whole = settings.with_section("parallel", use_distributed_optimizer=False)
    assert state_bytes(whole, world_size=8) == padded * 18


def test_with_one_micro_batch_the_fullest_pipeline_stage_is_that_of_the_head():
    """It has a bias and a norm more than the embedding, and no stage has more than one micro-batch in flight."""
    settings = Settings().with_section("parallel", pipeline_model_parallel_size=4, use_distributed_optimizer=False)
    settings = settings.with_section("training", micro_batch_size=1, global_batch_size=1)
    stage = 7 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768) + 768 + 30_592 * 768 + 30_592
    assert state_bytes(settings, world_size=4) == stage * 16


def test_tensor_parallel_ranks_share_the_weights_and_context_parallel_ranks_only_the_optimizer():
    settings = Settings().with_section("training", bf16=True)
    padded = count_parameters(settings.model, vocab_size=30_592).total
    halved = settings.with_section("parallel", tensor_model_parallel_size=2, context_parallel_size=2)
    share = count_parameters(settings.model, vocab_size=30_720).total // 2  # padded to a multiple of 2 x 128
    assert state_bytes(halved, world_size=8) == share * 6 + share * 12 // 4
    context = settings.with_section("parallel", context_parallel_size=2)
    assert state_bytes(context, world_size=8) == padded * 6 + padded * 12 // 8


# ---- the page

PAGE = Path(__file__).resolve().parents[3] / "docs" / "memory.md"
STAGE_1 = read_settings(PAGE.parents[1] / "examples" / "configs" / "neobert_stage1.yaml")
ROWS_OF_PAGE = {
    "as it is": {},
    "`--micro-batch-size 16`": {"training": {"micro_batch_size": 16}},
    "`--micro-batch-size 8`": {"training": {"micro_batch_size": 8}},
    "`--bf16` instead of float32": {"training": {"bf16": False}},
    "`--use-distributed-optimizer` (default)": {"parallel": {"use_distributed_optimizer": False}},
    "`--recompute-granularity full`": {"compute": FULL},
    "`--tensor-model-parallel-size 2`": {"parallel": {"tensor_model_parallel_size": 2}},
    "`--context-parallel-size 2`": {"parallel": {"context_parallel_size": 2}},
    "`--pipeline-model-parallel-size 2`": {"parallel": {"pipeline_model_parallel_size": 2}},
    "80 GiB and more": {"training": {"micro_batch_size": 64}},
    "40 GiB": {},
    "24 GiB": {"training": {"micro_batch_size": 16}},
}


@pytest.mark.parametrize("words", ROWS_OF_PAGE)
def test_page_has_the_gib_of_the_plan(words):
    settings = STAGE_1
    for section, changes in ROWS_OF_PAGE[words].items():
        settings = settings.with_section(section, **changes)
    slots = settings.tokens_per_micro_batch // settings.parallel.context_parallel_size
    plan = plan_memory(
        settings,
        vocab_size=VOCAB,
        world_size=8,
        masked_tokens=usual_masked(slots, probability=0.2),
    )
    (row,) = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if f"| {words} |" in line]
    assert f" {plan.total / 2**30:.2f} |" in row
