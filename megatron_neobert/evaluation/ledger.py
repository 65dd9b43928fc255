"""The ledger of an evaluation: one JSON line per finished unit of work, by a key of all that the unit depends on.

A unit is a mapping: fingerprint of the model, hash of the data, settings, weights it starts from. Its key is a hash of
this mapping. Same key = done; nothing else decides. Units of other settings, models or data are added beside those that
are there, so that an evaluation can be extended, and changed data is measured again.

Beside the ledgers, each evaluation writes one JSON record per model, which `neobert report` gathers.
"""

import fcntl
import hashlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import megatron_neobert
from megatron_neobert.errors import DataError, OutputError
from megatron_neobert.evaluation.models import choose_device, fingerprint
from megatron_neobert.runtime.atomic_files import lock_if_possible, read_text, replace_file
from megatron_neobert.text import parse_json

LEDGER = "ledger.jsonl"
_PACKAGES = ("torch", "transformers", "sentence-transformers", "mteb", "datasets", "scikit-learn", "seqeval")

Unit = Mapping[str, Any]


def key_of(unit: Unit) -> str:
    """Return sixteen digits that are equal for equal units; tuples and lists are equal."""
    return hashlib.sha256(json.dumps(unit, sort_keys=True).encode()).hexdigest()[:16]


class Ledger:
    """The finished units of one folder, in the order in which they were added last.

    Attributes:
        whole_bytes: Size of the whole lines that were read.
        lines: Key -> a mapping with the entries `key`, `unit` and `result`, as they would be read from the file.
    """

    def __init__(self, folder: Path) -> None:
        """Read the ledger of a folder; a last line that a kill cut short is not part of it.

        Raises:
            DataError: A whole line is not an entry of a ledger.
        """
        self.path = folder / LEDGER
        self.lines: dict[str, dict[str, Any]] = {}
        content = self.path.read_bytes() if self.path.exists() else b""
        self.whole_bytes = content.rfind(b"\n") + 1
        for number, line in enumerate(content[: self.whole_bytes].splitlines(), 1):
            try:
                entry = parse_json(line)
                self._put({"key": entry["key"], "unit": dict(entry["unit"]), "result": dict(entry["result"])})
            except (ValueError, TypeError, KeyError) as error:
                raise DataError(
                    f"{self.path}, line {number}: not an entry of a ledger ({error}); remove the file to measure again."
                ) from error

    def find(self, unit: Unit) -> dict[str, Any] | None:
        """Return the result of a unit, or None if the unit is not finished."""
        line = self.lines.get(key_of(unit))
        return None if line is None else line["result"]

    def add(self, unit: Unit, result: Mapping[str, Any]) -> dict[str, Any]:
        """Append a finished unit, on disk when this returns, and return its result as it would be read again."""
        entry = parse_json(json.dumps({"key": key_of(unit), "unit": unit, "result": result}))
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(entry) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        self._put(entry)
        return dict(entry["result"])

    def _put(self, entry: dict[str, Any]) -> None:
        self.lines.pop(entry["key"], None)
        self.lines[entry["key"]] = entry


@contextmanager
def open_ledger(folder: Path) -> Iterator[Ledger]:
    """Hold the ledger of a folder, which is created, for adding; other commands may only read it meanwhile.

    Raises:
        OutputError: Another command holds the ledger.
        DataError: A whole line is not an entry of a ledger.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("ab") as file:
        try:
            lock_if_possible(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(
                f"{folder}: another command is writing these results; wait for it, or name another --output."
            ) from None
        ledger = Ledger(folder)
        if ledger.path.exists():
            os.truncate(ledger.path, ledger.whole_bytes)  # a line that a kill cut short
        yield ledger


# --- records


def write_record(
    path: Path,
    kind: str,
    *,
    folder: Path,
    settings: Mapping[str, Any],
    results: Mapping[str, Any],
    device: torch.device | str | None = None,
) -> None:
    """Write the record of one evaluation of one model, whole or not at all.

    Args:
        kind: pseudo_perplexity, throughput, glue, ner, mteb or contrastive.
        folder: The model's folder.
        settings: Everything that another run needs to give the same numbers, the seed included.
        results: Plain numbers, strings, lists and dicts.
        device: Device that computed; default: a GPU where there is one.
    """
    record = {
        "kind": kind,
        "model": {"name": folder.resolve().name, "fingerprint": fingerprint(folder)},
        "command": f"{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}",
        "settings": settings,
        "results": results,
        "machine": describe_machine(device),
        "versions": versions(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(record, indent=2) + "\n")


def read_record(path: Path) -> dict[str, Any]:
    """Return a record as it was written."""
    content: dict[str, Any] = parse_json(read_text(path))
    return content


def versions() -> dict[str, str]:
    """Return the versions of this project, Python, and the packages that results depend on."""
    found = {"megatron_neobert": megatron_neobert.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def describe_machine(device: torch.device | str | None = None) -> str:
    """Return the GPU's name, or the processor's architecture and number of threads."""
    chosen = choose_device(str(device) if device is not None else None)
    if chosen.type == "cuda":
        return torch.cuda.get_device_name(chosen)
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'s' * (threads > 1)}"
