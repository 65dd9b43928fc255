"""Reading Hugging Face folders: every layout, omitted and added tensors, and refused files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_model import SHAPE, WORDS, change_config
from torch import Tensor
from transformers import EuroBertConfig, EuroBertForMaskedLM
from unit.data.small_corpus import SPECIAL, write_vocabulary

from checkpoint_conversion.imports import read_folder
from checkpoint_conversion.mapping import EUROBERT, NEOBERT, to_internal, to_published
from megatron_neobert.errors import ConversionError, MissingInputError

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
