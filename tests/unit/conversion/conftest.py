"""A small checkpoint in the format of training, and its weights."""

from pathlib import Path

import pytest
from saved_model import SHAPE, WORDS, SavedModel, build_reference
from torch import Tensor

from checkpoint_conversion.mapping import NEOBERT, to_internal


@pytest.fixture
def internal() -> dict[str, Tensor]:
    """Weights of the saved model under the internal names, free to be spoilt."""
    return to_internal(build_reference().state_dict(), SHAPE, NEOBERT)


@pytest.fixture
def saved(tmp_path: Path, internal: dict[str, Tensor]) -> SavedModel:
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("".join(f"{word}\n" for word in WORDS))
    model = SavedModel(save=tmp_path / "checkpoints", reference=build_reference(), vocabulary=vocabulary)
    model.write(internal)
    (model.save / "latest_checkpointed_iteration.txt").write_text("30")
    return model
