"""The records below some folders, numbered as the runs of a report, with one name per model."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_neobert.errors import DataError, MissingInputError

# Kind -> the command that writes it, in the order of the report.
KINDS = {
    "pseudo_perplexity": "tools/evaluate_pseudo_perplexity.py",
    "throughput": "tools/benchmark_throughput.py",
    "glue": "tools/evaluate_glue.py",
    "mteb": "tools/evaluate_mteb.py",
    "contrastive": "tools/finetune_contrastive.py",
}
_FIELDS = {"model": dict, "command": str, "settings": dict, "results": dict, "machine": str, "versions": dict}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One record."""

    number: int  # from 1
    kind: str
    model: str  # unlike any other model's name of this kind
    path: Path
    record: dict[str, Any]

    @property
    def results(self) -> dict[str, Any]:
        results: dict[str, Any] = self.record["results"]
        return results


def find_runs(folders: Sequence[Path]) -> list[Run]:
    """All records, kind by kind; where one kind has two models of one name, their folders tell them apart.

    Raises:
        MissingInputError: A folder does not exist, or no folder has a record.
        DataError: A file of a record's name is none.
    """
    for folder in folders:
        if not folder.is_dir():
            raise MissingInputError(f"--results {folder}: no such folder; name the --output of an evaluation.")
    found: list[tuple[str, Path, dict[str, Any]]] = []
    for kind in KINDS:
        paths = {path.resolve(): path for folder in folders for path in sorted(folder.rglob(f"{kind}.json"))}
        found += [(kind, path, _read(path, kind)) for path in paths.values()]
    if not found:
        wanted = ", ".join(f"{kind}.json" for kind in KINDS)
        raise MissingInputError(f"--results {' '.join(map(str, folders))}: none of {wanted} is there; evaluate first.")
    names = [(kind, record["model"]["name"]) for kind, _, record in found]
    return [
        Run(
            number=number,
            kind=kind,
            model=name if names.count((kind, name)) == 1 else f"{name} ({path.parent})",
            path=path,
            record=record,
        )
        for number, ((kind, path, record), (_, name)) in enumerate(zip(found, names, strict=True), 1)
    ]


def _read(path: Path, kind: str) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8 or not JSON
        raise DataError(f"{path}: not JSON ({error}); remove it and measure again with {KINDS[kind]}.") from None
    whole = (
        isinstance(record, dict)
        and record.get("kind") == kind
        and all(isinstance(record.get(name), type_) for name, type_ in _FIELDS.items())
        and all(isinstance(record["model"].get(name), str) for name in ("name", "fingerprint"))
    )
    if not whole:
        raise DataError(f"{path}: not a record of kind {kind}; remove it and measure again with {KINDS[kind]}.")
    return record
