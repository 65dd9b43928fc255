"""Settings that may and may not differ between a checkpoint and the run that starts from it."""

from pathlib import Path

import pytest

from megatron_neobert.config.resume_rules import changes, refuse_other_run
from megatron_neobert.config.schema import Settings
from megatron_neobert.errors import CheckpointError

FOLDER = Path("run/iter_0000010")


def refuse(now: Settings, *, has_new_data: bool = False) -> None:
    refuse_other_run(Settings(), now, FOLDER, has_new_data=has_new_data)


def test_changed_rate_length_precision_and_layout_are_accepted_and_listed():
    now = (
        Settings()
        .with_section("optimizer", lr=1e-4)
        .with_section("training", train_iters=10, bf16=True, exit_interval=5)
        .with_section("parallel", tensor_model_parallel_size=2)
        .with_section("logging", log_interval=1)
    )
    refuse(now)
    assert list(changes(Settings(), now)) == [
        "--tensor-model-parallel-size was 1 and is now 2",
        "--lr was 0.0006 and is now 0.0001",
        "--train-iters was 1000000 and is now 10",
        "--bf16 was False and is now True",
    ]


def test_explicit_default_width_of_the_feed_forward_is_not_a_change():
    """A conversion writes the number, and a run leaves the setting at None."""
    default, explicit = Settings(), Settings().with_section("model", ffn_hidden_size=Settings().model.ffn_width)
    assert list(changes(explicit, default, weights_only=True)) == []
    other = default.with_section("model", ffn_hidden_size=1024)
    assert list(changes(default, other)) == [f"--ffn-hidden-size was {default.model.ffn_width} and is now 1024"]


@pytest.mark.parametrize(
    ("section", "name", "value", "before"),
    [
        ("model", "hidden_size", 512, 768),
        ("model", "rotary_base", 500, 10000),
        ("optimizer", "optimizer", "muon", "adamw"),
    ],
)
def test_weights_or_state_that_do_not_fit_are_refused_with_continue_from_too(section, name, value, before):
    now = Settings().with_section(section, **{name: value})
    sentence = rf"run: --{name.replace('_', '-')} was {before} and is now {value}\b.* Start with the values"
    with pytest.raises(CheckpointError, match=sentence) as caught:
        refuse(now, has_new_data=True)
    assert "--continue-from" not in str(caught.value)


def test_settings_of_another_run_are_refused_with_every_difference_unless_it_is_a_new_run():
    now = Settings().with_section("data", mask_prob=0.3).with_section("training", seed=1)
    sentence = (
        r"--mask-prob was 0.2 and is now 0.3; --seed was 0 and is now 1.* or, to start a new run .* --continue-from"
    )
    with pytest.raises(CheckpointError, match=sentence):
        refuse(now)
    refuse(now, has_new_data=True)


def test_micro_batch_size_can_change_unless_the_loss_is_a_mean_of_micro_batches():
    refuse(Settings().with_section("training", micro_batch_size=32))
    means = Settings().with_section("training", loss_normalization="micro_batch")
    now = means.with_section("training", micro_batch_size=32)
    with pytest.raises(CheckpointError, match="--micro-batch-size was 64 and is now 32"):
        refuse_other_run(means, now, FOLDER, has_new_data=False)
