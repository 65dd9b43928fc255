"""Reading of a local data set without following what its own files name: other folders, pipes or the network."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from huggingface_hub import DatasetCard

from megatron_neobert.errors import DataError, NeoBERTError, short_reason
from megatron_neobert.runtime.atomic_files import read_text

_CARDS = ("README.md", ".huggingface.yaml")  # whose data_files `datasets` obeys


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Read a file or a folder of data in this block.

    Raises:
        DataError: The data cannot be read, or `check_data` refuses the folder.
    """
    try:
        check_data(path)
        yield
    except NeoBERTError:
        raise
    except Exception as error:  # damaged Parquet, Arrow or JSON makes the libraries raise almost anything
        raise DataError(f"{path} cannot be read ({short_reason(error)}); fetch it again.") from error


def check_data(path: Path) -> None:
    """Refuse a file or folder of data that names files elsewhere, or holds anything but files.

    Raises:
        DataError: A pipe, a socket or a device is there; or a data set's card or state names a URL or a file outside
            of the folder.
    """
    for found in (path, *sorted(path.rglob("*"))):
        if found.exists() and not (found.is_file() or found.is_dir()):
            raise DataError(f"{found} is a pipe, a socket or a device; data is read from files. Remove it.")
    for name in _CARDS:
        for card in path.rglob(name):
            _check_names(card, list(_texts_in(_data_files(card))))
    for state in path.rglob("state.json"):
        entries = json.loads(read_text(state)).get("_data_files") or []
        _check_names(state, [str(entry.get("filename")) for entry in entries])


def _data_files(card: Path) -> list[Any]:
    """Return the data_files of each configuration that the card of a data set declares."""
    text = read_text(card)
    content = DatasetCard(text).data.to_dict() if card.suffix == ".md" else yaml.safe_load(text)
    configs = content.get("configs") if isinstance(content, dict) else None
    return [config.get("data_files") for config in configs or [] if isinstance(config, dict)]


def _texts_in(value: Any) -> Iterator[str]:
    """Yield every text in nested lists and mappings."""
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts_in(inner)


def _check_names(file: Path, names: list[str]) -> None:
    for name in names:
        if "://" in name or name.startswith(("/", "~")) or ".." in PurePosixPath(name).parts:
            raise DataError(f"{file}: names {name!r:.80} as data, which is not a file of its folder. Remove the entry.")
