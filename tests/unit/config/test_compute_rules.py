"""Every combination of kernels and precisions that is refused names its values, and the one beside it passes."""

from typing import Any

import pytest

from megatron_neobert.config.rules import find_problems
from megatron_neobert.config.schema import Settings


def settings(compute: dict[str, Any], **sections: dict[str, Any]) -> Settings:
    """The base model in bfloat16."""
    built = Settings().with_section("training", bf16=True).with_section("compute", **compute)
    for name, changes in sections.items():
        built = built.with_section(name, **changes)
    return built


def problems_of(chosen: Settings) -> list[str]:
    """On as few ranks as can hold it, with the inputs that every run needs."""
    chosen = chosen.with_section("data", data_path=("corpus",), tokenizer_model="tokenizer")
    return find_problems(chosen, world_size=chosen.parallel.ranks_per_model)


def test_the_defaults_are_fine():
    assert problems_of(Settings()) == []


# What is refused, the words (with the values), and the change that fixes it.
REFUSED = {
    "cudnn_without_engine": (
        ({"attention_backend": "fused", "transformer_impl": "local"}, {}),
        "--attention-backend fused is cuDNN through Transformer Engine, not with --transformer-impl local",
        ({"attention_backend": "fused", "transformer_impl": "auto"}, {}),
    ),
    "cudnn_with_odd_heads": (
        ({"attention_backend": "fused"}, {"model": {"hidden_size": 1008}}),
        "--hidden-size 1008 / --num-attention-heads 12 = 84",
        ({"attention_backend": "fused"}, {"model": {"hidden_size": 1056}}),
    ),
    "bf16_gradients_in_float32": (
        ({"cross_entropy_loss_fusion": True}, {"training": {"bf16": False}}),
        "rounds the gradient of the logits to bfloat16",
        ({"cross_entropy_loss_fusion": True}, {}),
    ),
    "gathered_mxfp8": (
        ({"fp8_format": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True}, {}),
        "--fp8-param-gather does not go with --fp8-recipe mxfp8",
        ({"fp8_format": "e4m3", "fp8_recipe": "mxfp8"}, {}),
    ),
    "fp8_without_engine": (
        ({"fp8_format": "e4m3", "transformer_impl": "local"}, {}),
        "--fp8-format e4m3 is Transformer Engine's, not with --transformer-impl local",
        ({"fp8_format": "e4m3", "transformer_impl": "transformer_engine"}, {}),
    ),
    "delayed_with_bf16_layers": (
        ({"fp8_format": "hybrid", "fp8_recipe": "delayed", "first_last_layers_bf16": True}, {}),
        "--first-last-layers-bf16 does not go with --fp8-recipe delayed",
        ({"fp8_format": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True}, {}),
    ),
    "more_bf16_layers_than_a_stage_has": (
        (
            {"fp8_format": "hybrid", "first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 8},
            {"parallel": {"pipeline_model_parallel_size": 4}},
        ),
        "--num-layers-at-start-in-bf16 8 exceeds the 7 layers of a pipeline stage",
        (
            {"fp8_format": "hybrid", "first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 7},
            {"parallel": {"pipeline_model_parallel_size": 4}},
        ),
    ),
    "no_layer_left_for_fp8": (
        (
            {"fp8_format": "hybrid", "first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 27},
            {},
        ),
        "27 and --num-layers-at-end-in-bf16 1 leave none of --num-layers 28 in FP8",
        ({"fp8_format": "hybrid", "first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 26}, {}),
    ),
    "tensorwise_tokens": (
        ({"fp8_format": "hybrid"}, {"training": {"micro_batch_size": 1}, "data": {"seq_length": 1000}}),
        "--micro-batch-size 1 x --seq-length 1000 = 1000 tokens cannot be shared by 1 rank (--context-parallel-size 1) "
        "in multiples of 16 (--fp8-recipe tensorwise); every rank needs the same number. Use --seq-length 1008.",
        ({"fp8_format": "hybrid"}, {"training": {"micro_batch_size": 2}, "data": {"seq_length": 1000}}),
    ),
    "blockwise_tokens_of_ranks_that_share_them": (
        (
            {"fp8_format": "e4m3", "fp8_recipe": "blockwise"},
            {
                "training": {"micro_batch_size": 1},
                "data": {"seq_length": 1152},
                "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            },
        ),
        "1152 tokens cannot be shared by 2 ranks (--context-parallel-size 1 x --tensor-model-parallel-size 2, for "
        "--sequence-parallel) in multiples of 128 (--fp8-recipe blockwise); every rank needs the same number. Use "
        "--seq-length 1280.",
        (
            {"fp8_format": "e4m3", "fp8_recipe": "blockwise"},
            {
                "training": {"micro_batch_size": 1},
                "data": {"seq_length": 1152},
                "parallel": {"tensor_model_parallel_size": 2},
            },
        ),
    ),
    "tokens_of_context_parallel_ranks": (
        (
            {"fp8_format": "hybrid"},
            {
                "training": {"micro_batch_size": 1},
                "data": {"seq_length": 1040},
                "parallel": {"context_parallel_size": 2},
            },
        ),
        "1040 tokens cannot be shared by 2 ranks (--context-parallel-size 2) in multiples of 16 (",
        (
            {"fp8_format": "hybrid"},
            {
                "training": {"micro_batch_size": 1},
                "data": {"seq_length": 1056},
                "parallel": {"context_parallel_size": 2},
            },
        ),
    ),
    "blockwise_width": (
        ({"fp8_format": "e4m3", "fp8_recipe": "blockwise"}, {"model": {"hidden_size": 1008}}),
        "multiples of 128: --hidden-size 1008 is not. Use --hidden-size 1024 or --fp8-recipe tensorwise.",
        ({"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}, {"model": {"hidden_size": 1008}}),
    ),
    "width_of_a_rank": (
        (
            {"fp8_format": "hybrid"},
            {"model": {"hidden_size": 1008}, "parallel": {"tensor_model_parallel_size": 2}},
        ),
        "multiples of 16: --hidden-size 1008 over --tensor-model-parallel-size 2 = 504 is not. Use --hidden-size 1024 "
        "or --tensor-model-parallel-size 1.",
        (
            {"fp8_format": "hybrid"},
            {
                "model": {"hidden_size": 1024, "num_attention_heads": 8, "ffn_hidden_size": 2752},
                "parallel": {"tensor_model_parallel_size": 2},
            },
        ),
    ),
    "feed_forward_width": (
        ({"fp8_format": "hybrid"}, {"model": {"ffn_hidden_size": 2056}}),
        "the feed-forward width (--ffn-hidden-size) 2056 is not. Use --ffn-hidden-size 2064.",
        ({"fp8_format": "hybrid"}, {"model": {"ffn_hidden_size": 2064}}),
    ),
    "unequal_groups": (
        (
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 4},
            {"parallel": {"pipeline_model_parallel_size": 2}},
        ),
        "--recompute-num-layers 4 does not divide the 14 layers of a pipeline stage into equal groups "
        "(--recompute-method uniform); use one of 1, 2, 7, 14.",
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 4}, {}),
    ),
    "block_larger_than_a_piece": (
        (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 8},
            {"parallel": {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 7}},
        ),
        "--recompute-num-layers 8 exceeds the 7 layers of a pipeline stage",
        (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 8},
            {"parallel": {"pipeline_model_parallel_size": 2}},
        ),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_combination_is_refused_with_its_values_and_the_fixed_one_is_not(case):
    (compute, sections), words, (fixed, fixed_sections) = REFUSED[case]
    found = problems_of(settings(compute, **sections))
    assert sum(words in problem for problem in found) == 1, found
    assert problems_of(settings(fixed, **fixed_sections)) == []


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise", "mxfp8"])
def test_the_base_model_suits_every_recipe_on_one_rank_and_on_two(recipe):
    for ranks in (1, 2):
        parallel = {"tensor_model_parallel_size": ranks, "sequence_parallel": ranks > 1}
        assert problems_of(settings({"fp8_format": "hybrid", "fp8_recipe": recipe}, parallel=parallel)) == []
