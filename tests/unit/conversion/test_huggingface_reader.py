"""Hugging Face folders as data: every layout, what is filled in with a note, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_model import MODEL, SHAPE, WORDS
from torch import Tensor
from transformers import EuroBertConfig, EuroBertForMaskedLM, LlamaConfig, LlamaModel

from checkpoint_conversion.config_json import FolderSpec, build_config
from checkpoint_conversion.imports import read_folder
from checkpoint_conversion.mapping import TABLES, to_internal, to_published
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.errors import ConversionError, MissingInputError

HEAD = ("decoder.weight", "decoder.bias")
INDEX = "model.safetensors.index.json"
FIRST_SHARD, SECOND_SHARD = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
WriteFolder = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, internal: dict[str, Tensor]) -> WriteFolder:
    """Writes the saved model in a layout; `change` may spoil the weights, and the fields of config.json are given."""

    def write_folder(
        layout: str, change: Callable[[dict[str, Tensor]], object] = lambda weights: None, **fields: Any
    ) -> Path:
        folder = tmp_path / "model"
        add_tokenizer(folder)
        tokenizer = load_tokenizer(folder)
        config = build_config(layout, FolderSpec(SHAPE, tokenizer)) | fields
        (folder / "config.json").write_text(json.dumps(config))
        weights = to_published(internal, SHAPE, TABLES[layout])
        change(weights)
        if layout == "llama":
            head = {name: weights.pop(name) for name in HEAD if name in weights}
            (folder / "mlm_head").mkdir()
            save_file(head, folder / "mlm_head" / "model.safetensors")
        save_file(weights, folder / "model.safetensors")
        return folder

    return write_folder


def add_tokenizer(folder: Path, words: list[str] = WORDS) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words))


def cut_into_shards(folder: Path, **listed: str | None) -> None:
    """Two files and their index in the place of one; what the index says of some tensors may be given."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: SECOND_SHARD if number % 2 else FIRST_SHARD for number, name in enumerate(weights)}
    for shard in sorted(set(weight_map.values())):
        save_file({name: weights[name] for name in weights if weight_map[name] == shard}, folder / shard)
    weight_map = {name: shard for name, shard in (weight_map | listed).items() if shard is not None}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refusal(folder: Path, error: type[Exception] = ConversionError) -> str:
    with pytest.raises(error) as caught:
        read_folder(folder)
    message = str(caught.value)
    assert message.startswith(str(folder))
    assert message.endswith(".")
    assert len(message) < 600
    return message


@pytest.mark.parametrize("layout", TABLES)
def test_folder_of_every_layout_is_read_bit_for_bit(write: WriteFolder, internal: dict[str, Tensor], layout: str):
    found = read_folder(write(layout))
    assert (found.layout, found.model, found.notes) == (layout, MODEL, ())
    assert found.tokenizer.vocab_size == len(WORDS)
    back = to_internal(found.weights, SHAPE, TABLES[layout])
    assert back.keys() == internal.keys()
    assert all(torch.equal(back[name], internal[name]) for name in internal)


@pytest.mark.parametrize("mlp_bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_eurobert_that_transformers_wrote_is_read_with_all_that_it_leaves_out(
    tmp_path: Path, mlp_bias: bool, tied: bool
):
    sizes = {"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = EuroBertConfig(**sizes, num_attention_heads=2, mlp_bias=mlp_bias, tie_word_embeddings=tied, pad_token_id=0)
    model = EuroBertForMaskedLM(config)
    model.save_pretrained(tmp_path)
    add_tokenizer(tmp_path)
    found = read_folder(tmp_path)
    state = model.state_dict()
    assert len(found.weights) == 4 + 2 * 12  # three more than 9 per layer are biases of the feed-forward
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in state.items())
    assert not any(found.weights[name].any() for name in found.weights.keys() - state.keys())
    assert any("lm_head.weight is a copy of the embedding" in note for note in found.notes) == tied
    assert any("filled with zeros" in note and "and 3 more" in note for note in found.notes) == (not mlp_bias)


def test_llama_that_transformers_wrote_is_read_with_the_head_beside_it(tmp_path: Path):
    sizes = {"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    model = LlamaModel(LlamaConfig(**sizes, num_attention_heads=2, is_causal=False))
    model.save_pretrained(tmp_path)
    add_tokenizer(tmp_path)
    (tmp_path / "mlm_head").mkdir()
    head = {"decoder.weight": torch.rand(len(WORDS), 16)}
    save_file(head, tmp_path / "mlm_head" / "model.safetensors")
    found = read_folder(tmp_path)
    assert found.model.norm_epsilon == 1e-6  # Llama's, not NeoBERT's
    expected = model.state_dict() | head | {"decoder.bias": torch.zeros(len(WORDS))}
    assert found.weights.keys() == expected.keys()
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in expected.items())


def test_rotary_tables_of_older_code_are_left_out_with_a_note(write: WriteFolder):
    def add(weights: dict[str, Tensor]) -> None:
        weights["model.freqs_cis"] = torch.zeros(64, 4, dtype=torch.complex64)
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    found = read_folder(write("neobert", add))
    assert not any("freq" in name for name in found.weights)
    assert [note.split(":")[1] for note in found.notes] == [" rotary angles follow from the base"]


def test_dtypes_are_kept_but_float16_which_becomes_float32_unchanged(write: WriteFolder, internal: dict[str, Tensor]):
    def shorten(weights: dict[str, Tensor]) -> None:
        weights["model.encoder.weight"] = weights["model.encoder.weight"].bfloat16()
        weights["decoder.weight"] = weights["decoder.weight"].half()

    found = read_folder(write("neobert", shorten))
    assert found.weights["model.encoder.weight"].dtype == torch.bfloat16
    assert found.weights["decoder.weight"].dtype == torch.float32
    assert torch.equal(found.weights["decoder.weight"], internal["output_layer.weight"][: len(WORDS)].half().float())


def test_shards_and_links_are_read_as_one_file_is(write: WriteFolder, tmp_path: Path):
    folder = write("neobert")
    whole = read_folder(folder).weights
    cut_into_shards(folder)
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(tmp_path / "blobs" / str(number))
        file.symlink_to(tmp_path / "blobs" / str(number))  # as in Hugging Face's cache
    found = read_folder(folder).weights
    assert all(torch.equal(found[name], whole[name]) for name in whole)


# --- what is refused: weights


def unchanged(weights: dict[str, Tensor]) -> None:
    pass


def put_a_classifier(weights: dict[str, Tensor]) -> None:
    for name in [name for name in weights if name.startswith(("lm_head.", "decoder."))]:
        del weights[name]
    weights["classifier.weight"] = torch.zeros(2, 32)


def lose_a_bias(weights: dict[str, Tensor]) -> None:
    del weights["lm_head.bias"]


@pytest.mark.parametrize(
    ("layout", "spoil", "fields", "said"),
    [
        ("eurobert", put_a_classifier, {}, "there is no lm_head.weight, but 'classifier.weight'. Pre-training"),
        ("neobert", put_a_classifier, {}, "there is no decoder.weight, but 'classifier.weight'. Pre-training"),
        ("eurobert", lose_a_bias, {}, "the files lack 'lm_head.bias'; a eurobert folder of 2 layers holds 28 tensors"),
        ("eurobert", unchanged, {"tie_word_embeddings": True}, "lm_head.weight differs from the embedding in"),
        ("eurobert", unchanged, {"mlp_bias": False}, "config.json has mlp_bias false, but the files hold 'model"),
        ("neobert", unchanged, {"num_hidden_layers": 1}, "no place for 'model.transformer_encoder.1"),
        ("neobert", unchanged, {"num_hidden_layers": 3}, "the files lack 'model.transformer_encoder.2"),
    ],
)
def test_weights_that_are_not_those_of_the_config_are_refused_by_name(write, layout, spoil, fields, said):
    assert said in refusal(write(layout, spoil, **fields))


# --- what is refused: files


def lose(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def add_a_second_decoder(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"decoder.bias": torch.zeros(len(WORDS))}, folder / "model.safetensors")


def lose_a_shard(folder: Path) -> None:
    cut_into_shards(folder)
    (folder / SECOND_SHARD).unlink()


def add_the_whole_file(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    cut_into_shards(folder)
    (folder / "model.safetensors").write_bytes(whole)


@pytest.mark.parametrize(
    ("layout", "damage", "error", "said"),
    [
        ("neobert", lose("config.json"), MissingInputError, "without config.json"),
        ("neobert", lose("vocab.txt"), MissingInputError, "holds no tokenizer; put the tokenizer.json or vocab.txt"),
        ("neobert", lose("model.safetensors"), MissingInputError, f"neither model.safetensors nor {INDEX}"),
        ("llama", lose("mlm_head/model.safetensors"), ConversionError, "there is no mlm_head/model.safetensors"),
        ("llama", add_a_second_decoder, ConversionError, "'decoder.bias' is in mlm_head as well"),
        ("neobert", lose_a_shard, MissingInputError, f"{SECOND_SHARD}: no such file, but {INDEX} names it"),
        ("neobert", add_the_whole_file, ConversionError, f"model.safetensors and {INDEX} are both there"),
    ],
)
def test_files_that_are_missing_or_contradict_each_other_are_refused_by_name(write, layout, damage, error, said):
    folder = write(layout)
    damage(folder)
    assert said in refusal(folder, error)


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ({"decoder.bias": SECOND_SHARD}, f"holds 'decoder.bias'; for that, {INDEX} names '{SECOND_SHARD}"),
        ({"decoder.bias": None}, f"holds 'decoder.bias'; for that, {INDEX} names None"),
        ({"extra": FIRST_SHARD}, f"does not hold 'extra'; for that, {INDEX} names '{FIRST_SHARD}'"),
    ],
)
def test_index_and_shards_that_name_other_tensors_are_refused(write, listed, said):
    folder = write("neobert")
    cut_into_shards(folder, **listed)
    assert said in refusal(folder)
