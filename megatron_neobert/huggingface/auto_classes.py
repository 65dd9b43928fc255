"""Let transformers load `neobert` folders with this package's classes, without executing code of the folder.

After registration, AutoModel and the other auto classes, pipelines and SentenceTransformer load such a folder with
trust_remote_code=False.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub.constants
import transformers
from transformers.utils import logging as transformers_logging

from megatron_neobert.errors import ConversionError, NeoBERTError, short_reason
from megatron_neobert.huggingface import modeling_neobert


def register_neobert() -> None:
    """Register the model type `neobert` with transformers in this process; repeated calls have no effect."""
    for auto_class, path in modeling_neobert.AUTO_MAP.items():
        cls = getattr(modeling_neobert, path.split(".")[1])
        key = cls.model_type if auto_class == "AutoConfig" else modeling_neobert.NeoBERTConfig
        getattr(transformers, auto_class).register(key, cls, exist_ok=True)


@contextmanager
def loading(folder: Path, class_name: str) -> Iterator[None]:
    """Prepare transformers for loading a local folder in a `with` block. Errors in the block become ConversionError.

    A NeoBERTError is not converted. In the block, `neobert` folders are loaded with this package's classes, the network
    is not used, and transformers prints no reports. Progress bars stay disabled afterwards. `class_name` is for
    messages.
    """
    register_neobert()
    offline = huggingface_hub.constants.HF_HUB_OFFLINE
    huggingface_hub.constants.HF_HUB_OFFLINE = True  # the environment variable is read only when it is imported
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    except NeoBERTError:
        raise
    except Exception as error:  # with an invalid config.json, transformers raises almost any exception
        raise ConversionError(
            f"{folder}: transformers cannot load it as {class_name} ({short_reason(error)}); use the version in "
            "constraints.txt, fetch the folder again, or name a model that transformers has in this class."
        ) from error
    finally:
        huggingface_hub.constants.HF_HUB_OFFLINE = offline
        transformers_logging.set_verbosity(verbosity)
