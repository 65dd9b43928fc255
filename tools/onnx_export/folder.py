"""What lies beside the graphs: config.json, the tokenizer, and a report of how the graphs were made and checked."""

import json
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import onnxruntime
import torch
import transformers

import megatron_neobert
from checkpoint_conversion.hf_folder import check_folder
from checkpoint_conversion.hf_writer import MODELING_FILE
from megatron_neobert.errors import MissingInputError
from megatron_neobert.runtime.atomic_files import sha256_of
from onnx_export.comparison import GraphCheck

REPORT = "onnx_report.json"
# The tokenizer, how sentence-transformers pools, and what the owner says of the weights.
_COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
    "modules.json",
    "1_Pooling/config.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "README.md",
    "LICENSE",
)


def copy_companions(model: Path, folder: Path) -> None:
    """Copies what readers of ONNX folders look for in the folder above the graphs.

    A config.json that names our modelling file gets that file of this package, for libraries that ask it for the
    configuration; one that names somebody else's code loses the names, and the code stays behind.

    Raises:
        MissingInputError: The model has no tokenizer.json.
    """
    if not (model / "tokenizer.json").is_file():
        raise MissingInputError(f"{model}: has no tokenizer.json, without which nobody could use the graph; add it.")
    for name in _COMPANIONS:
        if (model / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(model / name, folder / name)
    config = check_folder(model)
    if _names_our_file(config.get("auto_map")):
        code = resources.files("megatron_neobert.huggingface") / MODELING_FILE
        (folder / MODELING_FILE).write_bytes(code.read_bytes())
    else:
        config.pop("auto_map", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_report(folder: Path, checks: dict[Path, GraphCheck], *, model: Path, task: str, opset: int) -> None:
    """Writes onnx_report.json: the figures of every graph, and what they were made of and with."""
    weights = sorted(model.glob("*.safetensors"))
    report = {
        "source": {path.name: sha256_of(path) for path in weights},
        "task": task,
        "opset": opset,
        "graphs": {path.name: _describe(path, check) for path, check in checks.items()},
        "versions": {
            "megatron_neobert": megatron_neobert.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "onnxruntime": onnxruntime.__version__,
        },
    }
    (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _describe(path: Path, check: GraphCheck) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path), "against_pytorch": check.to_report()}


def _names_our_file(auto_map: Any) -> bool:
    module = MODELING_FILE.removesuffix(".py")
    return isinstance(auto_map, dict) and all(str(name).startswith(f"{module}.") for name in auto_map.values())
