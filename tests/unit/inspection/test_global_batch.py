"""A rebuilt batch equals the batch of training and is shown as text; checkpoint and settings of its iteration."""

import re
from dataclasses import asdict, replace

import numpy as np
import pytest
from commands import call
from unit.inspection.small_runs import LENGTHS, RED, REVERSED, settings_of, write_checkpoint, write_corpora

from megatron_neobert.config.cli import write_record
from megatron_neobert.config.schema import CheckpointConfig, LoggingConfig, PhaseChange
from megatron_neobert.data.batches.windows import IGNORED_LABEL
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.errors import CheckpointError, ConfigError, MissingInputError
from megatron_neobert.inspection.batch_text import describe, read_sequences, token_kinds
from megatron_neobert.inspection.global_batch import (
    checkpoint_before,
    override_settings,
    rebuild_batch,
    settings_of_iteration,
    without_outputs,
)

CLS, SEP, MASK = 2, 3, 4  # indices in small_corpus.SPECIAL


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """A folder with vocab.txt and the corpora P and Q."""
    return write_corpora(tmp_path_factory.mktemp("inspection"))


def contents(settings, iteration, checkpoint=None):
    batch = rebuild_batch(settings, iteration, checkpoint=checkpoint)
    return [[segment.input_ids_s.tolist() for segment in sequence.segments] for sequence in read_sequences(batch)]


def write_fourth_checkpoint(save, settings):
    """Write the checkpoint of iteration 4 of a run, and return its cursor."""
    cursor = asdict(rebuild_batch(settings, 5, checkpoint=None).cursor)
    write_checkpoint(save, settings, iteration=4, cursor=cursor)
    return cursor


@pytest.mark.parametrize("layout", ["packed", "concatenated"])
def test_segments_with_their_labels_put_back_are_the_documents(corpora, layout):
    settings = settings_of(corpora, batch_layout=layout, mask_replacement="bert")
    corpus = Corpus(corpora / "P")
    kinds = set()
    for sequence in read_sequences(rebuild_batch(settings, 3, checkpoint=None)):
        assert sequence.tokens <= 64
        for segment in sequence.segments:
            original = np.where(segment.labels_s == IGNORED_LABEL, segment.input_ids_s, segment.labels_s)
            stop = segment.first_token + segment.text_tokens
            expected = corpus.document(segment.document)[segment.first_token : stop].tolist()
            head = [CLS] * bool(original[0] == CLS)
            tail = [SEP] * (len(original) - len(head) - segment.text_tokens)
            assert original.tolist() == head + expected + tail and len(head) == (segment.first_token == 0)
            assert segment.document_tokens == LENGTHS[segment.document]
            for input_id, label in zip(segment.input_ids_s.tolist(), segment.labels_s.tolist(), strict=True):
                if label != IGNORED_LABEL:
                    kinds.add("masked" if input_id == MASK else "unchanged" if input_id == label else "replaced")
    assert kinds == {"masked", "unchanged", "replaced"}


def test_a_checkpoint_of_other_documents_is_refused(corpora, tmp_path):
    folder = write_checkpoint(tmp_path, settings_of(corpora), iteration=1, cursor={"epoch": 0, "window": 0, "row": 8})
    with pytest.raises(CheckpointError, match=r"was trained on the corpus with sha256 .{12}, --data-path names"):
        rebuild_batch(settings_of(corpora, data_path=(str(corpora / "Q"),)), 3, checkpoint=folder)


def test_a_run_with_continue_from_continues_in_the_same_data_and_begins_changed_data(corpora, tmp_path):
    settings = settings_of(corpora)
    write_fourth_checkpoint(tmp_path, settings)
    second = replace(settings, checkpoint=CheckpointConfig(continue_from=str(tmp_path)))
    assert contents(second, 6) == contents(settings, 6)
    new_order, new_run = (run.with_section("training", seed=1) for run in (second, settings))
    assert contents(new_order, 6) == contents(new_run, 6 - 4)
    with pytest.raises(ConfigError, match="--iteration 4 is before this run, whose first is 5"):
        rebuild_batch(second, 4, checkpoint=None)


def test_a_batch_of_a_phase_has_the_settings_of_the_phase(corpora):
    settings = settings_of(corpora)
    phased = settings.with_section("training", phases=(PhaseChange(after_iters=2, seq_length=128, mask_prob=0.1),))
    batch = rebuild_batch(phased, 4, checkpoint=None)
    assert (batch.settings.data.seq_length, batch.settings.data.mask_prob) == (128, 0.1)
    assert len(batch.micro_batches[0].batch.tokens_t) == 2 * 128
    assert contents(phased, 2) == contents(settings, 2)


def test_statistics_are_those_of_the_segments(corpora):
    blend = ("3", str(corpora / "P"), "1", str(corpora / "Q"))
    batch = rebuild_batch(settings_of(corpora, mask_replacement="bert", data_path=blend), 2, checkpoint=None)
    segments, lines = [each for sequence in read_sequences(batch) for each in sequence.segments], describe(batch)
    inputs = np.concatenate([segment.input_ids_s for segment in segments])
    labels = np.concatenate([segment.labels_s for segment in segments])
    assert lines["sequences"].startswith("8 of 64 tokens, in 4 micro-batches")
    assert f"{len(inputs):,} tokens, {8 * 64 - len(inputs):,} unused" in lines["packing"]
    predicted, ordinary = int((labels != IGNORED_LABEL).sum()), sum(segment.text_tokens for segment in segments)
    assert lines["predicted"].startswith(f"{predicted:,} tokens, ") and f" of the {ordinary:,} to" in lines["predicted"]
    hidden, unchanged = int(((labels != IGNORED_LABEL) & (inputs == MASK)).sum()), int((labels == inputs).sum())
    assert f": {hidden:,} hidden, " in lines["predicted"]
    assert lines["predicted"].endswith(f"{unchanged:,} left as they are")
    cut = [segment.first_token + segment.text_tokens < segment.document_tokens for segment in segments]
    assert 0 < sum(cut) < len(cut) and f"; {sum(cut):,} of them do not reach the end" in lines["segments"]


# --- checkpoint and settings of an iteration


def test_the_checkpoint_is_the_newest_before_the_iteration(corpora, tmp_path):
    with pytest.raises(MissingInputError, match="holds no checkpoint"):
        checkpoint_before(tmp_path, 1)
    folders = {at: write_checkpoint(tmp_path, settings_of(corpora), iteration=at, cursor={}) for at in (10, 20, 30)}
    expected = {10: None, 11: folders[10], 20: folders[10], 21: folders[20], 31: folders[30]}
    assert {iteration: checkpoint_before(tmp_path, iteration) for iteration in expected} == expected


def test_an_iteration_before_the_first_checkpoint_of_a_continued_run_is_refused(corpora, tmp_path):
    settings = settings_of(corpora).with_section("checkpoint", continue_from="elsewhere")
    write_checkpoint(tmp_path, settings, iteration=10, cursor={})
    with pytest.raises(MissingInputError, match="no checkpoint before iteration 10, and its data did not begin"):
        checkpoint_before(tmp_path, 10)


def test_settings_are_those_of_the_first_checkpoint_after_the_iteration(corpora, tmp_path):
    for at in (10, 20, 30):
        settings = settings_of(corpora).with_section("training", seed=at)
        write_checkpoint(tmp_path, settings, iteration=at, cursor={})
    assert [settings_of_iteration(tmp_path, at).training.seed for at in (1, 10, 11, 30, 31)] == [10, 10, 20, 30, 30]


def test_flags_replace_settings_and_outputs_are_removed(corpora, tmp_path):
    settings = settings_of(corpora)
    saved = settings.with_section("training", exit_interval=5)
    saved = replace(saved, checkpoint=CheckpointConfig(save=str(tmp_path)), logging=LoggingConfig(log_interval=7))
    assert without_outputs(saved) == settings
    assert override_settings(settings, ["--seed", "3"]) == settings.with_section("training", seed=3)
    for config in (["--config", "tiny"], ["--config=tiny"]):
        with pytest.raises(ConfigError, match="--config would replace all settings of the run"):
            override_settings(settings, ["--seed", "3", *config])


# --- a batch as text: predicted tokens are marked, and control characters are escaped


def test_brackets_mark_predicted_tokens_and_control_characters_do_not_reach_the_terminal(corpora, tmp_path):
    settings = settings_of(corpora, mask_replacement="bert")
    write_record(settings, tmp_path / "settings.yaml")
    flags = ("--config", tmp_path / "settings.yaml", "--iteration", 2, "--rows", 8)
    code, printed, errors = call("inspect batch", *flags)
    assert (code, errors) == (0, "")
    batch = rebuild_batch(settings, 2, checkpoint=None)
    segments = [segment for sequence in read_sequences(batch) for segment in sequence.segments]
    kinds = [kind for each in segments for kind in token_kinds(batch.tokenizer, each.input_ids_s, each.labels_s)]
    assert printed.count("of micro-batch") == 8
    # The legend has one more of each.
    assert printed.count("[MASK->") == kinds.count("masked") + 1
    assert len(re.findall(r"\[=", printed)) == kinds.count("unchanged") + 1
    assert RED not in printed and REVERSED not in printed
    assert r"\x1b[31mred" in printed and r"\u202edesrever" in printed
