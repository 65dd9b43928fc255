"""Fixtures of the tests of what a person looks at."""

import pytest
from unit.inspection.batch_places import write_place


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A folder with vocab.txt and the corpora P and Q."""
    return write_place(tmp_path_factory.mktemp("inspection"))
