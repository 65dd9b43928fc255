"""Ledgers of finished work, and the JSON records of evaluations.

A ledger is a file with one JSON line per finished unit of work. A unit is a mapping of everything its result depends
on: fingerprint of the model, hash of the data, settings, starting weights. The key of a line is a hash of the unit. A
unit with a line under its key is finished; every other unit is measured and added. Lines are never removed, so an
evaluation can be extended, and changed data is measured again.

Each line names the machine and the package versions of its measurement. Each evaluation also writes one JSON record per
model, which `neobert report` collects.
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
from typing import IO, Any

import torch

import megatron_neobert
from megatron_neobert.errors import DataError, OutputError
from megatron_neobert.evaluation.models import choose_device
from megatron_neobert.huggingface.hub import model_name
from megatron_neobert.runtime.atomic_files import lock_if_possible, replace_file
from megatron_neobert.runtime.own_files import open_lock, open_own
from megatron_neobert.text import parse_json

LEDGER = "ledger.jsonl"
_LINE_BEGIN = b'{"key": "'
_PACKAGES = ("torch", "transformers", "sentence-transformers", "mteb", "datasets", "scikit-learn", "seqeval")

Unit = Mapping[str, Any]
Line = dict[str, Any]  # keys: unit, result, origin (machine and versions of the measurement)


def key_of(unit: Unit) -> str:
    """Return the key of a unit, 16 hexadecimal digits; a tuple and a list with the same values have the same key."""
    return hashlib.sha256(json.dumps(unit, sort_keys=True).encode()).hexdigest()[:16]


class Ledger:
    """Finished units of one folder, opened by `open_ledger`. `lines` maps keys to the lines of the file."""

    def __init__(self, path: Path, stream: IO[bytes], device: torch.device | str | None) -> None:
        self.path, self._stream, self._device = path, stream, device
        self.lines: dict[str, Line] = {}
        stream.seek(0)
        *complete, incomplete = stream.read().split(b"\n")
        for number, text in enumerate(complete, 1):
            try:
                line = dict(parse_json(text))
                self.lines[line["key"]] = {name: dict(line[name]) for name in ("unit", "result", "origin")}
            except (ValueError, TypeError, KeyError) as error:
                raise DataError(
                    f"{path}, line {number}: not an entry of a ledger ({error}); remove the file to measure again."
                ) from error
        if not _LINE_BEGIN.startswith(incomplete[: len(_LINE_BEGIN)]):
            raise OutputError(f"{path} is not a ledger of this project; move it away")
        # So that the next line does not continue the line of a killed process.
        stream.truncate(stream.tell() - len(incomplete))

    def find(self, unit: Unit) -> dict[str, Any] | None:
        """Return the result of a unit, or None if the unit is not finished."""
        line = self.lines.get(key_of(unit))
        return None if line is None else line["result"]

    def add(self, unit: Unit, result: Mapping[str, Any]) -> dict[str, Any]:
        """Append a finished unit to the file and to `lines`, wait until the file is on disk, and return the result.

        The returned result has passed through JSON, so tuples are lists.
        """
        line = {"key": key_of(unit), "unit": unit, "result": result, "origin": self.origin}
        text = json.dumps(line)
        self._stream.write(f"{text}\n".encode())
        self._stream.flush()
        os.fsync(self._stream.fileno())
        stored = parse_json(text)
        self.lines[stored["key"]] = stored
        return dict(stored["result"])

    @cached_property
    def origin(self) -> dict[str, Any]:
        """Machine and package versions of this process."""
        return describe_process(self._device)


@contextmanager
def lock_results(folder: Path) -> Iterator[None]:
    """Create a folder of results, and lock it in the `with` block if the file system has locks.

    Raises OutputError if another command holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open_lock(folder / "lock") as file:
        try:
            lock_if_possible(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(
                f"{folder}: another command is writing these results; wait for it, or name another --output."
            ) from None
        yield


@contextmanager
def open_ledger(folder: Path, device: torch.device | str | None = None) -> Iterator[Ledger]:
    """Lock a folder with `lock_results`, and yield its ledger.

    An incomplete last line is removed from the file. Lines that are added name the machine of `device` (None: the GPU
    if there is one, else the CPU). Raises DataError if a complete line is not an entry, and OutputError if an
    incomplete last line is not the beginning of an entry.
    """
    with lock_results(folder), open_own(folder / LEDGER) as stream:
        yield Ledger(folder / LEDGER, stream, device)


# --- records


def write_record(
    path: Path,
    *,
    folder: Path,
    fingerprint: str,
    settings: Mapping[str, Any],
    results: Mapping[str, Any],
    origin: Mapping[str, Any],
) -> None:
    """Write KIND.json, the record of one evaluation of the model in `folder`, whole or not at all.

    `fingerprint` belongs to the measured model; the folder may have been replaced since. `settings` contains everything
    needed to repeat the measurement, and `origin` comes from `describe_process` or `origin_of`.
    """
    record = {
        "kind": path.stem,
        "model": {"name": model_name(folder), "fingerprint": fingerprint},
        "command": f"{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}",
        "settings": settings,
        "results": results,
        **origin,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(record, indent=2) + "\n")


def origin_of(lines: Iterable[Line]) -> dict[str, Any]:
    """Return {"machine": ..., "versions": {package: ...}} for ledger lines. Differing values are joined."""
    machines, versions = dict[str, None](), dict[str, dict[str, None]]()
    for line in lines:
        machines[line["origin"]["machine"]] = None
        for package, version in line["origin"]["versions"].items():
            versions.setdefault(package, {})[version] = None
    joined = {package: ", ".join(distinct) for package, distinct in versions.items()}
    return {"machine": "; ".join(machines), "versions": joined}


def describe_process(device: torch.device | str | None) -> dict[str, Any]:
    """Return the machine and the versions of this project, of Python, and of packages that affect results.

    The machine is the name of the GPU, or "x86_64 CPU, 8 threads" for a CPU. None selects the GPU if there is one.
    """
    device = choose_device(device)
    threads = torch.get_num_threads()
    machine = f"{platform.machine()} CPU, {threads} thread{'s' * (threads > 1)}"
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    versions = {"megatron_neobert": megatron_neobert.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {"machine": machine, "versions": versions}
