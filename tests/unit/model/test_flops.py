"""Number of parameters and operations, and size of a checkpoint."""

from pathlib import Path

import pytest

from megatron_neobert.config.cli import read_settings
from megatron_neobert.config.schema import Settings
from megatron_neobert.model.flops import (
    checkpoint_bytes,
    count_parameters,
    training_flops_per_token,
)

CONFIGS = Path(__file__).resolve().parents[3] / "examples" / "configs"
VOCAB = 30_522  # google-bert/bert-base-uncased
LLAMA_VOCAB = 32_000 + 2  # LLaMA 2, with added tokens for padding and masks

# Parameters of the released code: chandar-lab/NeoBERT@ed75b68, model/model.py with the settings of each job.
PUBLISHED = {
    132_279_354: ["ablations/m0"],
    131_866_170: [f"ablations/m{number}" for number in (1, 2, 4, 5, 6)],
    134_236_224: ["ablations/m3"],
    278_633_946: ["ablations/m7"],
    256_680_426: ["ablations/m7_released"],
    245_136_954: ["ablations/m8", "ablations/m9_stage1", "ablations/m9_stage2"]
    + [f"neobert_{name}" for name in ("both_stages", "continued", "stage1", "stage2")],
}


@pytest.mark.parametrize(("recipe", "count"), [(recipe, count) for count in PUBLISHED for recipe in PUBLISHED[count]])
def test_recipe_has_the_parameter_count_of_the_released_code(recipe, count):
    model = read_settings(CONFIGS / f"{recipe}.yaml").model
    # The released code pads LLaMA 2's vocabulary and counts the padding. It does not pad BERT's vocabulary.
    vocab_size = model.padded_vocab_size(LLAMA_VOCAB, tensor_parallel=1) if recipe.endswith("m3") else VOCAB
    assert count_parameters(model, vocab_size=vocab_size).total == count


def test_flops_per_token_with_a_fifth_of_the_head_are_1_48_giga():
    flops = training_flops_per_token(Settings(), vocab_size=VOCAB, document_tokens=1024)
    blocks = 28 * (4 * 768**2 + 3 * 768 * 2048)
    assert flops == pytest.approx(6 * (blocks + 0.2 * VOCAB * 768) + 12 * 28 * 768 * 1024)
    assert flops / 1e9 == pytest.approx(1.482, abs=1e-3)


def test_a_causal_token_attends_to_half_of_its_document_and_is_always_predicted():
    settings = Settings().with_section("data", objective="clm")
    flops = training_flops_per_token(settings, vocab_size=VOCAB, document_tokens=1024)
    blocks = 28 * (4 * 768**2 + 3 * 768 * 2048)
    assert flops == pytest.approx(6 * (blocks + VOCAB * 768) + 12 * 28 * 768 * 512)


def test_layout_concatenated_costs_as_much_as_documents_of_the_sequence_length():
    settings = Settings().with_section("data", batch_layout="concatenated")
    expected = training_flops_per_token(Settings(), vocab_size=VOCAB, document_tokens=1024)
    assert training_flops_per_token(settings, vocab_size=VOCAB, document_tokens=300) == expected
    assert training_flops_per_token(Settings(), vocab_size=VOCAB, document_tokens=300) < expected


def test_checkpoint_has_the_bytes_of_weights_main_weights_and_two_moments():
    assert checkpoint_bytes(Settings(), vocab_size=VOCAB) == 245_136_954 * 12
