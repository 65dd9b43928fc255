"""Config, code, tokenizer and module files of the folders that users load without this project.

These are exports, ONNX exports and fine-tuned models. transformers 5 and sentence-transformers 6 write files that their
previous versions cannot read (TokenizersBackend, sentence_transformers.base), and arguments of the call that loaded the
model. Fine-tuning changes no tokenizer, so the tokenizer files of the starting folder are copied, and module files have
the format of sentence-transformers 3.
"""

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_neobert.huggingface.checks import MODELING_FILE, read_object, refuse_outside
from megatron_neobert.huggingface.hub import ALL_TOKENIZER_FILES

_MODULES = "modules.json"
# Requirements that sentence-transformers checks, by model type. Its old versions ignore them.
_REQUIREMENTS = {
    "eurobert": {"specifier": ">=5.3", "reason": "Older versions do not know this architecture."},
    "neobert": {"specifier": ">=4.57", "reason": "modeling_neobert.py is not tested with older ones."},
}
# Names of the pooling modes in versions 3 to 5, and in version 6.
_POOLING = {
    "cls_token": "cls",
    "mean_tokens": "mean",
    "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean_tokens": "weightedmean",
    "lasttoken": "lasttoken",
}


def restore_files(folder: Path, source: Path) -> None:
    """Replace the tokenizer files of a fine-tuned model by the files in `source`, the folder that it was trained from.

    The chat template in `folder` is deleted, and config.json rewritten by `write_config`. Raise OSError if a file
    cannot be written, and ConversionError if a file is a link that points outside `source`.
    """
    for name in (*ALL_TOKENIZER_FILES, "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    copy_files(source, folder, ALL_TOKENIZER_FILES)
    write_config(folder, read_object(folder / "config.json"))


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write config.json and, for a `neobert` model, this package's modelling file. config.json names no other code.

    Raise OSError if a file cannot be written.
    """
    content = {key: value for key, value in config.items() if key != "auto_map"}
    if config.get("model_type") == "neobert":
        from megatron_neobert.huggingface.modeling_neobert import AUTO_MAP  # imports transformers, which takes seconds

        content["auto_map"] = AUTO_MAP
        modeling = resources.files("megatron_neobert.huggingface") / MODELING_FILE
        (folder / MODELING_FILE).write_bytes(modeling.read_bytes())
    write_json(folder / "config.json", content)


def copy_files(source: Path, folder: Path, patterns: Iterable[str]) -> None:
    """Copy files that match `patterns` from `source` to `folder`. A pattern may name a subfolder.

    The `chat_template` in tokenizer_config.json is left out, because templates are programs. Raise OSError if a file
    cannot be written, and ConversionError if a file is a link that points outside `source`.
    """
    for path in (path for pattern in patterns for path in source.glob(pattern) if path.is_file()):
        refuse_outside(path, source)
        target = folder / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        if path.name == "tokenizer_config.json":
            write_json(target, {key: value for key, value in read_object(path).items() if key != "chat_template"})
        else:
            shutil.copyfile(path, target)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, indented. Raise OSError if it cannot be written."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_module_files(
    folder: Path,
    *,
    max_seq_length: int,
    pooling: Mapping[str, Any],
    more_modules: Sequence[str] = (),
    prompts: Mapping[str, str] | None = None,
) -> None:
    """Write the files that `SentenceTransformer(folder)` reads, except the weights of Dense layers.

    Args:
        folder: Must have config.json. A `neobert` folder must be loaded with trust_remote_code=True.
        max_seq_length: Tokens after which texts are truncated.
        pooling: Configuration of the pooling in the format of sentence-transformers 6.
        more_modules: Classes after the pooling, Dense or Normalize.
        prompts: Prompts by name.
    """
    modules = ["Transformer", "Pooling", *more_modules]
    paths = ["", *(f"{number}_{name}" for number, name in enumerate(modules[1:], 1))]
    chosen = pooling["pooling_mode"]
    modes = (chosen,) if isinstance(chosen, str) else chosen
    model_type = read_object(folder / "config.json").get("model_type")
    requirement = _REQUIREMENTS.get(model_type) if isinstance(model_type, str) else None
    files: dict[str, Any] = {
        # No Normalize module in exports: cosine similarity normalises by itself, and dot products need the lengths.
        _MODULES: [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
            for number, (path, name) in enumerate(zip(paths, modules, strict=True))
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": pooling["embedding_dimension"],
            **{f"pooling_mode_{old}": new in modes for old, new in _POOLING.items()},
            "include_prompt": pooling["include_prompt"],
        },
        # The tokenizer lower-cases by itself where it should, so do_lower_case is false.
        "sentence_bert_config.json": {"max_seq_length": max_seq_length, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "model_type": "SentenceTransformer",
            "prompts": dict(prompts or {}),
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
            **({"requirements": {"transformers": requirement}} if requirement else {}),
        },
    }
    for path, name in zip(paths, modules, strict=True):
        (folder / path).mkdir(exist_ok=True)
        if name == "Dense":  # version 3 passes every key to the constructor
            content = read_object(folder / path / "config.json")
            files[f"{path}/config.json"] = {k: v for k, v in content.items() if not k.startswith("module_")}
    for name, content in files.items():
        write_json(folder / name, content)
