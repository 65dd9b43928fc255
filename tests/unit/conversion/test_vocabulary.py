"""Weights for another vocabulary: equal tokens keep their rows, and others start as the mean of the old tokens."""

import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from security.small_sentencepiece import write_model

from checkpoint_conversion.imports import read_folder, with_vocabulary
from checkpoint_conversion.vocabulary import map_vocabulary
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
OLD = [*SPECIAL, "the", "cat", "##s", "sun", "##day"]


def write_word_pieces(folder, words):
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    return load_tokenizer(folder / "vocab.txt")


def write_byte_level(folder, words):
    """Write a BPE tokenizer, as those of ModernBERT and GPT-2, which learns the given words."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=SPECIAL, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator([f" {word}" for word in words for _ in range(9)], trainer)
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder / "tokenizer.json")


def write_sentencepiece(folder):
    """Write a model with a token for each byte."""

    def add_bytes(model):
        model.trainer_spec.byte_fallback = True
        for byte in range(256):
            model.pieces.add(piece=f"<0x{byte:02X}>", score=0.0, type=6)

    return write_model(folder / "small.model", change=add_bytes)


def test_tokens_keep_their_rows_or_start_as_the_mean_of_the_old_tokens_of_their_text(tmp_path):
    old = write_word_pieces(tmp_path / "old", OLD)
    words = ["[UNK]", "[PAD]", "[MASK]", "[CLS]", "[SEP]", "sunday", "cat", "##s", "day", "Cats", "rain"]
    vocabulary = map_vocabulary(old, write_word_pieces(tmp_path / "new", words))
    rows = torch.arange(10.0).unsqueeze(1) ** 2
    new = dict(zip(words, vocabulary.apply(rows).squeeze(1).tolist(), strict=True))
    role = dict(zip(OLD, rows.squeeze(1).tolist(), strict=True))
    assert {name: new[name] for name in (*SPECIAL, "cat", "##s")} == {
        name: role[name] for name in (*SPECIAL, "cat", "##s")
    }
    assert new["sunday"] == (role["sun"] + role["##day"]) / 2
    assert new["Cats"] == (role["cat"] + role["##s"]) / 2
    # "day" is no piece at the beginning of a word.
    assert new["day"] == new["rain"] == rows.mean()
    assert (vocabulary.copied, vocabulary.unknown) == (7, 2)
    assert "11 tokens: 7 have the weights of the same token, 2 the mean of the tokens of their text" in vocabulary.note


@pytest.mark.parametrize("direction", ["to bytes", "to word pieces"])
def test_words_keep_their_rows_between_word_pieces_and_byte_level_tokens(tmp_path, direction):
    pieces = write_word_pieces(tmp_path / "pieces", [*OLD, *"abcdehinstuy"])
    byte_level = write_byte_level(tmp_path / "bytes", ["the", "cat", "sun"])
    sides = [(pieces.backend, ""), (byte_level.backend, "Ġ")]
    (old, old_mark), (new, new_mark) = sides if direction == "to bytes" else sides[::-1]
    vocabulary = map_vocabulary(*((pieces, byte_level) if direction == "to bytes" else (byte_level, pieces)))
    for word in ("the", "cat", "sun"):
        assert vocabulary.old_ids[new.token_to_id(new_mark + word)] == [old.token_to_id(old_mark + word)]


@pytest.mark.parametrize("kind", ["word pieces", "bytes", "bytes of a SentencePiece"])
def test_vocabulary_maps_onto_itself(tmp_path, kind):
    """Parts of characters of a byte-level vocabulary all decode to the same replacement character."""
    if kind == "word pieces":
        tokenizer = write_word_pieces(tmp_path / kind, OLD)
    elif kind == "bytes":
        tokenizer = write_byte_level(tmp_path / kind, ["世界", "größer", "cats", "\N{GRINNING FACE}", "नमस्ते"])
    else:
        tokenizer = load_tokenizer(write_sentencepiece(tmp_path))
    size = tokenizer.backend.get_vocab_size()
    vocabulary = map_vocabulary(tokenizer, tokenizer)
    assert vocabulary.old_ids == [[token] for token in range(size)]
    assert (vocabulary.copied, vocabulary.unknown) == (size, 0)


# The last two bytes of 世 in the letters of a byte-level vocabulary, and a byte of a SentencePiece vocabulary.
@pytest.mark.parametrize(("part", "text"), [("¸ĸ", "\N{REPLACEMENT CHARACTER}" * 2), ("<0xE4>", "<0xE4>")])
def test_part_of_a_character_takes_no_row_of_another_token(tmp_path, part, text):
    """Even if the old vocabulary can divide the text to which the part is decoded."""
    old = write_byte_level(tmp_path / "old", ["\N{REPLACEMENT CHARACTER}"])
    assert old.encode_batch([text]).ids.size
    is_byte_level = part != "<0xE4>"
    new = write_byte_level(tmp_path / "new", ["世"]) if is_byte_level else load_tokenizer(write_sentencepiece(tmp_path))
    assert map_vocabulary(old, new).old_ids[new.backend.token_to_id(part)] == []


def test_model_with_the_same_vocabulary_in_another_order_is_the_same_model(exported, tmp_path):
    folder, _ = exported(layout="neobert")
    imported = read_folder(folder)
    names = (folder / "vocab.txt").read_text().split("\n")[:-1]
    order = [*range(5), *range(len(names) - 1, 4, -1)]
    reordered = write_word_pieces(tmp_path / "other", [names[number] for number in order])
    changed = with_vocabulary(imported, reordered)
    stored = load_file(folder / "model.safetensors")
    for name, weight in changed.weights.items():
        expected = stored[name][order] if weight.shape[0] == len(names) and weight.dim() <= 2 else stored[name]
        assert torch.equal(weight, expected), name
    assert sum(not torch.equal(changed.weights[name], stored[name]) for name in stored) == 3
