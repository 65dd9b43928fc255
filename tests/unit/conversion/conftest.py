"""A small checkpoint in the format of training, its weights, and what it is exported as."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from saved_model import SHAPE, SavedModel, build_reference, convert, save_model
from torch import Tensor

from checkpoint_conversion.compare import Checks
from checkpoint_conversion.mapping import NEOBERT, to_internal


@pytest.fixture
def internal() -> dict[str, Tensor]:
    """Weights of the saved model under the internal names, free to be spoilt."""
    return to_internal(build_reference().state_dict(), SHAPE, NEOBERT)


@pytest.fixture
def saved(tmp_path: Path, internal: dict[str, Tensor]) -> SavedModel:
    return save_model(tmp_path, internal)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Checks]]:
    """The folder that the export of a checkpoint gives with some options, made once, and its comparison."""
    place = tmp_path_factory.mktemp("exports")
    saved = save_model(place, to_internal(build_reference().state_dict(), SHAPE, NEOBERT))

    @cache
    def make(**options: Any) -> tuple[Path, Checks]:
        folder = place / f"model-{len(list(place.iterdir()))}"
        return folder, convert(saved, folder, **options)

    return make
