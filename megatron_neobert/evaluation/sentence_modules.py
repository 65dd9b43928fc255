"""Checks of a sentence-transformers folder before the library reads it.

The library imports any of its classes that modules.json names. Some of these classes load whole models from subfolders
with keyword arguments that the subfolder chooses, which can enable pickles and remote attention kernels. Here a folder
may have a Transformer, Pooling, Dense layers and Normalize, in this order. The Transformer may have no other settings
than limits of the text, and a Dense layer has weights in safetensors and an activation function of torch.
"""

import re
from pathlib import Path
from typing import Any

from megatron_neobert.errors import ConversionError, MissingInputError
from megatron_neobert.huggingface.checks import WEIGHTS, quote, read_json, read_object

_PREFIX = "sentence_transformers."
_TANH = "torch.nn.modules.activation.Tanh"
_ACTIVATION = re.compile(r"torch\.nn\.modules\.(activation\.\w+|linear\.Identity)")
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
        is_allowed = re.fullmatch("Transformer,Pooling(,Dense)*(,Normalize)?", ",".join(kinds)) is not None
        is_allowed &= len(kinds) == len(entries) and not next(iter(folders)) and are_inside
        is_allowed &= not any(entry.get("kwargs") for entry in entries)
    except (TypeError, KeyError, AttributeError):
        is_allowed = False
    if not is_allowed:
        raise ConversionError(
            f"{path}: only Transformer in the top folder, Pooling in a subfolder like 1_Pooling, Dense and Normalize "
            "are supported, in this order and without arguments; evaluate this model with mteb itself."
        )
    for name, kind in zip(folders, kinds, strict=True):
        if kind in ("Pooling", "Dense") and not (config := folder / name / "config.json").is_file():
            raise MissingInputError(f"{config}: no such file; fetch the folder again.")
        if kind == "Dense":
            _check_dense(folder / name)


def _check_dense(folder: Path) -> None:
    """Raise ConversionError if the folder of a Dense layer has pickled weights, or another activation than torch's."""
    activation = read_object(folder / "config.json").get("activation_function", _TANH)
    if not isinstance(activation, str) or not _ACTIVATION.fullmatch(activation):
        raise ConversionError(
            f"{folder / 'config.json'}: activation_function is {quote(activation)}, not a class like {_TANH}; name one."
        )
    if not (folder / WEIGHTS).is_file() or any(folder.glob("*.bin")):
        raise ConversionError(
            f"{folder}: the weights must be in {WEIGHTS} and not pickled; save them with safetensors."
        )
