"""Recipes: the YAML files that come with the package, known by their names, such as tiny or sizes/17m."""

from pathlib import Path

import megatron_neobert

_FOLDER = Path(megatron_neobert.__file__).with_name("configs")


def recipes() -> list[str]:
    """The names of all."""
    return sorted(str(path.relative_to(_FOLDER).with_suffix("")) for path in _FOLDER.rglob("*.yaml"))


def find_config(text: str) -> Path:
    """The file that a user names; or where there is none, the recipe of this name."""
    own = _FOLDER / f"{text}.yaml"
    return own if own.is_file() and not Path(text).is_file() else Path(text)
