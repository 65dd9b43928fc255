"""Lets transformers load `neobert` folders with this project's class: no remote code, and no file that lies in them.

Once registered, AutoModel and its kind, pipelines, SentenceTransformer and everything else built on them load such a
folder with trust_remote_code=False.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub.constants
import transformers
from transformers.utils import logging as transformers_logging

from megatron_neobert.errors import ConversionError, short_reason
from megatron_neobert.huggingface import modeling_neobert


def register_neobert() -> None:
    """Makes transformers of this process know the model type `neobert`; may be called again."""
    for auto_class, path in modeling_neobert.AUTO_MAP.items():
        own = getattr(modeling_neobert, path.split(".")[1])
        if auto_class == "AutoConfig":
            transformers.AutoConfig.register(own.model_type, own, exist_ok=True)
        else:
            getattr(transformers, auto_class).register(modeling_neobert.NeoBERTConfig, own, exist_ok=True)


@contextmanager
def loading(folder: Path, what: str) -> Iterator[None]:
    """Load a local folder in this block: with our class, without a network, without progress bars and load reports.

    Raises:
        ConversionError: transformers cannot load the folder.
    """
    register_neobert()
    offline = huggingface_hub.constants.HF_HUB_OFFLINE
    huggingface_hub.constants.HF_HUB_OFFLINE = True  # the environment variable was read when the package was imported
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    except ConversionError:
        raise
    except Exception as error:  # a strange config.json makes transformers raise almost anything
        raise ConversionError(
            f"{folder}: transformers cannot load it as {what} ({short_reason(error)}); use the version in "
            "constraints.txt, or fetch the folder again."
        ) from error
    finally:
        huggingface_hub.constants.HF_HUB_OFFLINE = offline
        transformers_logging.set_verbosity(verbosity)
