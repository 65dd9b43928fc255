"""Cross-checks of the settings: each message carries the numbers, the rule and the remedy."""

import re
from dataclasses import fields

import pytest

from megatron_neobert.cli import flag_of
from megatron_neobert.config.rules import LARGEST_DOCUMENT_BLOCK, NEEDS, find_problems, need_problems
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
    default_will_not_do = need.wanted in (None, False, "full", "delayed", "muon")
    without = alone if default_will_not_do else change(alone, need.needs)
    other = flag_of(need.needs) if need.wanted is not False else flag_of(need.needs).replace("--", "--no-")
    beginning = f"{flag_of(need.name)}( \\S+)? needs {other}( .*)?: {need.why}; add that, or leave it out"
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
