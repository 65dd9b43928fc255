"""Results as files: what was measured, of which model, by which command, with which versions.

Every evaluation writes one JSON record per model; `neobert report` gathers them. A record is replaced as a whole.
"""

import fcntl
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
from megatron_neobert.errors import ConfigError, DataError, OutputError
from megatron_neobert.evaluation.encoders import choose_device, fingerprint
from megatron_neobert.runtime.atomic_files import lock_if_possible, read_text, replace_file

_PACKAGES = ("torch", "transformers", "sentence-transformers", "mteb", "datasets", "scikit-learn", "optuna", "seqeval")


def write_record(
    path: Path,
    kind: str,
    *,
    folder: Path,
    settings: dict[str, Any],
    results: dict[str, Any],
    device: torch.device | str | None = None,
) -> None:
    """Writes one record.

    Args:
        kind: pseudo_perplexity, throughput, glue, ner, mteb or contrastive.
        folder: Of the model.
        settings: All that another run needs to give the same numbers, the seed included.
        results: Plain numbers, strings, lists and dicts.
        device: That computed; default: a GPU where there is one.
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


@contextmanager
def hold(lock: Path) -> Iterator[None]:
    """Holds a lock file, made with its folder: two commands that add to the same results would spoil them.

    Raises:
        OutputError: Another command holds it.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("ab") as file:
        try:
            lock_if_possible(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(
                f"{lock.parent}: another command is writing these results; wait for it, or name another --output."
            ) from None
        yield


class LineFile:
    """JSON objects, one a line, each on disk when `add` returns; a last line that a kill cut short is dropped."""

    def __init__(self, path: Path) -> None:
        """Reads what is there.

        Raises:
            DataError: A whole line is none of these.
        """
        self.path = path
        self.lines: list[dict[str, Any]] = []
        content = path.read_bytes() if path.exists() else b""
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)
        for number, line in enumerate(content[:whole].splitlines(), 1):
            try:
                self.lines.append(dict(json.loads(line)))
            except (ValueError, TypeError) as error:
                raise DataError(
                    f"{path}, line {number}: not a result ({error}); remove the file to measure again."
                ) from error

    def add(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        self.lines.append(line)


def refuse_changed_settings(place: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ConfigError, with all that differs, if what is at `place` was made with other settings."""
    if changed := changed_settings(before, now):
        raise ConfigError(
            f"{place} was made with other settings ({'; '.join(changed)}), and new results cannot stand beside the old "
            "ones; use those settings, or name another --output."
        )


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What differs, entry by entry also within sections; `before` was read from JSON."""
    found = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), json.loads(json.dumps(now.get(name)))  # as it would have been read
        if isinstance(old, dict) and isinstance(new, dict):
            found += changed_settings(old, new, f"{prefix}{name}.")
        elif old != new:
            found.append(f"{prefix}{name} was {old!r} and is now {new!r}")
    return found


def read_record(path: Path) -> dict[str, Any]:
    """One record, as written."""
    content: dict[str, Any] = json.loads(read_text(path))
    return content


def versions() -> dict[str, str]:
    """Of this project and of the packages that results depend on."""
    found = {"megatron_neobert": megatron_neobert.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def describe_machine(device: torch.device | str | None = None) -> str:
    """The GPU's name, or the processor's architecture and number of threads."""
    chosen = choose_device(str(device) if device is not None else None)
    if chosen.type == "cuda":
        return torch.cuda.get_device_name(chosen)
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'s' * (threads > 1)}"
