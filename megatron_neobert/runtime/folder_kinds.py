"""The kind of a path that a command cannot use, for the remedy in its error message. Reads names of files only."""

from pathlib import Path


def remedy_for(path: Path, *, otherwise: str) -> str:
    """Return what `path` is and the command that makes a usable path of it, or `otherwise` if its kind is not known."""
    if path.is_dir() and any(path.glob("iter_*")):
        return (
            f"it is the --save folder of a run; convert its newest checkpoint: neobert convert megatron-to-hf --load "
            f"{path} --output DIR"
        )
    if path.is_dir() and path.name.startswith("iter_"):
        return f"it is a checkpoint; convert it: neobert convert megatron-to-hf --load {path.parent} --output DIR"
    if (path / "config.json").is_file():
        return (
            "it is a Hugging Face folder; make a checkpoint of it: neobert convert hf-to-megatron --load "
            f"{path} --output DIR"
        )
    if path.suffix in (".bin", ".idx", ".json") or path.with_name(f"{path.name}.idx").is_file():
        return "it is a corpus, which --data-path reads; " + otherwise
    return otherwise
