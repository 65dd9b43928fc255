"""Checks of a Hugging Face folder, before transformers or sentence-transformers read it.

transformers runs no code of a folder that is loaded with trust_remote_code=False, and reads safetensors only if it is
told so. It still follows the names in a folder's own files: to weights in other folders, to the model that an adapter
belongs to, and to attention kernels on the network. Those are refused here.

The files themselves may be symbolic links, as they are in Hugging Face's cache.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_neobert.errors import ConversionError, MissingInputError
from megatron_neobert.runtime.atomic_files import read_text
from megatron_neobert.text import listed, parse_json

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
MODELING_FILE = "modeling_neobert.py"  # in a folder of the neobert layout that we wrote
TORCH_ATTENTION = ("eager", "sdpa")

_ATTENTION_KEYS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
_LARGEST_JSON_BYTES = 64 << 20  # an index of 100,000 tensors takes 10 MB
_MOST_LABELS = 10_000  # transformers makes a name for each before it looks at the weights


def check_folder(folder: Path, *, attention: Iterable[str] = TORCH_ATTENTION) -> dict[str, Any]:
    """Return the content of config.json, if the files of the folder name nothing outside it.

    Args:
        attention: Implementations of attention that config.json may ask for.

    Raises:
        MissingInputError: There is no config.json.
        ConversionError: A key asks for code, for other weights or for another model; a pipe, a socket or a device is in
            the folder; or an index names other files than safetensors.
    """
    config_path, index_path = folder / "config.json", folder / INDEX
    if not config_path.exists():
        remedy = "name a Hugging Face folder; nothing is downloaded"
        if any(folder.glob("iter_*")):
            remedy = f"it holds checkpoints: neobert convert megatron-to-hf --load {folder} --output DIR comes first"
        raise MissingInputError(f"{folder}: no such folder, or one without config.json; {remedy}.")
    for path in sorted(folder.rglob("*")):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ConversionError(f"{path} is a pipe, a socket or a device; a model consists of files. Remove it.")
    config = read_object(config_path)
    for key in _ATTENTION_KEYS:
        if config.get(key) not in (None, *attention):
            raise ConversionError(
                f"{config_path}: {key} is {quote(config[key])}, which transformers may fetch code for; only "
                f"{', '.join(map(repr, attention))} are accepted. Remove the key."
            )
    labels = config.get("num_labels")
    if isinstance(labels, (int, float)) and labels > _MOST_LABELS:
        raise ConversionError(
            f"{config_path}: num_labels is {quote(labels)}, and at most {_MOST_LABELS:,} are accepted, because "
            "transformers allocates them unseen. Remove the key."
        )
    if config.get("transformers_weights") is not None:
        raise ConversionError(
            f"{config_path}: transformers_weights is {quote(config['transformers_weights'])}; weights are read from "
            f"{WEIGHTS} or its index alone. Remove the key."
        )
    if (folder / "adapter_config.json").exists():
        raise ConversionError(
            f"{folder / 'adapter_config.json'}: an adapter changes a model that lies elsewhere; merge it into a whole "
            "model and remove the file."
        )
    if index_path.is_file():
        read_weight_map(index_path)
    return config


def read_weight_map(path: Path) -> dict[str, str]:
    """Return the file name of each tensor, from a model.safetensors.index.json.

    Raises:
        ConversionError: The file is no such index, or names something else than a safetensors file beside it.
    """
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConversionError(f"{path}: has no weight_map from names to files; fetch it again.")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or name != Path(name).name or not name.endswith(".safetensors"):
            raise ConversionError(
                f"{path}: {quote(tensor)} shall be read from {quote(name)}, which is no safetensors file of the folder."
            )
    return weight_map


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        MissingInputError, ConversionError: As `read_json`; or the file holds no object.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise ConversionError(f"{path}: expected a JSON object, found {type(content).__name__}; fetch it again.")
    return content


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        MissingInputError: There is no such file.
        ConversionError: The file is not JSON, has more than 64 MiB, or has a key twice.
    """
    if not path.is_file():
        raise MissingInputError(f"{path}: no such file; name a Hugging Face folder.")
    if (size := path.stat().st_size) > _LARGEST_JSON_BYTES:
        raise ConversionError(f"{path}: {size:,} bytes are more than {_LARGEST_JSON_BYTES:,}; fetch it again.")
    try:
        return parse_json(read_text(path), pairs=_without_duplicates)
    except ValueError as error:
        raise ConversionError(f"{path}: not JSON ({error}); fetch it again.") from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{quote(twice)} is there twice")
    return content


def quote(value: object) -> str:
    """A value of a file as a message may show it: short, without control characters, and never nested."""
    return f"{value!r:.80}" if not isinstance(value, (dict, list)) else f"of {len(value)} entries"


def quote_names(names: Iterable[str]) -> str:
    """The first names, and the number of the others."""
    return listed(map(quote, names))
