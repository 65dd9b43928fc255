"""Remedies in the message about a folder of the wrong kind. The kind is read from the names of its files."""

from pathlib import Path

MANIFEST = "MANIFEST.json"  # of a checkpoint


def remedy_for_model(folder: Path) -> str:
    """Return how to get a Hugging Face folder from a run or a checkpoint, or the advice to name such a folder."""
    if any(folder.glob(f"iter_*/{MANIFEST}")):
        return (
            f"it is the --save folder of a run; convert its newest checkpoint: neobert convert megatron-to-hf --load "
            f"{folder} --output DIR"
        )
    if (folder / MANIFEST).is_file():
        return f"it is a checkpoint; convert it: neobert convert megatron-to-hf --load {folder} --output DIR"
    return "name a Hugging Face folder"


def remedy_for_run(folder: Path, *, otherwise: str) -> str:
    """Return how to get a checkpoint from a Hugging Face folder; for any other path return `otherwise`."""
    if (folder / "config.json").is_file():
        return (
            "it is a Hugging Face folder; make a checkpoint of it: neobert convert hf-to-megatron --load "
            f"{folder} --output DIR"
        )
    return otherwise
