"""A batch that is looked at is the one that is trained on: its documents, its masks, its place."""

from dataclasses import asdict, replace

import numpy as np
import pytest
from unit.inspection.batch_places import LENGTHS, settings_of, write_checkpoint

from megatron_neobert.config.schema import CheckpointConfig, PhaseChange
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.errors import CheckpointError, ConfigError
from megatron_neobert.inspection.batch_rows import NO_LABEL, describe, rows_of
from megatron_neobert.inspection.found_batch import find_batch

CLS, SEP, MASK = 2, 3, 4  # places in small_corpus.SPECIAL


def contents(found):
    return [(row.number, [piece.seen_s.tolist() for piece in row.pieces]) for row in rows_of(found)]


@pytest.mark.parametrize("layout", ["packed", "concatenated"])
def test_the_text_of_every_piece_is_its_document_once_the_labels_are_put_back(place, layout):
    found = find_batch(settings_of(place, batch_layout=layout, mask_replacement="bert"), 3, place=None)
    corpus = Corpus(place / "P")
    kinds = set()
    for row in rows_of(found):
        assert row.used_slots <= 64
        for piece in row.pieces:
            original = np.where(piece.labels_s == NO_LABEL, piece.seen_s, piece.labels_s)
            last = piece.first_token + piece.text_tokens
            expected = corpus.document(piece.document)[piece.first_token : last].tolist()
            head = [CLS] * bool(original[0] == CLS)
            tail = [SEP] * (len(original) - len(head) - piece.text_tokens)
            assert original.tolist() == head + expected + tail and len(head) == (piece.first_token == 0)
            assert piece.document_tokens == LENGTHS[piece.document]
            for seen, label in zip(piece.seen_s.tolist(), piece.labels_s.tolist(), strict=True):
                if label != NO_LABEL:
                    kinds.add("masked" if seen == MASK else "kept" if seen == label else "replaced")
    assert kinds == {"masked", "kept", "replaced"}


def test_a_checkpoint_shortens_the_way_to_the_same_batch(place, tmp_path):
    settings = settings_of(place, data_path=("2", str(place / "P"), "1", str(place / "Q")))
    there = find_batch(settings, 7, place=None)
    behind_4 = asdict(find_batch(settings, 5, place=None).cursor)
    folder = write_checkpoint(tmp_path, settings, iteration=4, cursor=behind_4)
    assert contents(find_batch(settings, 7, place=folder)) == contents(there)
    wrong = write_checkpoint(tmp_path, settings, iteration=5, cursor=behind_4)  # one iteration less behind it
    assert contents(find_batch(settings, 7, place=wrong)) != contents(there)


def test_a_checkpoint_of_other_documents_is_refused(place, tmp_path):
    folder = write_checkpoint(tmp_path, settings_of(place), iteration=1, cursor={"epoch": 0, "window": 0, "row": 8})
    with pytest.raises(CheckpointError, match=r"was trained on the corpus with sha256 .{12}, --data-path names"):
        find_batch(settings_of(place, data_path=(str(place / "Q"),)), 3, place=folder)


def test_a_run_that_continues_another_goes_on_in_the_same_data_and_begins_others(place, tmp_path):
    settings = settings_of(place)
    behind_4 = asdict(find_batch(settings, 5, place=None).cursor)
    write_checkpoint(tmp_path, settings, iteration=4, cursor=behind_4)
    second = replace(settings, checkpoint=CheckpointConfig(continue_from=str(tmp_path)))
    assert contents(find_batch(second, 6, place=None)) == contents(find_batch(settings, 6, place=None))
    anew = second.with_section("training", seed=1)
    own = settings.with_section("training", seed=1)
    assert contents(find_batch(anew, 6, place=None)) == contents(find_batch(own, 6 - 4, place=None))


def test_a_batch_of_a_phase_is_found_with_its_settings(place):
    phases = (PhaseChange(after_iters=2, seq_length=128, mask_prob=0.1),)
    settings = settings_of(place)
    found = find_batch(settings.with_section("training", phases=phases), 4, place=None)
    assert (found.settings.data.seq_length, found.settings.data.mask_prob) == (128, 0.1)
    assert len(found.parts[0].batch.tokens_t) == 2 * 128
    before = find_batch(settings.with_section("training", phases=phases), 2, place=None)
    assert contents(before) == contents(find_batch(settings, 2, place=None))


def test_a_batch_before_a_run_that_continues_another_is_refused(place, tmp_path):
    settings = settings_of(place)
    write_checkpoint(tmp_path, settings, iteration=4, cursor={"epoch": 0, "window": 0, "row": 8})
    second = replace(settings, checkpoint=CheckpointConfig(continue_from=str(tmp_path)))
    with pytest.raises(ConfigError, match="--iteration 4 is before this run, whose first is 5"):
        find_batch(second, 4, place=None)


def test_the_numbers_count_what_is_in_the_rows(place):
    settings = settings_of(place, mask_replacement="bert", data_path=("3", str(place / "P"), "1", str(place / "Q")))
    found = find_batch(settings, 2, place=None)
    pieces, lines = [piece for row in rows_of(found) for piece in row.pieces], describe(found)
    seen = np.concatenate([piece.seen_s for piece in pieces])
    labels = np.concatenate([piece.labels_s for piece in pieces])
    assert lines["rows"].startswith("8 of 64 slots, in 4 micro-batches")
    assert f"{len(seen):,} tokens, {8 * 64 - len(seen):,} slots unused" in lines["fill"]
    predicted, ordinary = int((labels != NO_LABEL).sum()), sum(piece.text_tokens for piece in pieces)
    assert (
        lines["predicted"].startswith(f"{predicted:,} tokens, ") and f" of the {ordinary:,} that" in lines["predicted"]
    )
    hidden, kept = int(((labels != NO_LABEL) & (seen == MASK)).sum()), int((labels == seen).sum())
    assert f": {hidden:,} hidden, " in lines["predicted"] and lines["predicted"].endswith(f"{kept:,} left as they are")
    cut = [piece.first_token + piece.text_tokens < piece.document_tokens for piece in pieces]
    assert 0 < sum(cut) < len(cut) and f"; {sum(cut):,} of them do not reach the end" in lines["documents"]
    for name in ("P", "Q"):
        own = [len(piece.seen_s) for piece in pieces if piece.corpus == str(place / name)]
        assert own and f"{place / name} {len(own):,} pieces with {100 * sum(own) / len(seen):.1f} %" in lines["blend"]
