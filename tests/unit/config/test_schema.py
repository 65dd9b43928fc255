"""Cross-checks of the settings: each message carries the numbers, the rule and the remedy."""

import pytest

from megatron_neobert.config.rules import LARGEST_DOCUMENT_BLOCK, find_problems
from megatron_neobert.config.schema import DataConfig, ModelConfig, Settings
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


def test_the_largest_block_of_documents_is_a_window():
    assert LARGEST_DOCUMENT_BLOCK == WINDOW_DOCUMENTS


def test_heads_of_odd_width_are_fine_without_rotation():
    """Rotary embeddings turn pairs of channels; learned positions do not."""
    odd = {"hidden_size": 60, "num_attention_heads": 4}
    assert problems_of(model=odd)
    assert problems_of(model={**odd, "position_embedding_type": "learned_absolute"}) == []
