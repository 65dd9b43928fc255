"""Settings of the tiny runs of this folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests_tiny import tiny_settings

from megatron_neobert.config.schema import Settings


@pytest.fixture
def settings(tiny_corpus: Any, tmp_path: Path) -> Callable[..., Settings]:
    """Return a function that builds settings of a tiny run, which resumes; arguments are `section={field: value}`."""

    def build(save: str = "run", **sections: dict[str, Any]) -> Settings:
        run = tiny_settings(tiny_corpus, save=tmp_path / save, **sections)
        return run.with_section("checkpoint", load=run.checkpoint.save)

    return build
