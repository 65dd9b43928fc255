"""Cross-checks of the settings: each message carries the numbers, the rule and the remedy."""

import re
from dataclasses import fields

import pytest

from megatron_neobert.config.rules import LARGEST_DOCUMENT_BLOCK, NEEDS, find_problems, need_problems
from megatron_neobert.config.schema import DataConfig, ModelConfig, Settings, flag_of
from megatron_neobert.data.batches.rows import WINDOW_DOCUMENTS

LEGAL = Settings(data=DataConfig(data_path=("corpus",), tokenizer_model="tokenizer"))


def problems_of(*, world_size: int = 1, **sections: dict) -> list[str]:
    settings = LEGAL
    for name, changes in sections.items():
        settings = settings.with_section(name, **changes)
    return find_problems(settings, world_size=world_size)


def test_the_defaults_need_only_data_and_a_tokenizer():
    assert problems_of() == []
    without = find_problems(Settings(), world_size=1)
    assert [problem.split()[0] for problem in without] == ["--data-path", "--tokenizer-model"]


@pytest.mark.parametrize(("hidden_size", "width"), [(768, 2048), (384, 1024), (1008, 2688), (256, 688)])
def test_swiglu_is_two_thirds_of_four_times_the_width_rounded_up_to_eight(hidden_size, width):
    model = ModelConfig(hidden_size=hidden_size)
    assert model.ffn_width == width
    assert width % 8 == 0
    assert width - 8 < 2 / 3 * 4 * hidden_size <= width


def test_the_vocabulary_is_padded_to_the_next_multiple_for_every_rank():
    model = ModelConfig(make_vocab_size_divisible_by=128)
    assert model.padded_vocab_size(30_522, tensor_parallel=1) == 30_592 == 239 * 128
    assert model.padded_vocab_size(30_522, tensor_parallel=4) == 30_720 == 60 * 4 * 128
    assert model.padded_vocab_size(256, tensor_parallel=2) == 256


@pytest.mark.parametrize(
    ("world_size", "sections", "words"),
    [
        (
            1,
            {"model": {"num_attention_heads": 14}},
            ["--hidden-size 768", "--num-attention-heads 14", "12 or 16 heads"],
        ),
        (1, {"model": {"num_attention_heads": 256}}, ["heads of width 3", "even width"]),
        (1, {"data": {"seq_length": 8192}}, ["--seq-length 8192", "--max-position-embeddings 4096", "to 8192"]),
        (6, {"parallel": {"tensor_model_parallel_size": 4}}, ["6 ranks", "--tensor-model-parallel-size 4"]),
        (8, {"parallel": {"tensor_model_parallel_size": 8}}, ["size 8", "--num-attention-heads 12"]),
        (3, {}, ["--global-batch-size 2048", "64 x 3 data-parallel ranks = 192 packed sequences", "Use 2112"]),
        (
            1,
            {"optimizer": {"lr_warmup_iters": 50}, "training": {"train_iters": 50}},
            ["--lr-warmup-iters 50", "below 45"],
        ),
        (2, {"parallel": {"pipeline_model_parallel_size": 2}, "model": {"num_layers": 7}}, ["7", "size 2", "1 or 7"]),
        (
            2,
            {"parallel": {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 4}},
            ["--num-layers 28", "2 x", "stage 4 = 8"],
        ),
        (
            2,
            {"parallel": {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 14}},
            ["stage 14", "2 stages", "plain pipeline"],
        ),
        (
            4,
            {
                "parallel": {"pipeline_model_parallel_size": 4, "num_layers_per_virtual_pipeline_stage": 1},
                "training": {"global_batch_size": 192},
            },
            ["3 micro-batches", "192 / 64 packed sequences", "size 4", "--global-batch-size 256"],
        ),
        (8, {"parallel": {"context_parallel_size": 8}}, ["size 8 x", "--num-attention-heads 12"]),
        (
            3,
            {"parallel": {"context_parallel_size": 3}, "training": {"micro_batch_size": 1}},
            ["1 x --seq-length 1024 = 1024 tokens", "3 ranks"],
        ),
        (
            2,
            {"parallel": {"context_parallel_size": 2}, "training": {"loss_normalization": "micro_batch"}},
            ["micro_batch", "size 2"],
        ),
        (
            6,
            {"parallel": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}},
            ["6 ranks", "2 x --pipeline-model-parallel-size 2 = 4", "multiple of 4"],
        ),
        (
            2,
            {
                "model": {"num_layers": 4},
                "parallel": {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 8},
                "compute": {
                    "recompute_granularity": "full",
                    "recompute_method": "uniform",
                    "recompute_num_layers": 1,
                },
            },
            ["--num-layers 4", "stage 8 = 16"],
        ),
        (1, {"optimizer": {"lr": float("inf")}}, ["--lr inf", "finite"]),
        (
            1,
            {"checkpoint": {"continue_from": "one", "save": "two"}},
            ["--continue-from one", "--save two", "--load two"],
        ),
        (1, {"data": {"document_block_size": 8192}}, ["--document-block-size 8192", "4096", "Use 256"]),
        (1, {"optimizer": {"min_lr": 1e-3}}, ["--min-lr 0.001", "--lr 0.0006"]),
        (1, {"optimizer": {"adam_beta2": 1.0}}, ["--adam-beta2 1.0", "below 1"]),
        (1, {"data": {"mask_prob": 1.5}}, ["--mask-prob 1.5", "between 0 and 1"]),
        (1, {"data": {"mask_prob": float("nan")}}, ["--mask-prob nan"]),
        (1, {"training": {"micro_batch_size": 0}}, ["--micro-batch-size 0", "below 1"]),
        (1, {"training": {"seed": 2**64}}, [f"--seed {2**64}", "63 bits"]),
        (1, {"optimizer": {"lr": float("nan")}}, ["--lr nan"]),
        (1, {"optimizer": {"lr_decay_style": "poly"}}, ["--lr-decay-style poly", "cosine, linear, constant"]),
        (1, {"checkpoint": {"save": "one", "keep_last": 1}}, ["--keep-last 1", "below 2"]),
        (1, {"checkpoint": {"continue_from": "a", "save": "b", "load": "./c"}}, ["--save b needs --load b"]),
        (1, {"checkpoint": {"allow_changed": ("seed,num_layers",)}}, ["--allow-changed num_layers", "seed, "]),
        (1, {"logging": {"wandb_project": "pro ject/x?"}}, ["--wandb-project pro ject/x?", "contains / ?,"]),
    ],
)
def test_an_impossible_setting_is_named_with_its_numbers(world_size, sections, words):
    problems = problems_of(world_size=world_size, **sections)
    assert len(problems) == 1, problems
    assert all(word in problems[0] for word in words), problems[0]


SECTION_OF = {item.name: section.name for section in fields(Settings) for item in fields(section.type)}
OTHERS = {"rotary_base": 500, "transformer_impl": "local", "position_embedding_type": "learned_absolute"}


def change(settings: Settings, name: str, value: object = None) -> Settings:
    """With another value than the default's, which need not be legal."""
    default = getattr(getattr(Settings(), SECTION_OF[name]), name)
    other = not default if isinstance(default, bool) else OTHERS.get(name, 7)
    return settings.with_section(SECTION_OF[name], **{name: other if value is None else value})


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: f"{need.name}-{need.needs}")
def test_setting_that_needs_another_is_named_without_it_and_fine_with_it(need):
    alone = change(LEGAL, need.name, need.value)
    without = alone if need.wanted in (None, "full", "delayed") else change(alone, need.needs)
    beginning = f"{flag_of(need.name)}( \\S+)? needs {flag_of(need.needs)}( .*)?: {need.why}; add that, or leave it out"
    assert [problem for problem in need_problems(without) if re.match(beginning, problem)]
    both = change(alone, need.needs, need.wanted)
    assert not [problem for problem in need_problems(both) if re.match(beginning, problem)]


def test_all_problems_are_reported_at_once():
    problems = problems_of(model={"num_attention_heads": 14}, optimizer={"min_lr": 1.0}, data={"mask_prob": 0.0})
    assert len(problems) == 3


def test_the_largest_block_of_documents_is_a_window():
    assert LARGEST_DOCUMENT_BLOCK == WINDOW_DOCUMENTS


def test_heads_of_odd_width_are_fine_without_rotation():
    """Rotary embeddings turn pairs of channels; learned positions do not."""
    odd = {"hidden_size": 60, "num_attention_heads": 4}
    assert problems_of(model=odd)
    assert problems_of(model={**odd, "position_embedding_type": "learned_absolute"}) == []
