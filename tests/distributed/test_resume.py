"""A run that stops and goes on is the run that never stopped."""

import contextlib
import functools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from processes import run_command
from ranks import quick_only, read_metrics, train_on_ranks
from security.hostile import seal
from test_layouts import CP2, DP2_OVERLAP, PP2, TP2, largest_relative_gap
from tests_tiny import ITERATIONS
from tolerances import LAYOUT_LOSS
from training_command import SCRIPT, flags_of
from unit.data.small_corpus import write_corpus

from megatron_neobert.checkpoint.folder import check_folders, list_checkpoints
from megatron_neobert.config.schema import CheckpointConfig
from megatron_neobert.data.batches.inputs import open_inputs
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.preprocessing.plan import PreprocessSettings, plan_preprocessing
from megatron_neobert.data.preprocessing.run import preprocess
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.errors import MissingInputError, OutputError
from megatron_neobert.runtime import megatron_patches
from megatron_neobert.training import loop

STOP = ITERATIONS // 2
FOUR_LAYERS = {"num_layers": 4}  # an interleaved pipeline of two ranks needs that many
CASES = {
    "one rank": (1, {}, {}),
    "one rank, bfloat16": (1, {}, {"bf16": True}),
    "one rank, whole optimizer": (1, {"use_distributed_optimizer": False}, {}),
    "two ranks, several buckets": (2, DP2_OVERLAP, {}),
    "tensor parallel 2": (2, TP2, {}),
    "tensor 2 x pipeline 2, bfloat16": (4, {**TP2, **PP2}, {"bf16": True}),
    "pipeline 2": (2, PP2, {}),
    "context parallel 2": (2, CP2, {}),
}
# 72 is no multiple of 128, so every bucket ends in padding, which is what the defect of megatron.core needs.
PADDED_BUCKETS = {"model": {"hidden_size": 72}, "parallel": DP2_OVERLAP}


def stop_and_resume(settings, *, world_size: int, training: dict, **sections: dict) -> Path:
    stop = {**training, "exit_interval": STOP}
    for _ in range(2):  # the same command twice: the first stops at STOP, the second goes on
        run = settings("stopped", training=stop, **sections)
        run = run.with_section("checkpoint", load=run.checkpoint.save)
        train_on_ranks(run, world_size=world_size)
    return Path(run.checkpoint.save)


@pytest.mark.parametrize(
    "case",
    quick_only(
        CASES,
        "one rank, bfloat16",
        "one rank, whole optimizer",
        "two ranks, several buckets",
        "tensor parallel 2",
    ),
)
def test_losses_after_resume_equal_the_uninterrupted_run_bit_for_bit(settings, case):
    world_size, parallel, training = CASES[case]
    uninterrupted = settings("uninterrupted", model=FOUR_LAYERS, parallel=parallel, training=training)
    train_on_ranks(uninterrupted, world_size=world_size)
    save = stop_and_resume(settings, world_size=world_size, parallel=parallel, training=training, model=FOUR_LAYERS)
    for key in ("loss", "grad_norm", "consumed_tokens", "validation_loss"):
        assert read_metrics(save, key) == read_metrics(uninterrupted.checkpoint.save, key), key


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_initial_weights_are_a_checkpoint_from_which_the_same_run_begins(settings, optimizer):
    sections = {"optimizer": {"optimizer": optimizer}, "parallel": {"use_distributed_optimizer": optimizer == "adamw"}}
    run = settings("run", **sections).with_section("checkpoint", save_initial=True)
    train_on_ranks(run, world_size=2)
    trained, initial = list_checkpoints(Path(run.checkpoint.save))
    assert (trained.name, initial.name) == (f"iter_{ITERATIONS:07}", "iter_0000000")
    again = settings("again", **sections)
    again = again.with_section("checkpoint", load=again.checkpoint.save)
    shutil.copytree(initial, Path(again.checkpoint.save) / initial.name)
    train_on_ranks(again, world_size=2)
    assert read_metrics(again.checkpoint.save) == read_metrics(run.checkpoint.save)


def test_initial_weights_are_published_though_the_run_is_stopped_while_they_are_written(settings):
    run = settings("run").with_section("checkpoint", save_initial=True, async_save=True)
    stop = functools.partial(setattr, loop, "reason_to_stop", lambda *args, **kwargs: "somebody asked for it")
    train_on_ranks(run, prepare=stop)
    assert [folder.name for folder in list_checkpoints(Path(run.checkpoint.save))] == ["iter_0000000"]


@pytest.mark.slow
def test_padded_buckets_resume_exactly_only_with_the_fix_for_megatron(settings):
    uninterrupted = settings("uninterrupted", **PADDED_BUCKETS)
    train_on_ranks(uninterrupted, world_size=2)
    expected = read_metrics(uninterrupted.checkpoint.save)

    save = stop_and_resume(settings, world_size=2, training={}, **PADDED_BUCKETS)
    assert read_metrics(save) == expected

    shutil.rmtree(save)
    run = settings("stopped", training={"exit_interval": STOP}, **PADDED_BUCKETS)
    run = run.with_section("checkpoint", load=run.checkpoint.save)
    for _ in range(2):
        train_on_ranks(run, world_size=2, prepare=leave_bucket_offsets_alone)
    assert read_metrics(run.checkpoint.save)[ITERATIONS] != expected[ITERATIONS], "the defect is gone; so may the fix"


def leave_bucket_offsets_alone() -> None:
    """The control: in this process, buffers keep the offsets that count padding."""
    megatron_patches._offsets_without_padding = lambda buffer: contextlib.nullcontext()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, {}), (1, {})),
        pytest.param((2, TP2), (1, {}), marks=pytest.mark.slow),
        pytest.param((1, {}), (2, TP2), marks=pytest.mark.slow),
        ((2, PP2), (2, TP2)),
        pytest.param((4, {**TP2, **PP2}), (2, CP2), marks=pytest.mark.slow),
        pytest.param((1, {}), (4, {**PP2, **DP2_OVERLAP}), marks=pytest.mark.slow),
    ],
    ids=[
        "data parallel 2 to 1",
        "tensor parallel 2 to 1",
        "1 to tensor parallel 2",
        "pipeline to tensor parallel",
        "tensor x pipeline to context parallel",
        "1 to pipeline x data 2, overlapped",
    ],
)
def test_a_checkpoint_goes_on_in_another_layout(settings, before, after):
    uninterrupted = settings("uninterrupted", model=FOUR_LAYERS)
    train_on_ranks(uninterrupted)
    for world_size, parallel in (before, after):
        run = settings("moved", model=FOUR_LAYERS, parallel=parallel, training={"exit_interval": STOP})
        run = run.with_section("checkpoint", load=run.checkpoint.save)
        train_on_ranks(run, world_size=world_size)
    for key in ("cursor", "consumed_tokens"):
        assert read_metrics(run.checkpoint.save, key) == read_metrics(uninterrupted.checkpoint.save, key), key
    gap = largest_relative_gap(read_metrics(uninterrupted.checkpoint.save), read_metrics(run.checkpoint.save))
    assert gap <= LAYOUT_LOSS.gate


def test_other_data_settings_are_taken_if_each_of_them_is_allowed_by_name_and_are_logged(settings, capfd):
    first = settings("run", training={"exit_interval": 1})
    train_on_ranks(first)
    changed = settings("run", data={"mask_prob": 0.3}, training={"seed": 1, "exit_interval": 2})
    changed = changed.with_section("checkpoint", load=first.checkpoint.save, allow_changed=("seed", "mask_prob"))
    train_on_ranks(changed)
    said = capfd.readouterr().out
    assert f"from {first.checkpoint.save}/iter_0000001" in said
    assert "--mask-prob was 0.2 and is now 0.3" in said and "--seed was 0 and is now 1" in said
    assert max(read_metrics(first.checkpoint.save)) == 2


def test_a_resumed_run_uses_the_rates_of_its_own_settings(settings):
    first = settings("run", training={"exit_interval": STOP})
    train_on_ranks(first)
    slower = settings("run", optimizer={"lr": 1e-5, "min_lr": 1e-6}).with_section(
        "checkpoint", load=first.checkpoint.save
    )
    train_on_ranks(slower)
    rates = read_metrics(first.checkpoint.save, "lr")
    assert rates[STOP] > 1e-4 > 1e-5 >= rates[STOP + 1]


def test_a_validation_due_where_the_run_stops_is_not_lost(settings):
    due = {"eval_interval": STOP}
    uninterrupted = settings("uninterrupted", training=due)
    train_on_ranks(uninterrupted)
    save = stop_and_resume(settings, world_size=1, parallel={}, training=due)
    expected = read_metrics(uninterrupted.checkpoint.save, "validation_loss")
    assert list(expected) == [STOP, ITERATIONS]
    assert read_metrics(save, "validation_loss") == expected


def test_nothing_is_left_to_do_after_the_last_iteration(settings, capfd):
    run = settings("run", training={"train_iters": 2})
    run = run.with_section("checkpoint", load=run.checkpoint.save)
    for _ in range(2):
        train_on_ranks(run)
    assert "nothing to do: iteration 2 of 2 is saved already" in capfd.readouterr().out


@pytest.mark.slow
def test_a_run_crosses_epochs_and_resumes_exactly_in_bfloat16_on_two_ranks(settings):
    half = {"split": "1,1"}  # of the documents: an epoch ends within these iterations, as the cursors show
    long = {"bf16": True, "train_iters": 24, "exit_interval": None}
    uninterrupted = settings("uninterrupted", parallel=DP2_OVERLAP, data=half, training=long)
    train_on_ranks(uninterrupted, world_size=2)
    for _ in range(2):
        run = settings("stopped", parallel=DP2_OVERLAP, data=half, training={**long, "exit_interval": 20})
        train_on_ranks(run.with_section("checkpoint", load=run.checkpoint.save), world_size=2)
    lines = [json.loads(line) for line in (Path(run.checkpoint.save) / "metrics.jsonl").open()]
    assert {line["cursor"]["epoch"] for line in lines if "cursor" in line} == {0, 1}
    assert [line["iteration"] for line in lines if "restarted" in line] == [20]
    assert read_metrics(run.checkpoint.save) == read_metrics(uninterrupted.checkpoint.save)


DRY_RUNS = {
    "the same command": ({}, 0, ""),
    "another batch size": ({"training": {"global_batch_size": 4}}, 78, "--global-batch-size was 8 and is now 4"),
    "other documents": ({"data": {"data_path": (":min=9",)}}, 78, "was trained on the corpus with sha256"),
    "another model": ({"save": "new", "model": {"num_layers": 1}}, 78, "--num-layers was 2 and is now 1"),
    "the old batches again": ({"save": "new", "data": {"data_path": (":min=9",)}}, 2, "would come again; add --seed 1"),
    "nothing to train": ({"save": "new", "training": {"train_iters": STOP}}, 2, f"--train-iters {STOP} is not above"),
}


@pytest.mark.parametrize("case", DRY_RUNS)
def test_dry_run_refuses_the_checkpoint_that_the_start_would_refuse(settings, tiny_corpus, case):
    changes, code, sentence = DRY_RUNS[case]
    first = settings("run", training={"exit_interval": STOP})
    train_on_ranks(first)
    data = {name: tuple(tiny_corpus.prefix + end for end in value) for name, value in changes.get("data", {}).items()}
    run = settings(**{"save": "run", **changes, "data": data})
    run = run.with_section("checkpoint", load=run.checkpoint.save)
    if "save" in changes:
        run = run.with_section("checkpoint", continue_from=first.checkpoint.save)
    ended = run_command("megatron_neobert.launch", SCRIPT, *flags_of(run), "--dry-run")
    assert ended.code == code, ended.output
    assert sentence in ended.output


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("train_state.json", '"corpus_sha256": "', '"corpus_sha256": "0'),
        ("settings.yaml", "num_layers: 2", "num_layers: 3"),
        ("tokenizer/tokenizer.json", "{", "["),
    ],
)
def test_damaged_newest_checkpoint_is_left_to_loading_which_takes_an_older_one(settings, name, before, after):
    run = settings("run", training={"exit_interval": 2}).with_section("checkpoint", save_interval=1)
    train_on_ranks(run)
    newest = list_checkpoints(Path(run.checkpoint.save))[0] / name
    assert before in newest.read_text()
    newest.write_text(newest.read_text().replace(before, after))
    run = run.with_section("checkpoint", load=run.checkpoint.save)
    ended = run_command("megatron_neobert.launch", SCRIPT, *flags_of(run), "--dry-run")
    assert ended.code == 0, ended.output


def test_corpus_whose_documents_were_cut_anew_is_another_corpus(settings, tiny_corpus, tmp_path):
    """Its token ids, and so its .bin, are the same."""
    tokenizer = load_tokenizer(tiny_corpus.tokenizer)
    corpus = Corpus(tiny_corpus.prefix)
    tokens = np.concatenate([corpus.document(number) for number in range(len(corpus))])
    manifests = {
        name: write_corpus(tmp_path / name, np.array_split(tokens, count), tokenizer)
        for name, count in (("before", 500), ("after", 400))
    }
    assert manifests["before"].sha256 == manifests["after"].sha256
    before, after = (
        settings("run", data={"data_path": (str(tmp_path / name),)}, training={"exit_interval": 1})
        for name in manifests
    )
    train_on_ranks(before)
    after = after.with_section("checkpoint", load=after.checkpoint.save)
    with pytest.raises(Exception, match="was trained on the corpus with sha256"):
        train_on_ranks(after)


def test_checkpoint_of_a_version_that_did_not_hash_the_boundaries_of_documents_resumes_with_a_line(
    settings, tiny_corpus, capfd
):
    run = settings("run", training={"exit_interval": 1})
    train_on_ranks(run)
    (folder,) = list_checkpoints(Path(run.checkpoint.save))
    state = json.loads((folder / "train_state.json").read_text())
    now, earlier = open_inputs(run.data).identities
    assert state["progress"]["corpus_sha256"] == now != earlier
    state["progress"]["corpus_sha256"] = earlier
    (folder / "train_state.json").write_text(json.dumps(state))
    seal(folder)
    train_on_ranks(run.with_section("checkpoint", load=run.checkpoint.save))
    assert f"{folder} does not say where its documents begin" in capfd.readouterr().out
    newest = list_checkpoints(Path(run.checkpoint.save))[0]
    assert json.loads((newest / "train_state.json").read_text())["progress"]["corpus_sha256"] == now


def test_a_run_continues_from_the_checkpoint_that_is_named(settings, capfd):
    first = settings("first", training={"exit_interval": 2}).with_section("checkpoint", save_interval=1)
    train_on_ranks(first)
    for source, iterations in (("iter_0000001", [2, 3]), ("", [3])):
        second = settings(f"second{source}", training={"train_iters": 3, "eval_interval": 3})
        named = str(Path(first.checkpoint.save) / source)
        train_on_ranks(second.with_section("checkpoint", load=second.checkpoint.save, continue_from=named))
        assert list(read_metrics(second.checkpoint.save)) == iterations
    assert "has held a later checkpoint" not in capfd.readouterr().out


@pytest.mark.slow
def test_a_run_that_branches_off_does_not_write_over_its_own_progress(settings):
    first = settings("first", training={"exit_interval": STOP})
    train_on_ranks(first)
    branch = settings("branch", training={"exit_interval": STOP}).with_section("checkpoint", load=first.checkpoint.save)
    check_folders(branch.checkpoint)
    train_on_ranks(branch.with_section("training", exit_interval=STOP + 1))
    with pytest.raises(OutputError, match="already holds checkpoints"):
        check_folders(branch.checkpoint)


def test_a_run_continues_from_another_with_new_data_and_its_own_iteration_and_rate(settings):
    """Weights, optimizer state and schedule continue; another seed has an order of its own, and its start."""
    first = settings("first", training={"exit_interval": STOP})
    train_on_ranks(first)
    second = settings(
        "second", data={"seq_length": 64}, training={"micro_batch_size": 4, "seed": 1, "exit_interval": STOP + 1}
    )
    second = second.with_section("checkpoint", load=second.checkpoint.save, continue_from=first.checkpoint.save)
    for _ in range(2):  # the same command again goes on from its own checkpoint
        train_on_ranks(second)
    lines = [json.loads(line) for line in (Path(second.checkpoint.save) / "metrics.jsonl").open()]
    trained = [line for line in lines if "loss" in line]
    assert [line["iteration"] for line in trained] == list(range(STOP + 1, ITERATIONS + 1))
    assert trained[0]["cursor"] == {"epoch": 0, "window": 0, "row": 8}
    assert trained[1]["cursor"] == {"epoch": 0, "window": 0, "row": 16}
    whole = settings("whole")
    train_on_ranks(whole)
    rates, losses = read_metrics(whole.checkpoint.save, "lr"), read_metrics(whole.checkpoint.save)
    assert [line["lr"] for line in trained] == [rates[line["iteration"]] for line in trained]
    assert abs(trained[0]["loss"] - losses[STOP + 1]) < abs(trained[0]["loss"] - losses[1]), "weights were not taken"


def test_continuing_with_another_tokenizer_is_refused_even_if_it_has_the_same_number_of_ids(
    settings, tiny_corpus, tmp_path
):
    """The same ids would mean other words, and no shape would show it."""
    first = settings("first", training={"exit_interval": 1})
    train_on_ranks(first)
    vocabulary = json.loads((Path(tiny_corpus.tokenizer) / "tokenizer.json").read_text())["model"]["vocab"]
    words = sorted(vocabulary, key=vocabulary.get)
    words[-1], words[-2] = words[-2], words[-1]
    other = corpus_with(words, tmp_path)
    second = settings("second", data={"data_path": (other.prefix,), "tokenizer_model": other.tokenizer, "split": "1"})
    second = second.with_section("checkpoint", load=second.checkpoint.save, continue_from=first.checkpoint.save)
    with pytest.raises(Exception, match=rf"was trained with tokenizer .* \({len(words)} ids\)"):
        train_on_ranks(second)


def corpus_with(words: list[str], folder: Path) -> SimpleNamespace:
    """A corpus of one document, written with a vocabulary."""
    vocabulary, shard = folder / "vocab.txt", folder / "shard.jsonl"
    vocabulary.write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    shard.write_text(json.dumps({"content": " ".join(words[10:60])}) + "\n", encoding="utf-8")
    preprocessing = PreprocessSettings(
        inputs=(str(shard),), output_prefix=str(folder / "other"), tokenizer_model=str(vocabulary)
    )
    preprocess(plan_preprocessing(preprocessing))
    return SimpleNamespace(prefix=str(folder / "other_content_document"), tokenizer=str(vocabulary))


@pytest.mark.slow
def test_the_run_that_was_continued_may_be_gone_once_its_successor_has_a_checkpoint(settings):
    first = settings("first", training={"exit_interval": 1})
    train_on_ranks(first)
    second = settings("second", training={"exit_interval": 2})
    second = second.with_section("checkpoint", load=second.checkpoint.save, continue_from=first.checkpoint.save)
    train_on_ranks(second)
    shutil.rmtree(first.checkpoint.save)
    train_on_ranks(second)
    assert max(read_metrics(second.checkpoint.save)) == 4


def test_continuing_from_a_folder_without_checkpoints_is_refused(tmp_path):
    with pytest.raises(MissingInputError, match=r"--continue-from .*nothing holds no checkpoint"):
        check_folders(CheckpointConfig(save=str(tmp_path / "run"), continue_from=str(tmp_path / "nothing")))
