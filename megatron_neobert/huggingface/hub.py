"""Models that a command line names: local folders, or models of the Hugging Face Hub, which are read from its cache."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_neobert.errors import ConfigError, MissingInputError, short_reason, suggest_path
from megatron_neobert.runtime.atomic_files import why_no_model

TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "spm.model",
    "sentencepiece.bpe.model",
    "vocab.json",
)
ALL_TOKENIZER_FILES = (
    *TOKENIZER_FILES,
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
_SUFFIXES_OF_TOKENIZERS = (".json", ".txt", ".model")
MODULE_FILES = ("modules.json", "[0-9]_*/config.json", "[0-9]_*/model.safetensors", "*sentence*.json")
# Patterns of every file that influences outputs. In subfolders, only the modules of sentence-transformers do: an ONNX
# export beside the model does not change the fingerprint.
FILES_OF_OUTPUT = (
    "config.json",
    "*.safetensors",
    *ALL_TOKENIZER_FILES,
    *MODULE_FILES,
    "model.safetensors.index.json",
)


def find_model(flag: str, model: Path, *, holding: str = "config.json") -> Path:
    """Return the folder of the model in `flag`'s value: a local folder, or [OWNER/]NAME[@REVISION] on the Hub.

    Raises MissingInputError if the model does not exist, if the Hub is needed but cannot be reached, or if the folder
    does not contain the file `holding`.
    """
    # A folder with an adapter is refused, and an ONNX export keeps the license.
    patterns = [*FILES_OF_OUTPUT, "adapter_config.json", "LICENSE"]
    cached = find_in_hub(flag, model, patterns)
    if cached:
        print(f"{model} of the Hugging Face Hub: {cached}", file=sys.stderr)
    folder = cached or model
    if not folder.is_dir() or not (folder / holding).exists():
        raise MissingInputError(f"{flag} {folder}: {why_no_model(folder)}.")
    return folder


def find_in_hub(flag: str, path: Path, patterns: Sequence[str]) -> Path | None:
    """Return a Hub model's folder in the local cache. Return None if `path` is not [OWNER/]NAME[@REVISION].

    Files that match `patterns` and that the cache lacks are downloaded; no pattern matches code or pickles. `path` is
    not taken as a name if it exists, if its first part exists, or if it ends like a tokenizer file.
    Raises MissingInputError if the model does not exist, or if it is not cached and the Hub cannot be reached.
    """
    name = re.fullmatch(r"((?:\w[\w.-]*/)?\w[\w.-]*)(?:@(.+))?", str(path))
    if name is None or path.exists() or Path(path.parts[0]).exists() or path.suffix in _SUFFIXES_OF_TOKENIZERS:
        return None
    from huggingface_hub import snapshot_download  # slow to import
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name[1], revision=name[2], allow_patterns=list(patterns)))
    except LocalEntryNotFoundError as error:
        problem = "the Hub does not answer" if isinstance(error.__cause__, HfHubHTTPError) else "no network"
        raise MissingInputError(
            f"{problem}: {flag} {path} is no path of this machine, and the Hugging Face Hub, where it may be a model, "
            f"cannot be asked ({short_reason(error.__cause__ or error)}){suggest_path(path, otherwise='.')} Check the "
            f"path, or hf download {name[1]} --local-dir DIR on a machine with network, and name DIR here."
        ) from error
    except Exception as error:  # the libraries for HTTP and for large files have errors of their own
        raise MissingInputError(
            f"{flag} {path}: no such path, and no model of the Hugging Face Hub ({short_reason(error)})"
            f"{suggest_path(path, otherwise=';')} check the name. For a private or gated model: hf auth login."
        ) from error


def find_models(models: Sequence[Path]) -> dict[str, Path]:
    """Return {model name: folder} for all models. Raises ConfigError if two models would have the same name."""
    folders: dict[str, Path] = {}
    for folder in (find_model("--model", model) for model in models):
        if (name := model_name(folder)) in folders:
            raise ConfigError(f"--model: the results of two models would be named {name}; use two --output folders.")
        folders[name] = folder
    return folders


def model_name(folder: Path) -> str:
    """Return the name that a model has in results: NAME for a Hub model, else the name of the resolved folder."""
    repository = re.fullmatch(r".*/models--.+--(.+)/snapshots/[^/]+", str(folder.resolve()))
    return repository[1] if repository else folder.resolve().name


def go_offline() -> None:
    """Set HF_HUB_OFFLINE and HF_DATASETS_OFFLINE, also for Hugging Face libraries that are already imported."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    # These modules read the variables only once, when they are imported.
    for name in ("huggingface_hub.constants", "datasets.config"):
        if name in sys.modules:
            sys.modules[name].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
