"""Small exported folders."""

from pathlib import Path

import pytest
from unit.conversion.saved_model import convert, save_model

from checkpoint_conversion.mapping import TABLES


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder of each layout, with weights so large that every token affects every other."""
    root = tmp_path_factory.mktemp("folders")
    saved = save_model(root)
    for layout in TABLES:
        convert(saved, root / layout, layout=layout, sentence_transformers=True, verified=False)
    return {layout: root / layout for layout in TABLES}
