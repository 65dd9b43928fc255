"""A run that stops and goes on is the run that never stopped."""

import contextlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import run_command
from ranks import quick_only, read_metrics, train_on_ranks
from security.hostile import seal
from test_layouts import CP2, DP2_OVERLAP, PP2, TP2, largest_relative_gap
from tests_tiny import ITERATIONS
from tolerances import LAYOUT_LOSS
from training_command import SCRIPT, flags_of

from megatron_neobert.checkpoint.folder import check_folders, list_checkpoints
from megatron_neobert.config.schema import CheckpointConfig
from megatron_neobert.data.batches.inputs import open_inputs
from megatron_neobert.data.preprocessing.plan import PreprocessSettings, plan_preprocessing
from megatron_neobert.data.preprocessing.run import preprocess
from megatron_neobert.errors import MissingInputError
from megatron_neobert.runtime import megatron_patches

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


def test_continuing_from_a_folder_without_checkpoints_is_refused(tmp_path):
    with pytest.raises(MissingInputError, match=r"--continue-from .*nothing holds no checkpoint"):
        check_folders(CheckpointConfig(save=str(tmp_path / "run"), continue_from=str(tmp_path / "nothing")))
