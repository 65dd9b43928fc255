"""Reading Hugging Face folders, and conversion to checkpoints and back, bit for bit, and to other vocabularies."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from commands import PUBLISHED, call
from safetensors.torch import load_file, save_file
from saved_model import SHAPE, WORDS, build_reference, change_config
from security.small_sentencepiece import write_model
from torch import Tensor
from transformers import EuroBertConfig, EuroBertForMaskedLM
from unit.data.small_corpus import SPECIAL, write_vocabulary

from checkpoint_conversion import imports
from checkpoint_conversion.checkpoint import read_checkpoint
from checkpoint_conversion.export import export
from checkpoint_conversion.imports import import_folder, map_vocabulary, read_folder, with_vocabulary
from checkpoint_conversion.mapping import EUROBERT, NEOBERT, to_internal, to_published
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.errors import ConversionError, MissingInputError

LAYOUTS = ("eurobert", "neobert")


def all_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of all weight files."""
    weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= {f"{path.name}: {name}": tensor for name, tensor in load_file(path).items()}
    return weights


def assert_equal(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoint_and_folder_are_unchanged_after_export_and_import(saved, exported, tmp_path, layout, dtype):
    first, second = exported(layout=layout, dtype=dtype)[0], tmp_path / "again"
    import_folder(first, tmp_path / "imported")
    before, after = read_checkpoint(saved.save), read_checkpoint(tmp_path / "imported")
    stored = {name: tensor.to(getattr(torch, dtype)).float() for name, tensor in before.tensors.items()}
    assert_equal(after.tensors, stored)
    assert after.settings.model == before.settings.model
    assert after.tokenizer.fingerprint == before.tokenizer.fingerprint
    assert after.iteration == 0

    export(after, second, layout=layout, dtype=dtype)
    assert_equal(all_weights(second), all_weights(first))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        assert (second / name).read_bytes() == (first / name).read_bytes(), name


@pytest.fixture
def published(copy_of: Any) -> Path:
    """A folder like the one that chandar-lab published: the same names of weights, a config without a rotary base."""
    folder = copy_of("neobert")
    for name in ("conversion_report.json", "README.md", "modeling_neobert.py"):
        (folder / name).unlink()
    shutil.copyfile(PUBLISHED / "config.json", folder / "config.json")
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "max_length": 64}
    change_config(folder, **sizes, intermediate_size=72, vocab_size=len(WORDS))
    return folder


def pad_vocabulary(folder: Path, value: float) -> None:
    weights = load_file(folder / "model.safetensors")
    for name in ("model.encoder.weight", "decoder.weight", "decoder.bias"):
        rows = torch.full((3, *weights[name].shape[1:]), value)
        weights[name] = torch.cat((weights[name][: len(WORDS)], rows))
    save_file(weights, folder / "model.safetensors")
    change_config(folder, vocab_size=len(WORDS) + 3)


def test_published_folder_has_the_rotary_base_of_its_code_and_loses_padding_of_zeros(published: Path, tmp_path: Path):
    pad_vocabulary(published, 0.0)
    imported, checks = import_folder(published, tmp_path / "imported")
    assert imported.model.rotary_base == 10_000
    assert any("no rotary base; it is 10,000" in note for note in imported.notes)
    assert "dropped 3 rows of zeros from the vocabulary, for which the tokenizer has no ids" in imported.notes
    assert checks["padded"].relative < 1e-5 > checks["packed"].relative
    reference = read_checkpoint(tmp_path / "imported").build_reference(torch.float32)
    assert_equal(reference.state_dict(), build_reference().state_dict())
    pad_vocabulary(published, 0.5)
    with pytest.raises(ConversionError, match=r"has 13 ids and the embedding 16 rows, but .* is not zero"):
        import_folder(published, tmp_path / "again")


def test_import_with_a_wrong_mapping_is_refused(exported, tmp_path, monkeypatch):
    to_internal = imports.to_internal

    def swap_gate_and_up(*arguments: object) -> dict[str, Tensor]:
        tensors = to_internal(*arguments)  # type: ignore[arg-type]
        name = "decoder.layers.1.mlp.linear_fc1.weight"
        return tensors | {name: tensors[name].roll(len(tensors[name]) // 2, 0)}

    monkeypatch.setattr(imports, "to_internal", swap_gate_and_up)
    with pytest.raises(ConversionError, match=r"the written checkpoint differs from its source: padded, its logits"):
        import_folder(exported()[0], tmp_path / "imported")
    assert not list(tmp_path.glob("imported*"))


def test_command_prints_the_flags_to_continue_with_and_warns_about_another_mask_id(model, tmp_path):
    change_config(model, mask_token_id=5)
    code, output, errors = call("convert", "hf-to-megatron", "--load", model, "--output", tmp_path / "imported")
    assert code == 0 and errors.count("\n") == 1
    assert "[MASK] has id 4 in the tokenizer, but mask_token_id is 5 in config.json" in errors
    assert f"--continue-from {tmp_path / 'imported'}" in output
    assert "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48" in output
    assert "--rotary-base 5000" in output
    assert "100.0%" in output


# --- another vocabulary: equal tokens keep their rows, and others start as the mean of the old tokens


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
        special_tokens=list(SPECIAL), initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
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
    counts = "7 have the weights of the same token, 2 the mean of the tokens of their text, 2 the mean of all tokens"
    assert vocabulary.note == f"new vocabulary of 11 tokens: {counts}"


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
    assert vocabulary.copied == size


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


# --- reading: every layout, omitted and added tensors, and refused files


INDEX = "model.safetensors.index.json"
FIRST_SHARD, SECOND_SHARD = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
WriteFolder = Callable[..., Path]


@pytest.fixture
def write(copy_of: Callable[..., Path]) -> WriteFolder:
    """Return a function that exports the saved model in a layout, with changed weights and fields of config.json."""

    def write_folder(
        layout: str, change: Callable[[dict[str, Tensor]], object] = lambda weights: None, **fields: Any
    ) -> Path:
        folder = copy_of(layout)
        change_config(folder, **fields)
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")
        return folder

    return write_folder


def split_into_shards(folder: Path, **entries: str) -> None:
    """Replace model.safetensors by two files and an index, which also has `entries`."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: SECOND_SHARD if number % 2 else FIRST_SHARD for number, name in enumerate(weights)}
    for shard in sorted(set(weight_map.values())):
        save_file({name: weights[name] for name in weights if weight_map[name] == shard}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map | entries}))


def refusal(folder: Path, error: type[Exception] = ConversionError) -> str:
    """Return the message of the error for a folder."""
    with pytest.raises(error) as caught:
        read_folder(folder)
    message = str(caught.value)
    assert message.startswith(str(folder))
    assert message.endswith(".")
    assert len(message) < 400
    return message


@pytest.mark.parametrize("mlp_bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_eurobert_saved_by_transformers_is_read_with_the_tensors_that_it_implies(tmp_path, mlp_bias, tied):
    sizes = {"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = EuroBertConfig(**sizes, num_attention_heads=2, mlp_bias=mlp_bias, tie_word_embeddings=tied, pad_token_id=0)
    model = EuroBertForMaskedLM(config)
    model.save_pretrained(tmp_path)
    write_vocabulary(tmp_path / "vocab.txt", WORDS[len(SPECIAL) :])
    imported = read_folder(tmp_path)
    state = model.state_dict()
    assert len(imported.weights) == 4 + 2 * 12  # three more than 9 per layer are biases of the feed-forward
    assert all(torch.equal(imported.weights[name], tensor) for name, tensor in state.items())
    assert not any(imported.weights[name].any() for name in imported.weights.keys() - state.keys())
    assert any("lm_head.weight is a copy of the embedding" in note for note in imported.notes) == tied
    assert any("filled with zeros" in note and "and 3 more" in note for note in imported.notes) == (not mlp_bias)


def test_rotary_tables_of_older_code_are_omitted_with_a_note(write: WriteFolder):
    def add(weights: dict[str, Tensor]) -> None:
        weights["model.freqs_cis"] = torch.zeros(64, 4, dtype=torch.complex64)
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    imported = read_folder(write("neobert", add))
    assert not any("freq" in name for name in imported.weights)
    assert [note.split(":")[1] for note in imported.notes] == [" rotary angles follow from the base"]


def test_bfloat16_is_kept_and_float16_becomes_float32(write: WriteFolder, internal: dict[str, Tensor]):
    def shorten(weights: dict[str, Tensor]) -> None:
        weights["model.encoder.weight"] = weights["model.encoder.weight"].bfloat16()
        weights["decoder.weight"] = weights["decoder.weight"].half()

    imported = read_folder(write("neobert", shorten))
    assert imported.weights["model.encoder.weight"].dtype == torch.bfloat16
    assert imported.weights["decoder.weight"].dtype == torch.float32
    assert torch.equal(imported.weights["decoder.weight"], internal["output_layer.weight"][: len(WORDS)].half().float())


def test_shards_and_symbolic_links_are_read_like_one_file(write: WriteFolder, tmp_path: Path):
    folder = write("neobert")
    whole = read_folder(folder).weights
    split_into_shards(folder)
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(tmp_path / "blobs" / str(number))
        file.symlink_to(tmp_path / "blobs" / str(number))  # as in Hugging Face's cache
    imported = read_folder(folder).weights
    assert all(torch.equal(imported[name], whole[name]) for name in whole)


def remove_bias(weights: dict[str, Tensor]) -> None:
    del weights["lm_head.bias"]


@pytest.mark.parametrize(
    ("layout", "change", "fields", "message"),
    [
        ("eurobert", remove_bias, {}, "missing: 'lm_head.bias'; a NeoBERT of this shape has 28 tensors"),
        ("eurobert", dict, {"tie_word_embeddings": True}, "lm_head.weight differs from the embedding; set"),
        ("eurobert", dict, {"mlp_bias": False}, "config.json has mlp_bias false, but the files have 'model"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused_by_name(write, layout, change, fields, message):
    assert message in refusal(write(layout, change, **fields))


def remove(*names: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / name).unlink() for name in names]


def remove_shard(folder: Path) -> None:
    split_into_shards(folder)
    (folder / SECOND_SHARD).unlink()


def add_entry(folder: Path) -> None:
    split_into_shards(folder, extra=FIRST_SHARD)


def add_shards(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    split_into_shards(folder)
    (folder / "model.safetensors").write_bytes(whole)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (remove("config.json"), MissingInputError, "without config.json"),
        (remove("vocab.txt", "tokenizer.json"), MissingInputError, "has no tokenizer; add the"),
        (remove_shard, MissingInputError, f"{SECOND_SHARD}: no such file, but {INDEX} lists it"),
        (add_shards, ConversionError, f"has both model.safetensors and {INDEX}"),
        (add_entry, ConversionError, f"'extra' is only in {INDEX} or only in its files"),
    ],
)
def test_missing_or_contradictory_files_are_refused_by_name(copy_of, change, error, message):
    folder = copy_of("neobert")
    change(folder)
    assert message in refusal(folder, error)


# --- tensors that do not fit the model


def test_vocabulary_padding_that_is_not_zero_is_refused(internal):
    internal["output_layer.bias"][len(WORDS)] = 1
    with pytest.raises(ConversionError, match=r"bias is not zero in rows 13 to 127"):
        to_published(internal, SHAPE, NEOBERT)


def test_published_bias_that_is_not_zero_is_refused(internal):
    published = to_published(internal, SHAPE, EUROBERT)
    published["model.layers.1.mlp.down_proj.bias"][5] = 0.5
    with pytest.raises(ConversionError, match=r"layers\.1\.mlp\.down_proj\.bias has 1 nonzero values"):
        to_internal(published, SHAPE, EUROBERT)
