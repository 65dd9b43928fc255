"""Settings of the tiny model that the runs on several ranks train."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests_tiny import tiny_settings

from megatron_neobert.config.schema import Settings


@pytest.fixture
def settings(tiny_corpus: Any, tmp_path: Path) -> Callable[..., Settings]:
    """Builds the tiny run's settings; keyword arguments are `section={field: value}`."""

    def build(save: str = "run", **sections: dict[str, Any]) -> Settings:
        return tiny_settings(tiny_corpus, save=tmp_path / save, **sections)

    return build
