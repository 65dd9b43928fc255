"""A run that stops and resumes equals an uninterrupted run. Resuming and continuing other runs."""

import json
import shutil
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from processes import run_command, run_on_ranks
from ranks import SCRIPT, flags_of, load_and_save, quick_only, read_metrics, train_on_ranks
from reliability.states import assert_same_state
from safetensors.torch import load_file
from security.hostile import seal
from test_layouts import CP2, DP2_OVERLAP, PP2, TP2, largest_relative_gap
from tests_tiny import ITERATIONS, tiny_settings
from tolerances import BF16_LAYOUT_LOSS, LAYOUT_LOSS
from torch.multiprocessing import ProcessRaisedException

from megatron_neobert.checkpoint.folder import list_checkpoints
from megatron_neobert.config.schema import Settings
from megatron_neobert.model import neobert
from megatron_neobert.training import loop

STOP = ITERATIONS // 2
FOUR_LAYERS = {"num_layers": 4}
BF16 = {"training": {"bf16": True}}
MUON = {"optimizer": {"optimizer": "muon"}}
CASES = {
    "one rank": (1, {}, {}),
    "one rank, bfloat16": (1, {}, BF16),
    "two ranks": (2, {}, {}),
    "two ranks, Muon": (2, {}, MUON),
    "two ranks, Muon, bfloat16": (2, {}, {**MUON, **BF16}),
    "two ranks, several buckets": (2, DP2_OVERLAP, {}),
    # 72 is not a multiple of 128, so every bucket ends with padding.
    "three ranks, padded buckets": (3, DP2_OVERLAP, {"model": {**FOUR_LAYERS, "hidden_size": 72}}),
    "tensor parallel 2": (2, TP2, {}),
    "tensor 2 x pipeline 2, bfloat16": (4, {**TP2, **PP2}, BF16),
    "pipeline 2": (2, PP2, {}),
    "context parallel 2": (2, CP2, {}),
}


def forbid_drawing() -> None:
    """Let this process fail if it draws initial weights."""

    initialize = neobert.initialize_weights

    def check(model: Any, *, seed: int | None, **options: Any) -> None:
        assert seed is None, "drew initial weights"
        initialize(model, seed=seed, **options)

    neobert.initialize_weights = check


def test_only_a_fresh_run_draws_initial_weights(settings):
    with pytest.raises(ProcessRaisedException, match="drew initial weights"):
        train_on_ranks(settings("fresh"), prepare=forbid_drawing)
    # The tests below resume with `forbid_drawing`.


@pytest.mark.parametrize(
    "case",
    quick_only(
        CASES,
        "one rank, bfloat16",
        "two ranks",
        "two ranks, Muon, bfloat16",
        "two ranks, several buckets",
        "tensor parallel 2",
    ),
)
def test_losses_after_resume_equal_the_uninterrupted_run_bit_for_bit(settings, case):
    world_size, parallel, sections = CASES[case]
    sections = {"model": FOUR_LAYERS, "parallel": parallel, **sections}
    # The validation that is due at the stop is made after resuming.
    sections["training"] = {"eval_interval": STOP, **sections.get("training", {})}
    uninterrupted = settings("uninterrupted", **sections)
    train_on_ranks(uninterrupted, world_size=world_size)
    assert list(read_metrics(uninterrupted.checkpoint.save, "validation_loss")) == [STOP, ITERATIONS]
    stopped = settings("stopped", **sections).with_section("training", exit_interval=STOP)
    for prepare in (None, forbid_drawing):  # the first start stops after STOP, and the second resumes
        train_on_ranks(stopped, world_size=world_size, prepare=prepare)
    for key in ("loss", "grad_norm", "consumed_tokens", "validation_loss"):
        assert read_metrics(stopped.checkpoint.save, key) == read_metrics(uninterrupted.checkpoint.save, key), key


# A chain of layouts that each load and save the checkpoint of the one before. With three ranks, ranges begin and end
# inside of rows; 72 is not a multiple of 128, so every bucket ends with padding.
CHAIN = {
    "data 3, overlapped": (3, DP2_OVERLAP),
    "tensor 2 x data 2": (4, TP2),
    "data 2": (2, {}),
    "pipeline 2 x context 2": (4, {**PP2, **CP2}),
}


@pytest.mark.parametrize("bf16", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["bfloat16", "float32"])
def test_every_layout_loads_and_saves_the_checkpoint_of_another_bit_for_bit(settings, bf16):
    sections = {"model": {"num_layers": 2, "hidden_size": 72}, "training": {"bf16": bf16}}
    uninterrupted, first = (settings(name, **sections) for name in ("uninterrupted", "first"))
    train_on_ranks(uninterrupted)
    train_on_ranks(first.with_section("training", exit_interval=STOP))
    folder = expected = list_checkpoints(Path(first.checkpoint.save))[0]
    for number, (world_size, parallel) in enumerate(CHAIN.values()):
        run = settings(str(number), parallel=parallel, **sections).with_section("checkpoint", load=str(folder))
        run_on_ranks(load_and_save, run, world_size=world_size)
        folder = list_checkpoints(Path(run.checkpoint.save))[0]
        writers = {path.name[:10] for path in folder.glob("rank_*")}
        assert len(writers) == world_size, "every rank writes"
        if number == 0:
            boxes = Counter(name for path in folder.glob("rank_00001*") for name in load_file(path))
            assert boxes["decoder.layers.0.mlp.linear_fc1.weight_v"] and max(boxes.values()) == 3, boxes
    assert_same_state(folder, expected)
    for name, world_size, parallel in (("one rank", 1, {}), ("tensor 2 x pipeline 2", 4, {**TP2, **PP2})):
        last = settings(name, parallel=parallel, **sections).with_section("checkpoint", load=str(folder))
        train_on_ranks(last, world_size=world_size)
        expected, metrics = (
            {key: read_metrics(run.checkpoint.save, key) for key in ("loss", "cursor", "consumed_tokens")}
            for run in (uninterrupted, last)
        )
        expected = {key: {at: values[at] for at in values if at > STOP} for key, values in expected.items()}
        tolerance = BF16_LAYOUT_LOSS if bf16 else LAYOUT_LOSS
        gap = largest_relative_gap(expected.pop("loss"), metrics.pop("loss"))
        print(f"{name}: {gap}")
        assert gap <= (0 if world_size == 1 else tolerance.gate)
        assert metrics == expected


def test_finished_run_trains_nothing_when_started_again(settings, capfd):
    run = settings("run", training={"train_iters": 2})
    for _ in range(2):
        train_on_ranks(run)
        lines = capfd.readouterr().out.splitlines()
    assert lines == ["already trained: iteration 2 of 2 is saved"]


def save_before_the_lock_is_free() -> None:
    """Let another run, which ends while this process waits for its lock, leave a checkpoint in --save."""
    claim = loop.claim

    def claim_from_another_run(save: str) -> AbstractContextManager[None]:
        (Path(save) / "iter_0000001").mkdir(parents=True)
        (Path(save) / "iter_0000001" / "MANIFEST.json").touch()
        return claim(save)

    loop.claim = claim_from_another_run


def test_checkpoints_of_a_run_that_ended_during_the_start_are_not_overwritten(settings):
    run = settings("run").with_section("checkpoint", load=None)
    with pytest.raises(ProcessRaisedException, match="already holds checkpoints of a run; add --load"):
        train_on_ranks(run, prepare=save_before_the_lock_is_free)


@pytest.fixture(scope="module")
def stopped(tiny_corpus, tmp_path_factory) -> Settings:
    """A run that stopped after STOP iterations."""
    run = tiny_settings(tiny_corpus, save=tmp_path_factory.mktemp("run"), training={"exit_interval": STOP})
    train_on_ranks(run)
    return run


@pytest.mark.parametrize(
    ("given_as", "documents", "training", "code", "message"),
    [
        ("load", "", {}, 0, ""),
        ("load", "", {"global_batch_size": 4}, 78, "--global-batch-size was 8 and is now 4"),
        ("load", ":min=9", {}, 78, "was trained on the corpus with sha256"),
        ("continue_from", ":min=9", {}, 2, "; add --seed 1"),
        ("continue_from", "", {"train_iters": STOP}, 2, f"--train-iters {STOP} is not above"),
    ],
)
def test_dry_run_refuses_a_checkpoint_like_a_real_start(
    settings, stopped, tiny_corpus, given_as, documents, training, code, message
):
    run = settings(data={"data_path": (tiny_corpus.prefix + documents,)}, training=training)
    run = run.with_section("checkpoint", **{given_as: stopped.checkpoint.save})
    ended = run_command("megatron_neobert.launch", SCRIPT, *flags_of(run), "--dry-run")
    assert ended.code == code, ended.output
    assert message in ended.output


def test_continuing_with_another_tokenizer_of_the_same_size_is_refused(settings, stopped, tmp_path):
    folder = shutil.copytree(list_checkpoints(Path(stopped.checkpoint.save))[0], tmp_path / "iter_0000003")
    path = folder / "tokenizer" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer))
    seal(folder)
    run = settings("second")
    with pytest.raises(Exception, match=rf"was trained with tokenizer .* \({len(vocabulary)} ids\)"):
        train_on_ranks(run.with_section("checkpoint", continue_from=str(folder)))
