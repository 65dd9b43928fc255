"""Settings that may and may not differ between a checkpoint and the run that starts from it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_neobert.cli import flag_of
from megatron_neobert.config.resume_rules import (
    ReadCorpus,
    SavedRun,
    changes,
    continue_warnings,
    refuse_other_run,
    refuse_unfit_checkpoint,
)
from megatron_neobert.config.schema import ModelConfig, PhaseChange, Settings
from megatron_neobert.errors import CheckpointError, ConfigError

FOLDER = Path("run/iter_0000010")


def refuse(
    now: Settings, *, saved: Settings | None = None, has_new_data: bool = False, weights_only: bool = False
) -> None:
    refuse_other_run(saved or Settings(), now, FOLDER, has_new_data=has_new_data, weights_only=weights_only)


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


MAY_CHANGE = {"max_position_embeddings": 8192, "init_method_range": 0.05}
OTHER_VALUES = {"swiglu": False, "normalization": "LayerNorm", "position_embedding_type": "learned_absolute"}
OTHER_VALUES |= {"ffn_hidden_size": 1024, "optimizer": "muon", **MAY_CHANGE}


@dataclass(frozen=True, kw_only=True)
class ModelConfigWithGeGLU(ModelConfig):
    """The settings of the model with a new one, as a contributor adds it."""

    gate: int = 1


SAVED = Settings(model=ModelConfigWithGeGLU())


@pytest.mark.parametrize(
    ("section", "name"), [*(("model", name) for name in vars(SAVED.model)), ("optimizer", "optimizer")]
)
def test_settings_that_weights_or_optimizer_state_depend_on_must_fit_with_continue_from_too(section, name):
    value = OTHER_VALUES[name] if name in OTHER_VALUES else 2 * getattr(SAVED.model, name)
    now = SAVED.with_section(section, **{name: value})
    if name in MAY_CHANGE:
        refuse(now, saved=SAVED)
        return
    sentence = rf"run: {flag_of(name)} was .* and is now {value}\b.*\. Start with the values in \S*settings\.yaml"
    with pytest.raises(CheckpointError, match=f"{sentence}, or train from the beginning with new folders as --save"):
        refuse(now, saved=SAVED)
    for weights_only in (False, True) if section == "model" else (False,):
        with pytest.raises(CheckpointError, match=rf"{sentence}\.$"):
            refuse(now, saved=SAVED, has_new_data=True, weights_only=weights_only)


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
        refuse(now, saved=means)


# --- what a run and the runs before it have read


def data_of(*corpora: str, phases: tuple[PhaseChange, ...] = ()) -> Settings:
    return Settings().with_section("data", data_path=corpora).with_section("training", phases=phases)


def saved_run(settings: Settings, corpus_sha256: str, **changes: Any) -> SavedRun:
    """Return the record of a checkpoint of iteration 10, of a run that has read one corpus."""
    record = {"first_corpus_sha256": corpus_sha256, "read_corpora": (), "weights_only": False, **changes}
    return SavedRun(folder=FOLDER, settings=settings, iteration=10, corpus_sha256=corpus_sha256, **record)


def start(now: Settings, *, read: tuple[tuple[str, int], ...], last: str, hashes: tuple[str, ...]) -> None:
    """Continue a run that has read corpora, the last of them `last`. `hashes` are those of the new phases.

    Without a `last` corpus, the run is the output of a conversion or an average.
    """
    run = saved_run(
        data_of("A") if last else Settings(),
        last,
        read_corpora=[ReadCorpus(*each, split="99,1") for each in read],
        weights_only=not last,
    )
    corpora = [{name[0]: f"prefix {name}"} for name in hashes]
    refuse_unfit_checkpoint(run, now, hashes, corpora, has_new_data=True)


TO_B = (PhaseChange(after_iters=20, data_path=("B",)),)
REPEATED = {
    "another selection under another path": (data_of("/abs/A:min=10"), (("a", 0),), "a", ("a:min=10",), 1),
    "a corpus of an earlier phase": (data_of("A"), (("a", 0), ("b", 1)), "b", ("a",), 2),
    "an average, which has no position": (data_of("A"), (("a", 0),), "", ("a",), 1),
    "a corpus of the run before the last": (data_of("A"), (("a", 0), ("a", 1)), "a", ("a:min=10",), 2),
    "a corpus of a later phase": (data_of("C", phases=TO_B), (("a", 0), ("b", 1)), "a", ("c", "b"), 2),
}


@pytest.mark.parametrize("case", REPEATED)
def test_batches_that_a_run_or_a_run_before_it_has_read_are_not_read_again(case):
    now, read, last, hashes, seed = REPEATED[case]
    with pytest.raises(ConfigError, match=f"would repeat the batches of prefix .*; add --seed {seed}"):
        start(now, read=read, last=last, hashes=hashes)
    start(now.with_section("training", seed=seed), read=read, last=last, hashes=hashes)
    start(now, read=(("other", 0),), last=last, hashes=hashes)


def test_run_that_continues_at_the_position_of_the_other_run_repeats_nothing():
    start(data_of("/abs/A"), read=(("a", 0),), last="a", hashes=("a",))


def test_resuming_in_a_later_phase_keeps_settings_and_documents_of_the_first_phase():
    """Validation uses them in all phases."""
    before = data_of("A", phases=(PhaseChange(after_iters=6, data_path=("B",), seq_length=1024),))
    saved = saved_run(before, "b", first_corpus_sha256="a")

    def resume(now: Settings, identity: str) -> None:
        refuse_unfit_checkpoint(saved, now, [identity, "b"], [{"a": "A"}, {"b": "B"}], has_new_data=False)

    resume(before, "a")
    with pytest.raises(CheckpointError, match="--seq-length was 1024 and is now 32"):
        resume(before.with_section("data", seq_length=32), "a")
    message = "was trained on the corpus with sha256 a, but --data-path A has a:max=500"
    with pytest.raises(CheckpointError, match=message):
        resume(before, "a:max=500")


def warnings_of(now: Settings, *, split: str = "99,1", train_iters: int = 100) -> str:
    """Return the warnings of a run on corpus a that starts from iteration 10 of a run on corpus a."""
    before = rates(train_iters=train_iters)
    saved = saved_run(before, "a", read_corpora=(ReadCorpus("a", 0, split),))
    return " ".join(continue_warnings(saved, now, {"a": "A"}))


def rates(*, train_iters: int) -> Settings:
    rates = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 5}
    return Settings().with_section("optimizer", **rates).with_section("training", train_iters=train_iters)


def test_decay_that_began_before_the_start_of_a_branch_is_a_warning():
    assert "the decay of --lr-wsd-decay-iters begins after iteration 7" in warnings_of(rates(train_iters=12))
    assert "raise --train-iters by 3" in warnings_of(rates(train_iters=12))
    assert not warnings_of(rates(train_iters=15)), "it begins with this branch"
    assert not warnings_of(rates(train_iters=12), train_iters=12), "the run before it had begun the same decay"


def test_validation_on_documents_that_may_have_been_trained_on_is_a_warning():
    now = rates(train_iters=100)
    sentence = "--split 99,1 validates on documents of A that may have been trained on, with --split 100; use"
    assert sentence in warnings_of(now, split="100")
    for other in (
        now.with_section("data", valid_data_path=("V",)),
        now.with_section("training", eval_iters=0),
    ):
        assert not warnings_of(other, split="100")
    assert not warnings_of(now, split="99,1")
