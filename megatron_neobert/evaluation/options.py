"""What the commands of several evaluations read alike; without torch, so that --help answers at once."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_neobert.errors import ConfigError
from megatron_neobert.runtime.atomic_files import require_folder


def positive(text: str) -> int:
    """An argparse type."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def name_models(folders: Sequence[Path]) -> dict[str, Path]:
    """Name in the results -> folder.

    Raises:
        ConfigError: Two folders have one name.
        MissingInputError: A folder is not there, or is no model's.
    """
    models: dict[str, Path] = {}
    for folder in folders:
        require_folder("--model", folder, holding="config.json")
        if (name := folder.resolve().name) in models:
            raise ConfigError(f"--model: two folders are called {name}, as results are; rename one of them.")
        models[name] = folder
    return models
