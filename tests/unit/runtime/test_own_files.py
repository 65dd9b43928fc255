"""Files and folders with a name that a command derives are used, replaced and deleted only if they are ours."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from unit.data.preprocess_workspace import Workspace
from unit.data.small_corpus import numbered_tokenizer, random_documents, write_corpus

from megatron_neobert.checkpoint.folder import check_folders, claim
from megatron_neobert.commands.adopt import adopt_corpus
from megatron_neobert.commands.find_duplicates import FindSettings, list_duplicates
from megatron_neobert.config.schema import CheckpointConfig
from megatron_neobert.data.corpus.object_storage import ObjectStorage
from megatron_neobert.errors import OutputError
from megatron_neobert.evaluation.fine_tune import fine_tune
from megatron_neobert.evaluation.ledger import open_ledger
from megatron_neobert.runtime.atomic_files import build_folder
from megatron_neobert.runtime.own_files import claim_folder


def preprocess(folder: Path) -> None:
    workspace = Workspace(folder)
    workspace.add_texts("a.jsonl", "hello")
    workspace.run(overwrite=True)


def write_small_corpus(folder: Path) -> str:
    write_corpus(folder / "A", random_documents([50], 100))
    return str(folder / "A")


def adopt_in(folder: Path) -> None:
    prefix = write_small_corpus(folder)
    (folder / "A.json").unlink()
    adopt_corpus(prefix, numbered_tokenizer(100))


def find(folder: Path, **changes: Any) -> None:
    prefixes = (write_small_corpus(folder),)
    list_duplicates(FindSettings(prefixes=prefixes, output=folder / "list", overwrite=True, **changes))


def start_training(folder: Path) -> None:
    check_folders(CheckpointConfig(save=str(folder)))
    with claim(str(folder)):
        pass


def evaluate(folder: Path) -> None:
    with open_ledger(folder) as ledger:
        ledger.add({}, {})


def read_remote(folder: Path) -> None:
    with ObjectStorage(folder / "cache").locked(folder / "cache" / "indexes" / "a"):
        pass


def build(folder: Path) -> None:
    with build_folder(folder / "output"):
        pass


# (derived name, the command, or the function by which several commands write)
PATHS = [
    ("out/run_content_document.partial", preprocess),
    ("A_documents.partial", adopt_in),
    ("list.partial", find),
    ("A.attributes.partial", lambda folder: find(folder, add_attribute="size")),
    (".tmp-iter_0000001", start_training),
    (".old-iter_0000001", start_training),
    ("run", lambda folder: fine_tune(SimpleNamespace(folder=folder / "run"))),
    ("cache", read_remote),
    ("output", build),
    ("out/run_content_document.partial/lock", preprocess),
    ("out/run_content_document.bin", preprocess),
    ("A_documents.idx", adopt_in),
    ("list", find),
    ("lock", start_training),
    ("lock", evaluate),
    ("ledger.jsonl", evaluate),
    ("cache/locks/{}", read_remote),
]


def put_in_the_way(path: Path, kind: str, thesis: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    match kind:
        case "link to a folder":
            path.symlink_to(thesis.parent)
        case "folder":
            path.mkdir()
            (path / "job.json").write_text("{}")
            (path / "thesis.tex").write_text("my thesis")
        case "file":
            path.write_text("my thesis")
        case "link to a file":
            path.symlink_to(thesis)
        case "pipe":
            os.mkfifo(path)


@pytest.mark.parametrize("kind", ["link to a folder", "folder", "file", "link to a file", "pipe"])
@pytest.mark.parametrize(("name", "command"), PATHS, ids=[name for name, _ in PATHS])
def test_what_is_not_ours_ends_a_command_with_73_and_its_path_and_does_not_change(tmp_path, name, command, kind):
    (tmp_path / "home").mkdir()
    thesis, work = tmp_path / "home" / "thesis.tex", tmp_path / "work"
    thesis.write_text("my thesis")
    work.mkdir()
    if "/lock" in name:
        claim_folder(work / name.split("/lock")[0])
    paths = [work / name.format(number) for number in range(1024)] if "{}" in name else [work / name]
    for path in paths:
        put_in_the_way(path, kind, thesis)
    with pytest.raises(OutputError) as caught:
        command(work)
    assert caught.value.exit_code == 73 and any(str(path) in str(caught.value) for path in paths)
    assert thesis.read_text() == "my thesis" and [*thesis.parent.iterdir()] == [thesis]
    content = {"folder": paths[0] / "thesis.tex", "file": paths[0]}.get(kind)
    assert content is None or content.read_text() == "my thesis"
    assert kind != "pipe" or paths[0].is_fifo()
