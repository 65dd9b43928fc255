"""Fixture of the tests of preprocessing."""

from pathlib import Path

import pytest
from unit.data.preprocess_workspace import Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)
