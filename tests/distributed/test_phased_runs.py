"""Runs with phases, and decays that branch off a run, equal the runs that they replace bit for bit."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import quick_only, read_metrics, train_on_ranks
from test_layouts import DP2_OVERLAP, PP2

from megatron_neobert.checkpoint.train_state import read_train_state
from megatron_neobert.config.schema import PhaseChange, Settings

RECORDED = ("loss", "grad_norm", "lr", "consumed_tokens", "fill", "cursor", "validation_loss")
SHORT_SEQUENCES = {"seq_length": 32}


def phases_of(corpus: Any) -> tuple[PhaseChange, ...]:
    """Return phases that change the objective, masking, batch size, sequence length and corpora."""
    blend = ("1", corpus.prefix, "3", f"{corpus.prefix}:min=20")
    return (
        PhaseChange(after_iters=2, objective="mlm", mask_prob=0.1, mask_replacement="bert", global_batch_size=16),
        PhaseChange(after_iters=3, seq_length=128, micro_batch_size=1, global_batch_size=4),
        PhaseChange(after_iters=5, data_path=blend),
    )


@pytest.fixture
def phased(settings: Callable[..., Settings], tiny_corpus: Any) -> Callable[..., Settings]:
    def build(save: str, **training: Any) -> Settings:
        parallel = training.pop("parallel", {})
        training = {"phases": phases_of(tiny_corpus), "eval_interval": 2, **training}
        data = {**SHORT_SEQUENCES, "num_workers": 1, "objective": "clm"}
        return settings(save, data=data, training=training, parallel=parallel)

    return build


CASES = {"one rank": (1, {}), "two ranks, several buckets": (2, DP2_OVERLAP), "pipeline 2": (2, PP2)}


@pytest.mark.parametrize("case", quick_only(CASES, "two ranks, several buckets"))
def test_run_resumes_bit_for_bit_within_phases_and_at_their_ends(phased, case, capfd):
    world_size, parallel = CASES[case]
    whole = phased("whole", parallel=parallel)
    train_on_ranks(whole, world_size=world_size)
    assert "a phase begins with iteration 4: --seq-length 128 --micro-batch-size 1" in capfd.readouterr().out
    stopping = phased("stopping", parallel=parallel, exit_interval=1)
    for _ in range(6):
        train_on_ranks(stopping, world_size=world_size)
    for key in RECORDED:
        assert read_metrics(str(whole.checkpoint.save), key) == read_metrics(str(stopping.checkpoint.save), key), key
    last = read_train_state(Path(str(stopping.checkpoint.save)) / "iter_0000006")
    assert last.state.consumed_samples == 2 * 8 + 1 * 16 + 3 * 4
    first, second = last.state.read_corpora
    assert (first.seed, second) == (0, first._replace(seed=1)), "the corpus is read again, with another seed"


def test_interval_of_the_log_ends_with_a_phase(settings):
    """Its loss is the mean of one objective: that of a run which logs each iteration."""
    phase = PhaseChange(after_iters=2, objective="mlm")
    losses = {}
    for name, interval in (("each", 1), ("all", 100)):
        run = settings(name, data={"objective": "clm"}, training={"phases": (phase,)})
        train_on_ranks(run.with_section("logging", log_interval=interval).with_section("checkpoint", save_interval=100))
        losses[name] = read_metrics(str(run.checkpoint.save))
    assert list(losses["all"]) == [2, 6]
    assert losses["all"][2] == pytest.approx((losses["each"][1] + losses["each"][2]) / 2, rel=1e-2)


def test_run_with_two_phases_equals_two_runs_with_continue_from(settings, tiny_corpus, capfd):
    """Like the stages of the paper: the second has longer sequences and another blend."""
    blend = ("1", tiny_corpus.prefix, "1", f"{tiny_corpus.prefix}:min=20")
    later = {"seq_length": 128, "data_path": blend}
    phase = PhaseChange(after_iters=3, global_batch_size=4, **later)
    both = settings("both", data=SHORT_SEQUENCES, training={"phases": (phase,)})
    train_on_ranks(both)

    first = settings("first", data=SHORT_SEQUENCES, training={"exit_interval": 3})
    train_on_ranks(first)
    losses = {}
    for seed in (1, 2):
        second = settings(f"seed {seed}", data=later, training={"global_batch_size": 4, "seed": seed})
        second = second.with_section("checkpoint", continue_from=first.checkpoint.save)
        train_on_ranks(second)
        losses[seed] = read_metrics(str(first.checkpoint.save)) | read_metrics(str(second.checkpoint.save))
    assert losses[1] == read_metrics(str(both.checkpoint.save))
    assert losses[2] != losses[1], "other data must give other losses"
    capfd.readouterr()
    third = settings("third", data=later, training={"global_batch_size": 4, "seed": 1, "train_iters": 7})
    train_on_ranks(third.with_section("checkpoint", continue_from=both.checkpoint.save))
    changed = re.findall("changed since .*: (--.*)", capfd.readouterr().out)
    assert changed == ["--train-iters was 6 and is now 7"], "the settings of the last phase are the same"


def test_phase_can_be_added_to_a_run_but_not_change_its_past(settings, capfd):
    first = settings("run", training={"exit_interval": 2})
    train_on_ranks(first)
    added = settings("run", training={"phases": (PhaseChange(after_iters=3, mask_prob=0.1),), "exit_interval": 4})
    train_on_ranks(added)
    assert "--phases was () and is now ({after_iters: 3, mask_prob: 0.1},)" in capfd.readouterr().out
    edited = settings("run", training={"phases": (PhaseChange(after_iters=2, mask_prob=0.1),)})
    with pytest.raises(Exception, match="a phase before iteration 4 has changed"):
        train_on_ranks(edited)


def test_decay_that_branches_off_equals_a_planned_decay_bit_for_bit(settings, capfd):
    """The branch continues in the data, and resumes within its decay."""

    def decaying(save: str, *, train_iters: int, **training: Any) -> Settings:
        rates = {"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear", "lr_wsd_decay_iters": 3}
        return settings(save, optimizer=rates, training={"train_iters": train_iters, **training})

    stable, planned = decaying("stable", train_iters=100, exit_interval=3), decaying("planned", train_iters=6)
    train_on_ranks(stable)
    train_on_ranks(planned)
    branch = decaying("branch", train_iters=6, exit_interval=5)
    branch = branch.with_section("checkpoint", continue_from=stable.checkpoint.save)
    for _ in range(2):
        train_on_ranks(branch)
    output = capfd.readouterr().out
    assert "rate is 2.00e-03 from here, the data continue in epoch 0, window 0, after 24 packed sequences" in output
    for key in set(RECORDED) - {"validation_loss"}:
        whole = read_metrics(str(stable.checkpoint.save), key) | read_metrics(str(branch.checkpoint.save), key)
        assert whole == read_metrics(str(planned.checkpoint.save), key), key
    rates = read_metrics(str(planned.checkpoint.save), "lr")
    assert [rates[k] for k in (4, 5)] == pytest.approx([2e-3, 2e-3 - (2e-3 - 2e-4) / 3])
