"""Check a Hugging Face folder before transformers or sentence-transformers read it.

With trust_remote_code=False and use_safetensors=True, transformers executes no code of a folder and reads no pickles.
It still follows references in the folder's files: to weights in other folders, to the base model of an adapter, and to
attention kernels on the network. These references are refused here.

The files may be symbolic links, as in Hugging Face's cache.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_neobert.errors import ConversionError, MissingInputError
from megatron_neobert.runtime.atomic_files import read_text, why_no_model
from megatron_neobert.text import listed, parse_json

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
MODELING_FILE = "modeling_neobert.py"  # in exported folders of the neobert layout
TORCH_ATTENTION = ("eager", "sdpa")

_ATTENTION_KEYS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
_LARGEST_JSON_BYTES = 64 << 20  # an index of 100,000 tensors takes 10 MB
_MOST_LABELS = 10_000  # transformers creates a name for each label before it reads the weights


def check_folder(folder: Path, *, attention: Iterable[str] = TORCH_ATTENTION) -> dict[str, Any]:
    """Check that a folder refers to nothing outside of itself, and return the content of its config.json.

    Args:
        attention: Attention implementations that config.json may name.

    Raises:
        MissingInputError: There is no config.json.
        ConversionError: A file refers to code, weights or a model outside of the folder; the folder has a pipe, a
            socket or a device; a JSON file is invalid; or config.json has more than 10,000 labels or a value of a wrong
            type.
    """
    config_path, index_path = folder / "config.json", folder / INDEX
    if not config_path.exists():
        raise MissingInputError(f"{folder}: {why_no_model(folder)}.")
    for path in sorted(folder.rglob("*")):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ConversionError(f"{path} is a pipe, a socket or a device, and only files are read. Remove it.")
    config = read_object(config_path)
    _check_types(config_path, config)
    for key in _ATTENTION_KEYS:
        if config.get(key) not in (None, *attention):
            raise ConversionError(
                f"{config_path}: {key} is {quote(config[key])}, for which transformers may download code. Use "
                f"{' or '.join(map(repr, attention))}, or remove the key."
            )
    labels = config.get("num_labels")
    if isinstance(labels, (int, float)) and labels > _MOST_LABELS:
        raise ConversionError(
            f"{config_path}: num_labels is {quote(labels)}, but at most {_MOST_LABELS:,} are accepted, because "
            "transformers allocates them unchecked. Remove the key."
        )
    if config.get("transformers_weights") is not None:
        raise ConversionError(
            f"{config_path}: transformers_weights is {quote(config['transformers_weights'])}, but weights are read "
            f"from {WEIGHTS} or its index only. Remove the key."
        )
    if (folder / "adapter_config.json").exists():
        raise ConversionError(
            f"{folder / 'adapter_config.json'}: an adapter needs a model outside of the folder. Merge it into its "
            "model and remove the file."
        )
    if index_path.is_file():
        read_weight_map(index_path)
    return config


def refuse_outside(path: Path, folder: Path) -> None:
    """Raise ConversionError if `path`, a file to copy, is a link that points outside the model's folder.

    In Hugging Face's cache, files in snapshots/REVISION are links to the model's folder blobs, which are allowed.
    """
    root, target = folder.resolve(), path.resolve()
    inside = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]
    if not any(target.is_relative_to(allowed) for allowed in inside):
        raise ConversionError(
            f"{path} is a link to {target}, and files outside of the model's folder are not copied. Replace the link "
            "by its file, or remove it."
        )


def _check_types(path: Path, config: dict[str, Any]) -> None:
    """Raise ConversionError for a value of the wrong type, for which transformers would raise an unclear error."""
    for key, value in config.items():
        if key.endswith("_config"):
            is_valid, expected = isinstance(value, dict), "an object"
        elif key.endswith("_token_id"):
            ids = value if isinstance(value, list) else [value]
            is_valid, expected = all(type(number) is int for number in ids), "a whole number"
        elif key in ("max_position_embeddings", "max_length"):  # names of one setting in `neobert` folders
            is_valid, expected = type(value) is int, "a whole number"
        elif key.endswith("_eps") or key == "rope_theta":
            is_valid, expected = type(value) in (int, float), "a number"
        else:
            continue
        if value is not None and not is_valid:
            raise ConversionError(f"{path}: {key} is {quote(value)}, but must be {expected}. Correct the value.")


def read_weight_map(path: Path) -> dict[str, str]:
    """Return {tensor name: file name} of a model.safetensors.index.json. The named files need not exist.

    Raises:
        ConversionError: The file is not a weight index, or a file name in the index is not like x.safetensors.
    """
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConversionError(f"{path} has no weight_map with the file of each tensor; fetch it again.")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or name != Path(name).name or not name.endswith(".safetensors"):
            raise ConversionError(
                f"{path}: the file of {quote(tensor)} is {quote(name)}, but must be a safetensors file in the same "
                "folder; fetch it again."
            )
    return weight_map


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise the errors of `read_json`, and ConversionError if there is no object."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ConversionError(f"{path}: expected a JSON object, found {type(content).__name__}; fetch it again.")
    return content


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        MissingInputError: There is no such file.
        ConversionError: The file is not JSON, is larger than 64 MiB, or has a duplicate key.
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
        duplicate, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"duplicate key {quote(duplicate)}")
    return content


def quote(value: object) -> str:
    """Format a value from a file for a message: short, without control characters, and not nested."""
    return (
        f"{value!r:.80}" if not isinstance(value, (dict, list)) else f"a {type(value).__name__} of length {len(value)}"
    )


def quote_names(names: Iterable[str]) -> str:
    """Format names from a file for a message: the first names, and how many more there are."""
    return listed(map(quote, names))
