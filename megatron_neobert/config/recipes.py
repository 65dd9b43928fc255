"""Recipes: YAML files that are installed with the package and found by name, such as `tiny` or `ablations/m8`."""

from pathlib import Path

import megatron_neobert

_FOLDER = Path(megatron_neobert.__file__).with_name("configs")


def recipes() -> list[str]:
    """Return the names of all recipes."""
    return sorted(str(path.relative_to(_FOLDER).with_suffix("")) for path in _FOLDER.rglob("*.yaml"))


def find_config(text: str) -> Path:
    """Return the path that the user gave, or the recipe of this name if there is no such file."""
    recipe = _FOLDER / f"{text}.yaml"
    return recipe if recipe.is_file() and not Path(text).is_file() else Path(text)
