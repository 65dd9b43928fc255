"""A batch as text: predicted tokens are marked, and control characters are escaped."""

import re

import pytest
from commands import call
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from unit.inspection.small_runs import RED, REVERSED, settings_of

from megatron_neobert.config.cli import write_record
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer
from megatron_neobert.inspection.batch_text import read_sequences, token_kinds, token_text
from megatron_neobert.inspection.global_batch import rebuild_batch


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


@pytest.mark.parametrize(
    ("vocabulary", "decoder", "texts"),
    [
        (["word", "##ly"], decoders.WordPiece(), [(" ", "word"), ("", "ly")]),
        (["▁word", "ly"], decoders.Metaspace(), [(" ", "word"), ("", "ly")]),
        (
            ["Ġword", "ly", "Ã", "Ġ", "Ã©"],
            decoders.ByteLevel(),
            [(" ", "word"), ("", "ly"), ("", "Ã"), ("", "Ġ"), ("", "é")],
        ),
    ],
)
def test_tokens_of_every_kind_of_tokenizer_are_shown_as_text(vocabulary, decoder, texts):
    ids = {token: number for number, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *vocabulary])}
    backend = Backend(models.WordLevel(ids, unk_token="[UNK]"))
    backend.decoder = decoder
    tokenizer = Tokenizer(backend, {role: f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")})
    assert [token_text(tokenizer, 5 + number) for number in range(len(vocabulary))] == texts
