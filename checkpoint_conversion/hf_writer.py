"""Fills a Hugging Face folder: config.json, safetensors files, the tokenizer's files, and what the layout adds.

Nothing is compared here; export.py does that before the folder gets its name.
"""

import json
import shutil
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import Tensor

from checkpoint_conversion.hf_folder import HEAD_FOLDER, MODELING_FILE
from checkpoint_conversion.layouts import Layout
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer

_HEAD_NAMES = ("decoder.weight", "decoder.bias")


def write_folder(
    folder: Path,
    layout: Layout,
    config: dict[str, Any],
    weights: dict[str, Tensor],
    tokenizer: Tokenizer,
    *,
    max_shard_size: str,
) -> None:
    """Fills an empty folder.

    Args:
        config: Fields of config.json; the version of transformers is added.
        weights: Under the published names of the layout.
        max_shard_size: As in Hugging Face, such as "5GB"; weights above it are cut into several files with an index.

    Raises:
        OSError: It cannot be written.
    """
    config = {**config, "transformers_version": version("transformers")}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if not layout.has_head:
        head = {name: weights[name] for name in _HEAD_NAMES}
        weights = {name: tensor for name, tensor in weights.items() if name not in head}
        (folder / HEAD_FOLDER).mkdir()
        save_file(head, folder / HEAD_FOLDER / "model.safetensors", metadata={"format": "pt"})
    save_torch_state_dict(weights, folder, max_shard_size=max_shard_size, metadata={"format": "pt"})
    if layout.carries_code:
        source = resources.files("megatron_neobert.huggingface") / MODELING_FILE
        with resources.as_file(source) as path:
            shutil.copyfile(path, folder / MODELING_FILE)
    tokenizer.save_tokenizer_files(folder, model_max_length=config["max_position_embeddings"])
    for path in folder.rglob("*.safetensors"):  # written for the owner alone, but as public as the others
        path.chmod((folder / "config.json").stat().st_mode)
