"""Arithmetic of parameters, operations and bytes."""

import pytest

from megatron_neobert.config import ModelConfig, Settings
from megatron_neobert.training.flops import (
    checkpoint_bytes,
    count_parameters,
    state_bytes_per_rank,
    training_flops_per_token,
)

VOCAB = 30_522


def test_parameter_count_of_the_default_model_is_245_136_954():
    """28 blocks of 4·768² + 3·768·2048 + 2·768, a norm, an embedding, a decoder and its bias."""
    count = count_parameters(ModelConfig(), vocab_size=VOCAB)
    assert count.blocks == 28 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768) == 198_223_872
    assert count.total == 198_223_872 + 768 + 2 * VOCAB * 768 + VOCAB == 245_136_954


@pytest.mark.parametrize(
    ("layers", "hidden", "parameters"), [(12, 768, 131_866_170), (16, 1008, 256_680_426), (16, 1056, 278_633_946)]
)
def test_parameter_counts_of_the_ablations_are_the_published_ones(layers, hidden, parameters):
    model = ModelConfig(num_layers=layers, hidden_size=hidden, num_attention_heads=12)
    assert count_parameters(model, vocab_size=VOCAB).total == parameters


def test_flops_per_token_with_a_fifth_of_the_head_are_1_48_giga():
    flops = training_flops_per_token(Settings(), vocab_size=VOCAB, document_tokens=1024)
    blocks = 28 * (4 * 768**2 + 3 * 768 * 2048)
    assert flops == pytest.approx(6 * (blocks + 0.2 * VOCAB * 768) + 12 * 28 * 768 * 1024)
    assert flops / 1e9 == pytest.approx(1.482, abs=1e-3)


def test_the_distributed_optimizer_splits_moments_and_main_weights():
    settings = Settings().with_section("training", bf16=True)
    padded = count_parameters(settings.model, vocab_size=30_592).total
    assert state_bytes_per_rank(settings, vocab_size=VOCAB, world_size=8) == padded * 6 + padded * 12 // 8
    whole = settings.with_section("parallel", use_distributed_optimizer=False)
    assert state_bytes_per_rank(whole, vocab_size=VOCAB, world_size=8) == padded * 18


def test_a_checkpoint_holds_weights_main_weights_and_two_moments():
    assert checkpoint_bytes(Settings(), vocab_size=VOCAB) == 245_136_954 * 16
