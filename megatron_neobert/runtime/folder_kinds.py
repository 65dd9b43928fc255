"""Remedies for messages about a folder of the wrong kind. The names of its files show the kind."""

from pathlib import Path

from megatron_neobert.errors import suggest_path

MANIFEST = "MANIFEST.json"  # of a checkpoint


def why_no_model(folder: Path) -> str:
    """Return a message that says why `folder` is not a Hugging Face folder, and what to convert or name instead."""
    if any(folder.glob(f"iter_*/{MANIFEST}")):
        return (
            f"it is the --save folder of a run; convert its newest checkpoint: neobert convert megatron-to-hf --load "
            f"{folder} --output DIR"
        )
    if (folder / MANIFEST).is_file():
        return f"it is a checkpoint; convert it: neobert convert megatron-to-hf --load {folder} --output DIR"
    if folder.is_dir():
        return "a folder without config.json; name a Hugging Face folder"
    return f"no such folder{suggest_path(folder, otherwise=';')} name a Hugging Face folder"
