"""Write a valid folder of each kind of input, and read it in this process.

A reader raises a NeoBERTError, or accepts the input and uses it: ids must be those of the corpus or legal, and settings
must survive saving.
"""

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import good_inputs as good
import torch
from hostile import seal
from small_sentencepiece import write_model as write_sentencepiece
from unit.conversion.saved_model import save_model
from unit.data.small_corpus import numbered_tokenizer, random_documents, write_corpus

from checkpoint_conversion.checkpoint import model_shape, read_checkpoint
from checkpoint_conversion.imports import read_folder
from checkpoint_conversion.mapping import TABLES, to_internal
from megatron_neobert.config.cli import parse_command_line, read_record, write_record
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.corpus.reader import Corpus, check_content
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

LENGTHS, VOCAB = (3, 1, 4, 2), 100
CHECKPOINT = "checkpoints/iter_0000030"


class Kind(NamedTuple):
    """A kind of input.

    Attributes:
        write: Function that writes a valid input into an empty folder.
        read: Function that reads such a folder.
        exit_code: Exit code of a refusal.
    """

    write: Callable[[Path], object]
    read: Callable[[Path], object]
    exit_code: int


def write_small_corpus(folder: Path, *, shard_bytes: int | None = None) -> None:
    """Write a corpus of uint16 and its tokenizer."""
    tokenizer = numbered_tokenizer(VOCAB)
    folder.mkdir(exist_ok=True)
    write_corpus(folder / "small", random_documents(list(LENGTHS), VOCAB), tokenizer, shard_bytes=shard_bytes)
    tokenizer.save_tokenizer_files(folder / "tokenizer", model_max_length=16)


def check_corpus(folder: Path) -> None:
    """Run the checks of `neobert validate --full` and of the start of a run, and compare all documents."""
    opened = Corpus(folder / "small")
    opened.check_tokenizer(numbered_tokenizer(VOCAB))
    opened.manifest.describe()
    documents = [opened.document(number).tolist() for number in range(len(opened))]
    check_content(opened)
    assert documents == [document.tolist() for document in random_documents(list(LENGTHS), VOCAB)]


def load_and_use(path: Path) -> str:
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode_batch(
        ["w5 \u2603 zz", "", "a b ab [MASK]", "\u00e9\u0301 \u4e2d", "A\0\u200bb </s><mask>"]
    ).ids
    forbidden = {*tokenizer.special_ids} - {tokenizer.unk_id}
    assert all(0 <= id_ < tokenizer.vocab_size and id_ not in forbidden for id_ in ids.tolist())
    return tokenizer.fingerprint


def read_sealed_checkpoint(folder: Path) -> None:
    """Read a checkpoint after making its manifest match its files, as an attacker would."""
    seal(folder / CHECKPOINT)
    read_checkpoint(folder / "checkpoints").build_reference(torch.float32)


def read_model(folder: Path) -> None:
    imported = read_folder(folder)
    shape = model_shape(Settings(model=imported.model), vocab_size=imported.tokenizer.vocab_size)
    to_internal(imported.weights, shape, TABLES[imported.layout])


def read_settings(arguments: list[str], folder: Path, *, world_size: int = 1) -> None:
    """Parse a command line; accepted settings must be finite and survive saving."""
    settings = parse_command_line(arguments, world_size=world_size).settings
    values = [value for section in asdict(settings).values() for value in section.values()]
    assert all(math.isfinite(value) for value in values if isinstance(value, float))
    assert all(abs(value) < 2**63 for value in values if isinstance(value, int))
    write_record(settings, folder / "record.yaml")
    assert read_record(folder / "record.yaml") == settings


def write_all_settings(folder: Path) -> None:
    good.write_json(folder / "run.yaml", asdict(Settings()))  # JSON is YAML


def read_yaml(folder: Path) -> None:
    required = ["--data-path", "corpus", "--tokenizer-model", "tokenizer"]
    read_settings([*required, "--config", str(folder / "run.yaml")], folder)


def tokenizer_file(name: str, write: Callable[[Path], Any]) -> Kind:
    """Return the kind of a tokenizer that is a single file."""

    def write_alone(folder: Path) -> None:
        write(folder)
        for path in folder.iterdir():
            if path.name != name:
                path.unlink()

    return Kind(write_alone, lambda folder: load_and_use(folder / name), 65)


KINDS = {
    "corpus": Kind(write_small_corpus, check_corpus, 65),
    "corpus of several shards": Kind(lambda folder: write_small_corpus(folder, shard_bytes=8), check_corpus, 65),
    "tokenizer": Kind(
        lambda folder: good.write_tokenizer(folder / "tokenizer"), lambda folder: load_and_use(folder / "tokenizer"), 65
    ),
    "tokenizer.json": tokenizer_file("tokenizer.json", good.write_tokenizer),
    "vocab.txt": tokenizer_file("vocab.txt", good.write_tokenizer),
    "tokenizer.model": tokenizer_file("tokenizer.model", lambda place: write_sentencepiece(place / "tokenizer.model")),
    "checkpoint": Kind(save_model, read_sealed_checkpoint, 78),
    "model": Kind(good.write_model, read_model, 78),
    "neobert model": Kind(good.write_neobert, read_model, 78),
    "YAML": Kind(write_all_settings, read_yaml, 2),
}
