"""Fixtures: a small training checkpoint, its weights, and exported folders."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from saved_model import SavedModel, build_internal, convert, save_model
from torch import Tensor

from checkpoint_conversion.compare import Checks


@pytest.fixture
def internal() -> dict[str, Tensor]:
    """Weights of the saved model under the internal names; tests may change them."""
    return build_internal()


@pytest.fixture
def saved(tmp_path: Path) -> SavedModel:
    return save_model(tmp_path)


@pytest.fixture
def copy_of(exported: Callable[..., Any], tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies the export in a layout; tests may change the copy."""
    return lambda layout="eurobert": shutil.copytree(exported(layout=layout)[0], tmp_path / "model")


@pytest.fixture
def model(copy_of: Callable[..., Path]) -> Path:
    return copy_of()


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Checks]]:
    """Return a function that exports the saved model with the given options, once for each combination."""
    root = tmp_path_factory.mktemp("exports")
    saved = save_model(root)

    @cache
    def export_with(**options: Any) -> tuple[Path, Checks]:
        folder = root / f"model-{len(list(root.iterdir()))}"
        return folder, convert(saved, folder, **options)

    return export_with
