"""Checks of a sentence-transformers folder before the library reads it.

The library imports any of its classes that modules.json names. Some of these classes load whole models from subfolders
with keyword arguments that the subfolder chooses, which can enable pickles and remote attention kernels. Here a folder
may have a Transformer, Pooling and optionally Normalize, and the Transformer may have no other settings than limits of
the text.
"""

import re
from pathlib import Path
from typing import Any

from megatron_neobert.errors import ConversionError, MissingInputError
from megatron_neobert.huggingface.checks import quote, read_json, read_object

_PREFIX = "sentence_transformers."
# Values that the library writes for a text encoder. Other keys may only have empty values.
_TRANSFORMER_SETTINGS = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}


def check_modules(folder: Path) -> None:
    """Raise ConversionError if a file names other modules, arguments of loaders, or prompts that are not texts.

    Raises MissingInputError if the folder of a module has no config.json.
    """
    for path in folder.glob("sentence_*config.json"):
        for key, value in read_object(path).items():
            is_limit = (key == "max_seq_length" and type(value) is int) or (key == "do_lower_case" and value is True)
            if value and not is_limit and value != _TRANSFORMER_SETTINGS.get(key):
                raise ConversionError(f"{path}: {key} is {quote(value)}, which is not supported. Remove the key.")
    if (path := folder / "config_sentence_transformers.json").exists():
        prompts = read_object(path).get("prompts") or {}
        if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
            raise ConversionError(f"{path}: prompts is {quote(prompts)}, but must be texts by name. Correct the value.")
    if (path := folder / "modules.json").exists():
        _check_list(folder, path, read_json(path))


def _check_list(folder: Path, path: Path, entries: Any) -> None:
    try:
        folders = {entry["path"]: entry["type"] for entry in entries}
        kinds = [kind.rpartition(".")[2] for kind in folders.values() if kind.startswith(_PREFIX)]
        # The fingerprint covers only the top folder and folders with names like 1_Pooling.
        are_inside = all(re.fullmatch(r"[0-9]_\w+", name) for name in list(folders)[1:])
        is_allowed = kinds in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
        is_allowed &= len(kinds) == len(entries) and not next(iter(folders)) and are_inside
        is_allowed &= not any(entry.get("kwargs") for entry in entries)
    except (TypeError, KeyError, AttributeError):
        is_allowed = False
    if not is_allowed:
        raise ConversionError(
            f"{path}: only Transformer in the top folder, Pooling in a subfolder like 1_Pooling, and Normalize are "
            "supported, without arguments; evaluate this model with mteb itself."
        )
    if not (config := folder / list(folders)[1] / "config.json").is_file():
        raise MissingInputError(f"{config}: no such file; fetch the folder again.")
