"""Mutated Hugging Face folders: refused in one sentence, or read as a model whose tensors all fit its settings."""

import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from bad_inputs.fuzzing import examples, mutated, mutated_file
from bad_inputs.refusals import bounded
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from unit.data.small_corpus import write_vocabulary

from checkpoint_conversion.checkpoint import model_shape, reference_config
from checkpoint_conversion.config_json import FolderSpec, build_config
from checkpoint_conversion.imports import ImportedModel, read_folder
from checkpoint_conversion.mapping import NEOBERT, TABLES, to_internal, to_published
from megatron_neobert.config.schema import ModelConfig, Settings
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.errors import NeoBERTError
from megatron_neobert.model.reference import ReferenceNeoBERT

pytestmark = pytest.mark.slow

MODEL = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2, ffn_hidden_size=16)
SHARDS = ("a.safetensors", "b.safetensors")
INDEX = "model.safetensors.index.json"


class Place(NamedTuple):
    """Sound folders by layout, and one for the spoilt copy."""

    sound: dict[str, Path]
    spoilt: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("folders")
    write_vocabulary(folder / "vocab.txt", ["a", "b"])
    tokenizer = load_tokenizer(folder / "vocab.txt")
    settings = Settings(model=MODEL)
    shape = model_shape(settings, vocab_size=tokenizer.vocab_size)
    reference = ReferenceNeoBERT(reference_config(settings, vocab_size=tokenizer.vocab_size))
    internal = to_internal(reference.state_dict(), shape, NEOBERT)
    sound = {layout: folder / layout for layout in ("eurobert", "neobert")}
    for layout, target in sound.items():
        target.mkdir()
        shutil.copy(folder / "vocab.txt", target)
        (target / "config.json").write_text(json.dumps(build_config(layout, FolderSpec(shape, tokenizer))))
        weights = to_published(internal, shape, TABLES[layout])
        weight_map = {name: SHARDS[number % 2] for number, name in enumerate(weights)}
        for shard in SHARDS:
            save_file({name: weights[name].clone() for name in weights if weight_map[name] == shard}, target / shard)
        (target / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return Place(sound, folder / "spoilt")


def read_spoilt(place: Place, layout: str, name: str, content: bytes) -> ImportedModel | None:
    """Reads a sound folder with one other file; None where it is refused, in a sentence that any terminal can show."""
    shutil.rmtree(place.spoilt, ignore_errors=True)
    place.spoilt.mkdir()
    for file in place.sound[layout].iterdir():
        os.link(file, place.spoilt / file.name)
    (place.spoilt / name).unlink()
    (place.spoilt / name).write_bytes(content)
    try:
        with bounded():
            found = read_folder(place.spoilt)
            shape = model_shape(Settings(model=found.model), vocab_size=found.tokenizer.vocab_size)
            to_internal(found.weights, shape, TABLES[found.layout])
    except NeoBERTError as error:
        assert str(error).isprintable()
        assert len(str(error).encode()) < 1000
        return None
    return found


@pytest.mark.parametrize("layout", ["eurobert", "neobert"])
@examples(200)
@given(data=st.data())
def test_mutated_config_is_refused_or_describes_the_weights(place: Place, layout: str, data: st.DataObject):
    content = (place.sound[layout] / "config.json").read_bytes()
    found = read_spoilt(place, layout, "config.json", data.draw(mutated_file("config.json", content)))
    if found is not None:
        assert (found.model.num_layers, found.model.hidden_size, found.model.ffn_width) == (2, 8, 16)


@examples(150)
@given(data=st.data())
def test_mutated_index_is_refused_or_means_the_same(place: Place, data: st.DataObject):
    content = (place.sound["neobert"] / INDEX).read_bytes()
    found = read_spoilt(place, "neobert", INDEX, data.draw(mutated_file(INDEX, content)))
    if found is not None:
        sound = read_folder(place.sound["neobert"]).weights
        assert all(torch.equal(found.weights[name], sound[name]) for name in sound)


@examples(150)
@given(data=st.data())
def test_mutated_weights_are_refused_or_fit_the_settings(place: Place, data: st.DataObject):
    content = (place.sound["neobert"] / SHARDS[0]).read_bytes()
    header = int.from_bytes(content[:8], "little")  # most changes belong there
    head, body = content[: 8 + header], content[8 + header :]
    spoilt = data.draw(st.one_of(mutated(content), mutated(head).map(lambda changed: changed + body)))
    read_spoilt(place, "neobert", SHARDS[0], spoilt)
