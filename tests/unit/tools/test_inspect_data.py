"""The command that shows documents of a corpus, as a user starts it."""

import pytest
from commands import call
from json_files import write_jsonl
from tokenizers import Tokenizer, models
from unit.data.small_corpus import SPECIAL, write_corpus, write_vocabulary

from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

TEXTS = ["hello world", "hello", "привет world hello world", "word ##ly hello", "world"]


def inspect(*arguments):
    return call("inspect data", *arguments)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """P, five documents in three corpus shards, and vocab.txt."""
    folder = tmp_path_factory.mktemp("inspect")
    tokenizer = load_tokenizer(write_vocabulary(folder / "vocab.txt", ["hello", "world", "word", "##ly", "привет"]))
    documents = [[tokenizer.backend.token_to_id(word) for word in text.split()] for text in TEXTS]
    manifest = write_corpus(folder / "P", documents, tokenizer, shard_bytes=8)
    assert len(manifest.shards) == 3
    return folder


def test_documents_are_shown_as_text_and_ids_in_the_order_asked_for(place):
    code, output, errors = inspect(place / "P", "--tokenizer-model", place / "vocab.txt", "--document", 3, 0)
    assert (code, errors) == (0, "")
    assert output.splitlines() == [
        "document 3: 3 tokens",
        "  text               wordly hello",
        "  ids                7 8 5",
        "",
        "document 0: 2 tokens",
        "  text               hello world",
        "  ids                5 6",
        "",
    ]


def test_inputs_are_listed_with_their_share_and_first_document_and_without_control_characters(tmp_path):
    for name, texts in {"a": ["hello", "hello world"], "b\x1b[2J": ["word"]}.items():
        write_jsonl(tmp_path / f"{name}.jsonl", [{"content": text} for text in texts])
    vocab = write_vocabulary(tmp_path / "vocab.txt", ["hello", "world", "word"])
    shards = ("--input", tmp_path / "*.jsonl", "--output-prefix", tmp_path / "P")
    assert call("preprocess", *shards, "--tokenizer-model", vocab)[0] == 0
    code, output, errors = inspect(tmp_path / "P_content_document", "--inputs")
    assert (code, errors) == (0, "")
    a, b = (["0", "2", "3", "75.00%", f"{tmp_path}/a.jsonl"], ["2", "1", "1", "25.00%", f"{tmp_path}/b\\x1b[2J.jsonl"])
    assert [line.split() for line in output.splitlines()[1:]] == [a, b]


def test_without_a_document_the_corpus_is_summed_up_and_no_tokenizer_needed(place):
    code, output, errors = inspect(place / "P")
    assert (code, errors) == (0, "")
    rows = {line[2:20].strip(): line[21:] for line in output.splitlines()}
    assert rows["documents"] == "5"
    assert rows["tokens"] == "11, 0.000 % of them unknown"
    assert rows["corpus shards"].startswith("3, 22 bytes of uint16 and ")
    assert rows["tokens/document"].startswith("mean 2.2, shortest 1, ")
    assert rows["rejected"] == rows["dropped"] == "none"
    assert rows["options"] == "defaults"
    assert len(rows["sha256"]) == 64


@pytest.mark.parametrize(
    ("numbers", "vocabulary", "code", "message"),
    [
        ([5], "vocab.txt", 2, "--document 5 is not one of the 5"),
        ([0, -1], "vocab.txt", 2, "give numbers from 0 to 4"),
        ([0], None, 2, "give --tokenizer-model"),
        ([0], "other.txt", 65, "written with tokenizer"),
    ],
)
def test_wrong_numbers_and_tokenizers_are_refused_in_one_sentence(place, numbers, vocabulary, code, message):
    write_vocabulary(place / "other.txt", ["other"])
    tokenizer = ("--tokenizer-model", place / vocabulary) if vocabulary else ()
    ended = inspect(place / "P", "--document", *numbers, *tokenizer)
    assert ended[:2] == (code, "") and message in ended[2] and "Traceback" not in ended[2]


def test_control_characters_do_not_reach_the_terminal(tmp_path):
    """A vocabulary may hold an escape sequence, and a text the character that turns its surroundings around."""
    pieces = [*SPECIAL, "\x1b[2J", "a\u202eb", "\n", "é\u200d"]
    backend = Tokenizer(models.WordLevel({piece: id_ for id_, piece in enumerate(pieces)}, "[UNK]"))
    backend.add_special_tokens(list(SPECIAL))
    backend.save(str(tmp_path / "tokenizer.json"))
    write_corpus(tmp_path / "P", [[5, 6, 7, 8]], load_tokenizer(tmp_path / "tokenizer.json"))
    code, output, errors = inspect(tmp_path / "P", "--document", 0, "--tokenizer-model", tmp_path / "tokenizer.json")
    assert (code, errors) == (0, "")
    assert output.splitlines()[1] == "  text               \\x1b[2J a\\u202eb \\n é\u200d"
