"""A batch as text: what is predicted is marked, and what documents say cannot act."""

import re

import pytest
from commands import call
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from unit.inspection.batch_places import RED, REVERSED, settings_of

from megatron_neobert.config.cli import write_record
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer
from megatron_neobert.inspection.batch_rows import kinds_of, rows_of, token_text
from megatron_neobert.inspection.found_batch import find_batch


def test_brackets_mark_what_is_predicted_and_control_characters_do_not_reach_the_terminal(place, tmp_path):
    settings = settings_of(place, mask_replacement="bert")
    write_record(settings, tmp_path / "settings.yaml")
    words = ("--config", tmp_path / "settings.yaml", "--iteration", 2, "--rows", 8)
    code, printed, errors = call("inspect batch", *words)
    assert (code, errors) == (0, "")
    found = find_batch(settings, 2, place=None)
    pieces = [piece for row in rows_of(found) for piece in row.pieces]
    kinds = [kind for piece in pieces for kind in kinds_of(found.tokenizer, piece.seen_s, piece.labels_s)]
    assert printed.count("of micro-batch") == 8
    assert printed.count("[MASK->") == kinds.count("masked") + 1  # one in the legend
    assert len(re.findall(r"\[=", printed)) == kinds.count("kept") + 1
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
def test_pieces_of_every_kind_of_tokenizer_read_as_text(vocabulary, decoder, texts):
    pieces = {name: number for number, name in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *vocabulary])}
    backend = Backend(models.WordLevel(pieces, unk_token="[UNK]"))
    backend.decoder = decoder
    tokenizer = Tokenizer(backend, {role: f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")})
    assert [token_text(tokenizer, 5 + number) for number in range(len(vocabulary))] == texts
