"""Small valid inputs, each with a reader that either refuses a changed file or must find what the original says."""

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from small_sentencepiece import write_model
from unit.conversion.saved_model import SHAPE, WORDS, SavedModel, build_reference
from unit.data.small_corpus import numbered_tokenizer, random_documents, write_corpus, write_vocabulary

from checkpoint_conversion.checkpoint import model_shape, read_checkpoint, reference_config
from checkpoint_conversion.config_json import FolderSpec, build_config
from checkpoint_conversion.imports import read_folder
from checkpoint_conversion.mapping import NEOBERT, TABLES, to_internal, to_published
from megatron_neobert.checkpoint.folder import verify_files
from megatron_neobert.config.cli import parse_command_line, read_record, write_record
from megatron_neobert.config.schema import ModelConfig, Settings
from megatron_neobert.data.corpus.reader import Corpus, check_content
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.model.reference import ReferenceNeoBERT

REPOSITORY = Path(__file__).resolve().parents[2]
REQUIRED = ["--data-path", "corpus", "--tokenizer-model", "tokenizer"]
TEXTS = [
    "a b ab [MASK] hello",
    "",
    "\u00e9\u0301 \ufb01 \u4e2d\u6587",
    "x" * 200,
    "A\0\u200bb </s><mask>",
    "\u2581a  b ",
]
TOKENIZER_FILES = (
    "vocab.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model"
)  # fmt: skip
MODEL = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2, ffn_hidden_size=16)
SHARDS = ("a.safetensors", "b.safetensors")
INDEX = "model.safetensors.index.json"


class Target(NamedTuple):
    """A folder with valid files, the names of those to change, and a reader of a copy with one changed file.

    The reader raises a NeoBERTError, or asserts that what it has read agrees with the original.
    """

    folder: Path
    files: list[str]
    read: Callable[[Path, str], object]

    def copy_to(self, place: Path, name: str, content: bytes) -> None:
        """Make `place` a copy of the folder in which one file has other content."""
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.folder, place, copy_function=os.link)
        (place / name).unlink()
        (place / name).write_bytes(content)


def corpus(folder: Path, shard_bytes: int | None) -> Target:
    documents, tokenizer = random_documents([3, 1, 4, 2], 100), numbered_tokenizer(100)
    written = [document.tolist() for document in documents]
    write_corpus(folder / "small", documents, tokenizer, shard_bytes=shard_bytes)

    def read(place: Path, name: str) -> None:
        corpus = Corpus(place / "small")
        corpus.check_tokenizer(tokenizer)
        corpus.manifest.describe()
        found = [corpus.document(number).tolist() for number in range(len(corpus))]
        gathered = corpus.gather(np.arange(4), np.zeros(4, dtype=np.int64), corpus.lengths[np.arange(4)])
        assert [len(document) for document in found] == [3, 1, 4, 2]
        assert gathered.tolist() == [id_ for document in found for id_ in document]
        assert name.endswith(".bin") or found == written, "only other ids in .bin are left to the full check"
        check_content(corpus)
        assert found == written

    return Target(folder, sorted(path.name for path in folder.iterdir()), read)


def tokenizer(folder: Path, name: str) -> Target:
    """A changed file must give legal ids, and equal fingerprints must mean equal ids."""
    write_vocabulary(folder / "vocab.txt", [*"abhelox", "##a", "##b", "##l", "he", "##llo", "[", "]", "mask"])
    load_tokenizer(folder / "vocab.txt").save_tokenizer_files(folder, model_max_length=16)
    write_model(folder / "tokenizer.model")
    beside = "vocab.txt" if name.endswith(("config.json", "map.json")) else name
    for path in folder.iterdir():
        if path.name not in (name, beside):
            path.unlink()

    def read_ids(place: Path, _: str = name) -> tuple[str, tuple[list[int], list[int]]]:
        loaded = load_tokenizer(place)
        batch = loaded.encode_batch(TEXTS)
        never = {*loaded.special_ids} - {loaded.unk_id}
        assert all(0 <= id_ < loaded.vocab_size and id_ not in never for id_ in batch.ids.tolist())
        return loaded.fingerprint, (batch.ids.tolist(), batch.lengths.tolist())

    fingerprint, ids = read_ids(folder)

    def read(place: Path, _: str) -> None:
        found, found_ids = read_ids(place)
        assert found != fingerprint or found_ids == ids

    return Target(folder, [name], read)


def checkpoint(folder: Path, *, sealed: bool) -> Target:
    """A checkpoint of a tiny model; `sealed` ones get a manifest of the changed files, as an attacker would write."""
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("".join(f"{word}\n" for word in WORDS))
    model = SavedModel(folder / "save", build_reference(), vocabulary)
    model.write(to_internal(model.reference.state_dict(), SHAPE, NEOBERT))
    root = model.iteration_folder
    files = [str(path.relative_to(folder)) for path in sorted(root.rglob("*")) if path.is_file()]
    manifest = str((root / "MANIFEST.json").relative_to(folder))

    def read_sealed(place: Path, _: str) -> None:
        copy = SavedModel(place / "save", model.reference, vocabulary)
        copy.seal()
        read_checkpoint(copy.save).build_reference(torch.float32)

    def read_unsealed(place: Path, name: str) -> None:
        verify_files(place / "save" / root.name)
        assert name == manifest or (place / name).read_bytes() == (folder / name).read_bytes()

    if sealed:
        files.remove(manifest)
    return Target(folder, files, read_sealed if sealed else read_unsealed)


def exported_model(folder: Path, layout: str) -> Target:
    write_vocabulary(folder / "vocab.txt", ["a", "b"])
    tokenizer, settings = load_tokenizer(folder / "vocab.txt"), Settings(model=MODEL)
    shape = model_shape(settings, vocab_size=tokenizer.vocab_size)
    reference = ReferenceNeoBERT(reference_config(settings, vocab_size=tokenizer.vocab_size))
    weights = to_published(to_internal(reference.state_dict(), shape, NEOBERT), shape, TABLES[layout])
    (folder / "config.json").write_text(json.dumps(build_config(layout, FolderSpec(shape, tokenizer))))
    places = {name: SHARDS[number % 2] for number, name in enumerate(weights)}
    for shard in SHARDS:
        save_file({name: weights[name].clone() for name in weights if places[name] == shard}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))

    def read(place: Path, name: str) -> None:
        found = read_folder(place)
        assert (found.model.num_layers, found.model.hidden_size, found.model.ffn_width) == (2, 8, 16)
        to_internal(found.weights, shape, TABLES[found.layout])  # raises unless every tensor fits
        assert name != INDEX or all(torch.equal(found.weights[key], weights[key]) for key in weights)

    return Target(folder, ["config.json", INDEX, SHARDS[0]], read)


def settings(folder: Path, content: bytes, name: str) -> Target:
    (folder / name).write_bytes(content)

    def read(place: Path, _: str) -> None:
        check_settings([*REQUIRED, "--config", str(place / name)], 2, place)

    return Target(folder, [name], read)


def check_settings(arguments: list[str], world_size: int, place: Path) -> None:
    """Parse a command line; what is accepted must have finite values and survive being saved."""
    found = parse_command_line(arguments, world_size=world_size).settings
    values = [value for section in asdict(found).values() for value in section.values()]
    assert all(math.isfinite(value) for value in values if isinstance(value, float))
    assert all(abs(value) < 2**63 for value in values if isinstance(value, int))
    write_record(found, place / "record.yaml")
    assert read_record(place / "record.yaml") == found


TARGETS: dict[str, Callable[[Path], Target]] = {
    "corpus": lambda folder: corpus(folder, None),
    "corpus of several shards": lambda folder: corpus(folder, 8),
    **{name: lambda folder, name=name: tokenizer(folder, name) for name in TOKENIZER_FILES},
    "checkpoint": lambda folder: checkpoint(folder, sealed=False),
    "sealed checkpoint": lambda folder: checkpoint(folder, sealed=True),
    "eurobert folder": lambda folder: exported_model(folder, "eurobert"),
    "neobert folder": lambda folder: exported_model(folder, "neobert"),
    "YAML": lambda folder: settings(folder, (REPOSITORY / "examples/configs/tiny.yaml").read_bytes(), "run.yaml"),
    # JSON is YAML; every setting is there.
    "all settings": lambda folder: settings(folder, json.dumps(asdict(Settings())).encode(), "run.json"),
}
