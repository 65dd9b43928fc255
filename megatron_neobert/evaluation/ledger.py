"""The ledger of an evaluation: one JSON line per finished unit of work, by a key of all that the unit depends on.

A unit is a mapping: fingerprint of the model, hash of the data, settings, weights it starts from. Its key is a hash of
this mapping. Same key = done; nothing else decides. Units of other settings, models or data are added beside those that
are there, so that an evaluation can be extended, and changed data is measured again.

Each line names the machine and the versions that measured the unit. Beside the ledgers, each evaluation writes one JSON
record per model, which `neobert report` gathers.
"""

import fcntl
import hashlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
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
Line = dict[str, Any]  # of a ledger: key, unit, result, origin (machine and versions of the measurement)


def key_of(unit: Unit) -> str:
    """Return sixteen digits that are equal for equal units; tuples and lists are equal."""
    return hashlib.sha256(json.dumps(unit, sort_keys=True).encode()).hexdigest()[:16]


class Ledger:
    """The finished units of one folder, in the order in which they were added last.

    Attributes:
        whole_bytes: Size of the whole lines that were read.
        lines: Key -> line, as it would be read from the file.
    """

    def __init__(self, folder: Path, device: torch.device | str | None = None) -> None:
        """Read the ledger of a folder; a last line that a kill cut short is not part of it.

        Args:
            device: Device that computes the units that are added; default: a GPU where there is one.

        Raises:
            DataError: A whole line is not an entry of a ledger.
        """
        self.path, self._device = folder / LEDGER, device
        self.lines: dict[str, Line] = {}
        content = self.path.read_bytes() if self.path.exists() else b""
        self.whole_bytes = content.rfind(b"\n") + 1
        for number, line in enumerate(content[: self.whole_bytes].splitlines(), 1):
            try:
                entry = parse_json(line)
                entry = {"origin": {"machine": "unknown", "versions": {}}, **dict(entry)}  # earlier commits have none
                self._put({"key": entry["key"]} | {name: dict(entry[name]) for name in ("unit", "result", "origin")})
            except (ValueError, TypeError, KeyError) as error:
                raise DataError(
                    f"{self.path}, line {number}: not an entry of a ledger ({error}); remove the file to measure again."
                ) from error

    def find(self, unit: Unit) -> dict[str, Any] | None:
        """Return the result of a unit, or None if the unit is not finished."""
        line = self.lines.get(key_of(unit))
        return None if line is None else line["result"]

    def add(self, unit: Unit, result: Mapping[str, Any], origin: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Append a finished unit, on disk when this returns, and return its result as it would be read again.

        Args:
            origin: Machine and versions of the measurement; default: those of this process.
        """
        line = {"key": key_of(unit), "unit": unit, "result": result, "origin": origin or self._this_process}
        entry = parse_json(json.dumps(line))
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(entry) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        self._put(entry)
        return dict(entry["result"])

    @cached_property
    def _this_process(self) -> dict[str, Any]:
        return {"machine": describe_machine(self._device), "versions": versions()}

    def _put(self, entry: Line) -> None:
        self.lines.pop(entry["key"], None)
        self.lines[entry["key"]] = entry


@contextmanager
def open_ledger(folder: Path, device: torch.device | str | None = None) -> Iterator[Ledger]:
    """Hold the ledger of a folder, which is created, for adding; other commands may only read it meanwhile.

    Args:
        device: See `Ledger`.

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
        ledger = Ledger(folder, device)
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
    lines: Iterable[Line],
) -> None:
    """Write the record of one evaluation of one model, whole or not at all.

    Args:
        kind: pseudo_perplexity, throughput, glue, ner, mteb or contrastive.
        folder: The model's folder.
        settings: Everything that another run needs to give the same numbers, the seed included.
        results: Plain numbers, strings, lists and dicts.
        lines: Lines of ledgers that the results are from; the record names the machines and versions that measured.
    """
    record = {
        "kind": kind,
        "model": {"name": folder.resolve().name, "fingerprint": fingerprint(folder)},
        "command": f"{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}",
        "settings": settings,
        "results": results,
        **origin_of(lines),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(record, indent=2) + "\n")


def origin_of(lines: Iterable[Line]) -> dict[str, Any]:
    """Return machine and versions of the measurements; where lines differ, all of their values."""
    origins = [line["origin"] for line in lines]
    names = dict.fromkeys(name for origin in origins for name in origin["versions"])
    found = {name: dict.fromkeys(o["versions"][name] for o in origins if name in o["versions"]) for name in names}
    return {
        "machine": "; ".join(dict.fromkeys(origin["machine"] for origin in origins)),
        "versions": {name: ", ".join(values) for name, values in found.items()},
    }


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
