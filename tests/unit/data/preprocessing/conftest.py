"""What the tests of preprocessing share."""

from pathlib import Path

import pytest
from unit.data.preprocess_place import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)
