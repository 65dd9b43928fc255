"""Fixtures for tests of inspection."""

import pytest
from unit.inspection.small_runs import write_corpora


@pytest.fixture(scope="session")
def corpora(tmp_path_factory):
    """A folder with vocab.txt and the corpora P and Q."""
    return write_corpora(tmp_path_factory.mktemp("inspection"))
