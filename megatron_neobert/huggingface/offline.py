"""Keeps the Hugging Face libraries from the network."""

import os
import sys


def go_offline() -> None:
    """Have the Hugging Face libraries of this process read local files alone, whether they are imported yet or not."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    for name in ("huggingface_hub.constants", "datasets.config"):  # which read the variables once
        if name in sys.modules:
            sys.modules[name].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
