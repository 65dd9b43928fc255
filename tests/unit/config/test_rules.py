"""Rules between settings: each violation is reported with its values, and a corrected combination is accepted."""

import pytest
from unit.config.command_line import problems_of

from megatron_neobert.config.rules import LARGEST_DOCUMENT_BLOCK, find_problems
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.windows import WINDOW_DOCUMENTS

# Ranks, flags, a part of the message, and flags that correct the others.
CORRECTED = [
    (
        1,
        "--fp8-format hybrid --micro-batch-size 1 --seq-length 1000",
        "--fp8-recipe tensorwise needs matrix dimensions that are multiples of 16 per rank; --micro-batch-size x "
        "--seq-length 1000 is not. Use 1008.",
        "--micro-batch-size 2",
    ),
    (
        4,
        "--fp8-format e4m3 --fp8-recipe blockwise --micro-batch-size 1 --seq-length 1152 "
        "--tensor-model-parallel-size 2 --context-parallel-size 2",
        "multiples of 128 per rank; --micro-batch-size x --seq-length 1152 / 4 tensor- and context-parallel "
        "ranks = 288 is not. Use 1536 or --fp8-recipe tensorwise.",
        "--seq-length 1536",
    ),
    (
        2,
        "--fp8-format hybrid --hidden-size 1008 --tensor-model-parallel-size 2",
        "--hidden-size 1008 / 2 tensor- and context-parallel ranks = 504 is not. Use 1024.",
        "--hidden-size 1024 --num-attention-heads 8 --ffn-hidden-size 2752",
    ),
    (
        1,
        "--attention-backend fused --transformer-impl local",
        "--attention-backend fused chooses a kernel of Transformer Engine, and --transformer-impl is local",
        "--transformer-impl auto",
    ),
    (
        1,
        "--attention-backend fused --hidden-size 1008",
        "--hidden-size / --num-attention-heads = 84; use --attention-backend auto.",
        "--attention-backend auto",
    ),
    (
        1,
        "--fp8-format e4m3 --transformer-impl local",
        "--fp8-format e4m3 needs Transformer Engine, and --transformer-impl is local",
        "--transformer-impl transformer_engine",
    ),
]


@pytest.mark.parametrize(("ranks", "flags", "sentence", "correction"), CORRECTED)
def test_combination_is_refused_with_its_values_and_the_corrected_one_is_not(ranks, flags, sentence, correction):
    words = ["--bf16", *flags.split()]
    problems = problems_of(*words, ranks=ranks)
    assert sum(sentence in problem for problem in problems) == 1, problems
    assert problems_of(*words, *correction.split(), ranks=ranks) == []


def test_defaults_need_only_data_and_a_tokenizer():
    assert problems_of() == []
    without = find_problems(Settings(), world_size=1)
    assert [problem.split()[0] for problem in without] == ["--data-path", "--tokenizer-model"]


def test_largest_document_block_is_the_window_of_packing():
    assert LARGEST_DOCUMENT_BLOCK == WINDOW_DOCUMENTS


def test_heads_of_odd_width_are_accepted_with_learned_positions_only():
    odd = "--hidden-size 60 --num-attention-heads 4"
    assert problems_of(*odd.split())
    assert problems_of(*odd.split(), "--position-embedding-type", "learned_absolute") == []


# Ranks, flags, and parts of the only message.
INVALID = [
    (1, "--num-attention-heads 14", ["--hidden-size 768", "--num-attention-heads 14"]),
    (1, "--seq-length 8192", ["--seq-length 8192", "--max-position-embeddings 4096", "to 8192"]),
    (6, "--tensor-model-parallel-size 4", ["6 ranks", "--tensor-model-parallel-size 4"]),
    (8, "--tensor-model-parallel-size 8", ["size 8", "--num-attention-heads 12"]),
    (3, "", ["--global-batch-size 2048 is not a multiple of 3 data-parallel ranks", "Use 2049"]),
    (1, "--lr-warmup-iters 50 --train-iters 50", ["--lr-warmup-iters 50", "below 45", "for example 1"]),
    (2, "--pipeline-model-parallel-size 2 --num-layers 7", ["7", "size 2"]),
    (8, "--context-parallel-size 8", ["size 8 x", "--num-attention-heads 12"]),
    (3, "--context-parallel-size 3 --micro-batch-size 1", ["1 x --seq-length 1024 = 1024 tokens", "3 ranks"]),
    (2, "--context-parallel-size 2 --loss-normalization micro_batch", ["micro_batch", "size 2"]),
    (6, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", ["6 ranks", "size 1 = 4"]),
    (1, "--continue-from one --save two", ["--continue-from one", "--save two", "--load two"]),
    (1, "--document-block-size 8192", ["--document-block-size 8192", "4096", "Use 256"]),
    (1, "--min-lr 0.001", ["--min-lr 0.001", "--lr 0.0006"]),
    (1, "--adam-beta2 1.0", ["--adam-beta2 1.0", "below 1"]),
    (1, "--mask-prob 1.5", ["--mask-prob 1.5", "between 1/65,536 and 1"]),
    (1, "--mask-prob nan", ["--mask-prob nan", "finite"]),
    (1, "--lr-decay-style poly", ["--lr-decay-style poly", "cosine, linear, constant"]),
    (1, "--lr-decay-style WSD", ["--lr-decay-style WSD needs --lr-wsd-decay-iters"]),
    (1, "--lr-wsd-decay-iters 10", ["--lr-wsd-decay-iters 10 needs --lr-decay-style WSD"]),
    (
        1,
        "--lr-decay-style WSD --lr-wsd-decay-iters 91 --train-iters 100 --lr-warmup-iters 10",
        ["--lr-wsd-decay-iters 91 exceeds 90", "warm-up, 10,", "decay, 100", "Use about 9"],
    ),
    (1, "--save one --keep-last 1", ["--keep-last 1", "below 2"]),
    (1, "--continue-from a --save b --load ./c", ["--save b needs --load b"]),
    (1, "--valid-data-path 0.3 a", ["--valid-data-path 0.3 is a weight", "remove the weights"]),
    (1, "--valid-data-path a --eval-iters 0", ["--valid-data-path a is never used", "--eval-iters 0"]),
    (1, "--async-save", ["--async-save needs --save"]),
    (1, "--valid-data-path a b a", ["--valid-data-path a b a names a corpus twice"]),
    (1, "--save one --profile 10-12 --train-iters 9 --lr-warmup-iters 1", ["--profile 10-12", "--train-iters 9"]),
    (1, "--save one --profile 12-10", ["--profile 12-10 is not a range", "such as 10-12"]),
]


@pytest.mark.parametrize(("ranks", "flags", "parts"), INVALID)
def test_invalid_setting_is_refused_in_one_sentence_with_its_values(ranks, flags, parts):
    problems = problems_of(*flags.split(), ranks=ranks)
    assert len(problems) == 1, problems
    assert [part for part in parts if part not in problems[0]] == []
