"""What a Hugging Face folder may hold before transformers is let near it.

transformers runs no code of a folder that is loaded with trust_remote_code=False, and reads safetensors only where it
is told so. It still follows the names that a folder's own files contain: to weights in other folders, to the model
that an adapter belongs to, and to attention kernels on the network. Those are refused here.

The files themselves may be symbolic links, as they are in Hugging Face's cache.
"""

import json
from pathlib import Path
from typing import Any

from megatron_neobert.errors import ConversionError

_ATTENTION_KEYS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
_OWN_ATTENTION = (None, "eager", "sdpa")


def check_folder(folder: Path) -> None:
    """Refuses a folder whose files name anything outside it.

    Raises:
        ConversionError: Naming the file, the key and what it asks for.
    """
    config_path, index_path = folder / "config.json", folder / "model.safetensors.index.json"
    config = _read_object(config_path)
    for key in _ATTENTION_KEYS:
        if config.get(key) not in _OWN_ATTENTION:
            raise ConversionError(
                f"{config_path}: {key} is {config[key]!r:.80}, which transformers may fetch code for; only "
                "'eager' and 'sdpa' are accepted. Remove the key."
            )
    if (folder / "adapter_config.json").exists():
        raise ConversionError(
            f"{folder / 'adapter_config.json'}: an adapter changes a model that lies elsewhere; merge it into a whole "
            "model and remove the file."
        )
    if index_path.exists():
        _check_weight_map(index_path, _read_object(index_path).get("weight_map"))


def _check_weight_map(path: Path, weight_map: Any) -> None:
    if not isinstance(weight_map, dict):
        raise ConversionError(f"{path}: has no weight_map from names to files; fetch it again.")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or name != Path(name).name or not name.endswith(".safetensors"):
            raise ConversionError(
                f"{path}: {tensor!r:.80} shall be read from {name!r:.80}, which is no safetensors file of the folder."
            )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{path}: not JSON ({error}); fetch it again.") from error
    if not isinstance(content, dict):
        raise ConversionError(f"{path}: expected a JSON object, found {type(content).__name__}; fetch it again.")
    return content
