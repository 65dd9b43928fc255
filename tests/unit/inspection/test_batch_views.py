"""A batch as text and as a page: what is predicted is marked, and what documents say cannot act."""

import re

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from unit.evaluation.html_page import Page
from unit.inspection.batch_places import ATTRIBUTE, RED, REVERSED, SCRIPT, settings_of

from megatron_neobert.data.tokenizer.tokenizer import Tokenizer
from megatron_neobert.inspection.batch import print_rows, to_html
from megatron_neobert.inspection.batch_rows import TokenViews, kinds_of, rows_of
from megatron_neobert.inspection.found_batch import find_batch

ALLOWED = {"html", "head", "meta", "title", "style", "body", "main", "section", "article", "header", "input", "label"}
ALLOWED |= {"h1", "h2", "h3", "small", "dl", "dt", "dd", "div", "span", "ul", "li", "p", "i", "b", "s", "u", "bdi"}


@pytest.fixture(scope="module")
def found(place):
    return find_batch(settings_of(place, mask_replacement="bert"), 2, place=None)


@pytest.fixture(scope="module")
def page(found):
    return to_html(found, list(rows_of(found)))


@pytest.fixture
def printed(found, capsys):
    print_rows(found, rows_of(found))
    return capsys.readouterr().out


def count(found, kind):
    pieces = [piece for row in rows_of(found) for piece in row.pieces]
    return sum(kinds_of(found.tokenizer, piece.seen_s, piece.labels_s).count(kind) for piece in pieces)


def test_a_page_consists_of_known_tags_whatever_documents_say(page):
    read = Page(page)
    assert {tag for tag, _ in read.tags} <= ALLOWED
    assert not [name for _, attributes in read.tags for name in attributes if name.startswith("on")]
    assert SCRIPT in read.text and ATTRIBUTE in read.text  # they were there, as text


def test_a_page_loads_nothing_and_needs_nothing_beside_it(page):
    assert "default-src 'none'" in page
    assert not re.search(r"\b(src|href)=", page.replace("&quot;", ""))
    assert "prefers-color-scheme: dark" in page


def test_every_predicted_token_of_a_page_says_its_label_and_what_the_model_sees(found, page):
    titles = [attributes["title"] for tag, attributes in Page(page).tags if tag == "b" and "title" in attributes]
    labels = [int(label) for part in found.parts for label in part.batch.labels_m]
    assert [int(re.search(r"\(id (\d+)\), the model sees", title)[1]) for title in titles] == labels
    assert sum("the model sees [MASK] (id 4)" in title for title in titles) == count(found, "masked")


def test_control_characters_reach_neither_the_page_nor_the_terminal(page, printed):
    for output in (page, printed):
        assert RED not in output and REVERSED not in output
        assert r"\x1b[31mred" in output and r"\u202edesrever" in output


def test_brackets_mark_what_is_predicted(found, printed):
    assert printed.count("of micro-batch") == 8
    words = " ".join(printed.split())  # lines are wrapped
    assert words.count("[MASK->") == count(found, "masked") + 1  # one in the legend
    assert len(re.findall(r"\[=", words)) == count(found, "kept") + 1


def texts_of(vocabulary, decoder):
    pieces = {name: number for number, name in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *vocabulary])}
    backend = Backend(models.WordLevel(pieces, unk_token="[UNK]"))
    backend.decoder = decoder
    names = {role: f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
    views = TokenViews(Tokenizer(backend, names))
    return [views.text_of(5 + number) for number in range(len(vocabulary))]


def test_pieces_of_every_kind_of_tokenizer_read_as_text():
    assert texts_of(["word", "##ly"], decoders.WordPiece()) == [(" ", "word"), ("", "ly")]
    assert texts_of(["▁word", "ly"], decoders.Metaspace()) == [(" ", "word"), ("", "ly")]
    assert texts_of(["Ġword", "ly"], decoders.ByteLevel()) == [(" ", "word"), ("", "ly")]


def test_a_part_of_a_character_and_a_bare_space_show_the_piece_itself():
    assert texts_of(["Ã", "Ġ", "Ã©"], decoders.ByteLevel()) == [("", "Ã"), ("", "Ġ"), ("", "é")]
