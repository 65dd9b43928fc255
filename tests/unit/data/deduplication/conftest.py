"""Corpora for tests of near-duplicates."""

import pytest
from unit.data.deduplication.planted import Planted, plant


@pytest.fixture(scope="session")
def planted(shared_data, tmp_path_factory) -> Planted:
    """600 passages of books, less those below 60 tokens, and 200 copies of some."""
    return plant(tmp_path_factory.mktemp("planted"), shared_data, originals=600, copies=200)
