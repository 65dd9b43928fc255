"""Loading of the models that are evaluated: any encoder of transformers in a local folder, under one protocol.

Folders in NeoBERT's own layout are loaded with this project's class. No code of a folder is run.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from megatron_neobert.errors import ConfigError, ConversionError, MissingInputError
from megatron_neobert.huggingface.auto_classes import loading
from megatron_neobert.huggingface.checks import TORCH_ATTENTION, check_folder
from megatron_neobert.runtime.atomic_files import sha256_of

_TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
)
# Patterns of every file that influences outputs. Of subfolders only those of modules do: an export to ONNX does not.
_FILES_OF_OUTPUT = (
    "config.json",
    "*.safetensors",
    *_TOKENIZER_FILES,
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "modules.json",
    "[0-9]_*/config.json",
    "*sentence*.json",
    "model.safetensors.index.json",
)
_ATTENTION = (*TORCH_ATTENTION, "flash_attention_2", "flash_attention_3", "flex_attention")
ABSURD_LENGTH = 1 << 30  # a tokenizer without a longest input has a limit beyond this


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Precision, device and attention of a model; `attention=None` is the choice of transformers."""

    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    attention: str | None = None  # transformers' attn_implementation: eager, sdpa, flash_attention_2, flex_attention


def load_model(folder: Path, auto_class: str, options: LoadOptions | None = None, **changes: Any) -> Any:
    """Return a model in evaluation mode, with all weights of its encoder read from the folder.

    Args:
        auto_class: Name of a class of transformers, such as AutoModelForMaskedLM. A classification head that the folder
            lacks, or has with another number of labels, is drawn from torch's generator, and so is a missing pooler.
        changes: Settings of the config to replace, such as num_labels.

    Raises:
        MissingInputError: There is no such folder.
        ConversionError: transformers cannot load the folder, or a weight is missing or has another shape than
            config.json says.
    """
    options = options or LoadOptions()
    check_folder(folder, attention=_ATTENTION)
    if options.attention is not None:
        changes["attn_implementation"] = options.attention
    with loading(folder, auto_class):
        model, info = getattr(transformers, auto_class).from_pretrained(
            folder,
            dtype=options.dtype,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the report is judged below, and names the tensors
            **changes,
        )
    missing = [name for name in sorted(info["missing_keys"]) if "pooler" not in name.split(".")]
    drawn = dict.fromkeys(missing, "is not there")
    for name, stored, wanted in sorted(info["mismatched_keys"]):
        drawn[name] = f"has the shape {tuple(stored)} and not {tuple(wanted)}"
    if auto_class.endswith("Classification"):
        drawn = {name: reason for name, reason in drawn.items() if name.startswith(f"{model.base_model_prefix}.")}
    if drawn:
        name, reason = next(iter(drawn.items()))
        raise ConversionError(
            f"{folder}: {name} {reason}{f', as {len(drawn) - 1} more' * (len(drawn) > 1)}; {auto_class} would have "
            "random weights there, and they would be measured. Fetch the folder again, or name one whose config.json "
            "and head fit its weights."
        )
    return model.to(options.device).eval()


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder.

    Raises:
        MissingInputError: There is no such folder, or no tokenizer in it.
        ConversionError: transformers cannot load the tokenizer.
    """
    check_folder(folder, attention=_ATTENTION)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):  # transformers would make an empty one
        raise MissingInputError(f"{folder} holds no tokenizer (one of {', '.join(_TOKENIZER_FILES)}); copy it there.")
    with loading(folder, "a tokenizer"):
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def load_sentence_transformer(folder: Path, options: LoadOptions | None = None, *, max_length: int) -> Any:
    """Return the SentenceTransformer of a folder, its prompts included; without modules.json, with mean pooling.

    Its modules are built from checked JSON and safetensors (`sentence_modules`), not by the library's own loading.

    Args:
        max_length: Tokens of a text, specials included; fewer where the model or the folder allows no more.

    Raises:
        MissingInputError: There is no such folder, or no tokenizer in it.
        ConversionError: The folder cannot be loaded as an encoder, or lists modules other than those allowed.
    """
    from sentence_transformers import SentenceTransformer

    from megatron_neobert.evaluation.sentence_modules import build_modules, read_prompts

    options = options or LoadOptions()
    load_tokenizer(folder)  # refuses a folder without one, for which the library would make an empty one
    backbone = load_model(folder, "AutoModel", options)
    with loading(folder, "a SentenceTransformer"):
        modules, longest = build_modules(folder, backbone)
        model = SentenceTransformer(modules=modules, prompts=read_prompts(folder), device="cpu")
    at_most = min(max_length, longest or max_length)
    model.max_seq_length = longest_input(backbone, model.tokenizer, at_most=at_most)
    return model.to(options.device)


def choose_device(name: str | None) -> torch.device:
    """Return a device by name; without a name the GPU, where there is one.

    Raises:
        ConfigError: There is no such device.
    """
    has_cuda = torch.cuda.is_available()
    if name is None:
        return torch.device("cuda" if has_cuda else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: torch has no such device; give cpu, cuda or cuda:1.") from error
    count = torch.cuda.device_count() if has_cuda else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(f"--device {name}: torch sees {count} GPUs here; give cpu, or run where there is one.")
    return device


def count_learned_positions(model: nn.Module) -> int | None:
    """Return the tokens of the longest row that a table of learned positions allows; None if positions are computed.

    RoBERTa's table is counted from behind its padding id.
    """
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    return None


def longest_input(model: Any, tokenizer: Any, *, at_most: int) -> int:
    """Return the tokens of the longest input that model and tokenizer support, at most `at_most`."""
    limits = (
        count_learned_positions(model),
        getattr(model.config, "max_position_embeddings", None),
        tokenizer.model_max_length if tokenizer.model_max_length < ABSURD_LENGTH else None,
    )
    return min((at_most, *(limit for limit in limits if limit is not None)))


def fingerprint(folder: Path) -> str:
    """Return twelve digits that change with every file that influences outputs.

    These are weights, config and tokenizer, and sentence-transformers' modules, pooling and prompts.
    """
    check_folder(folder, attention=_ATTENTION)
    files = {path.relative_to(folder): path for pattern in _FILES_OF_OUTPUT for path in folder.glob(pattern)}
    lines = [f"{name} {sha256_of(files[name])}\n" for name in sorted(files) if files[name].is_file()]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:12]
