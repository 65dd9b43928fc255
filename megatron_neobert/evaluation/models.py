"""Load the models under evaluation: any encoder that transformers supports, from a local folder.

Folders in NeoBERT's own layout are loaded with this project's class. Code in a folder is never run.
"""

import hashlib
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from megatron_neobert.errors import ConfigError, ConversionError, MissingInputError
from megatron_neobert.evaluation.options import ComputeOptions
from megatron_neobert.huggingface.auto_classes import loading
from megatron_neobert.huggingface.checks import TORCH_ATTENTION, WEIGHTS, check_folder, quote, read_json, read_object
from megatron_neobert.huggingface.hub import FILES_OF_OUTPUT, TOKENIZER_FILES
from megatron_neobert.runtime.atomic_files import sha256_of

_ATTENTION = (*TORCH_ATTENTION, "flash_attention_2", "flash_attention_3", "flex_attention")
# transformers gives tokenizers without a length limit a model_max_length of 1e30.
UNLIMITED_LENGTH = 1 << 30
_PREFIX = "sentence_transformers."
_TANH = "torch.nn.modules.activation.Tanh"
_ACTIVATION = re.compile(r"torch\.nn\.modules\.(activation\.\w+|linear\.Identity)")
# Values that the library writes for a text encoder. Other keys may only have empty values.
_TRANSFORMER_SETTINGS = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}


FLOAT32_ON_CPU = ComputeOptions(device="cpu")


def load_model(folder: Path, auto_class: str, options: ComputeOptions = FLOAT32_ON_CPU, **changes: Any) -> Any:
    """Return a model on `options.device`, in evaluation mode, with all weights of its encoder read from the folder.

    Two parts may get random weights from torch's generator: a missing pooler, and a classification head that is missing
    or has another number of labels.

    Args:
        auto_class: Name of a transformers class, such as AutoModelForMaskedLM.
        changes: Settings that replace settings in config.json, such as num_labels. Settings that the model's class
            lacks are ignored.

    Raises ConversionError if any other weight is missing or its shape differs from config.json, and ConfigError if the
    device does not exist.
    """
    device = choose_device(options.device)
    check_folder(folder, attention=_ATTENTION)
    with loading(folder, auto_class):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        changes = {name: value for name, value in changes.items() if hasattr(config, name)}
        if options.attention is not None:
            changes["attn_implementation"] = options.attention
        model, info = getattr(transformers, auto_class).from_pretrained(
            folder,
            dtype=getattr(torch, options.dtype),
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            # Mismatches are in `info`, and refused below with the names of the tensors.
            ignore_mismatched_sizes=True,
            **changes,
        )
    missing = [name for name in sorted(info["missing_keys"]) if "pooler" not in name.split(".")]
    # Name of each weight that transformers drew at random -> reason.
    random = dict.fromkeys(missing, "is not there")
    for name, stored_shape, shape in sorted(info["mismatched_keys"]):
        random[name] = f"has the shape {tuple(stored_shape)} and not {tuple(shape)}"
    if auto_class.endswith("Classification"):
        random = {name: reason for name, reason in random.items() if name.startswith(f"{model.base_model_prefix}.")}
    if random:
        name, reason = next(iter(random.items()))
        more = f" (and {len(random) - 1} more)" * (len(random) > 1)
        raise ConversionError(
            f"{folder}: {name} {reason}{more}; {auto_class} would have random weights there. Fetch the folder again, "
            "or name a folder whose config.json and head match its weights."
        )
    # Legal settings of config.json that change what a model returns.
    model.config.output_hidden_states = model.config.output_attentions = False
    model.config.return_dict = True
    return model.to(device).eval()


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder, without its chat template, which is a program.

    Raises MissingInputError if the folder has no tokenizer.
    """
    check_folder(folder, attention=_ATTENTION)
    # Without any of these files, transformers would return an empty tokenizer.
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise MissingInputError(
            f"{folder} has no tokenizer; copy one of these files into it: {', '.join(TOKENIZER_FILES)}."
        )
    with loading(folder, "a tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    tokenizer.chat_template = None
    return tokenizer


def load_sentence_transformer(folder: Path, options: ComputeOptions = FLOAT32_ON_CPU, *, max_length: int) -> Any:
    """Return the SentenceTransformer of a folder, with its prompts, on `options.device`.

    modules.json lists the modules. Without this file, the modules are the encoder and mean pooling. Texts are truncated
    to `max_length` tokens, special tokens included, or fewer if the model or the folder has a lower limit.
    """
    from sentence_transformers import SentenceTransformer

    # Refuses a folder without a tokenizer, for which the library would create an empty one.
    load_tokenizer(folder)
    backbone = load_model(folder, "AutoModel", options)
    check_modules(folder)
    safe: Any = {"local_files_only": True, "trust_remote_code": False, "model_kwargs": {"use_safetensors": True}}
    with loading(folder, "a SentenceTransformer"):
        model: Any = SentenceTransformer(str(folder), device="cpu", **safe)
    # Texts would be rendered by a chat template, which may loop without end.
    model.tokenizer.chat_template = None
    model[0].modality_config.pop("message", None)
    model[0].model = backbone  # the library does not refuse missing weights
    model.default_prompt_name = None
    at_most = min(max_length, model.max_seq_length or max_length)
    model.max_seq_length = longest_input(backbone, model.tokenizer, at_most=at_most)
    return model.to(backbone.device)


def choose_device(device: torch.device | str | None) -> torch.device:
    """Return the torch device with this name. None gives the GPU if there is one, else the CPU.

    CUDA is not initialized. Raises ConfigError if there is no such device.
    """
    gpus = torch.cuda.device_count()
    if device is None:
        return torch.device("cuda" if gpus else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"--device {device}: torch has no such device; give cpu, cuda or cuda:1.") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device} is not supported; give cpu, cuda or cuda:1.")
    if chosen.type == "cuda" and (chosen.index or 0) >= gpus:
        raise ConfigError(f"--device {device}: torch sees {gpus} GPUs; give cpu, or use a machine with a GPU.")
    return chosen


def count_learned_positions(model: nn.Module) -> int | None:
    """Return the longest input, in tokens, that the model's learned positions allow; None without learned positions."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            # RoBERTa counts positions from its padding id + 1.
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    return None


def longest_input(model: Any, tokenizer: Any, *, at_most: int) -> int:
    """Return the longest input, in tokens, that model and tokenizer support, but at most `at_most`."""
    limits = (
        count_learned_positions(model),
        getattr(model.config, "max_position_embeddings", None),
        tokenizer.model_max_length if tokenizer.model_max_length < UNLIMITED_LENGTH else None,
    )
    return min((at_most, *(limit for limit in limits if limit is not None)))


def fingerprint(folder: Path) -> str:
    """Return 12 hexadecimal digits of a hash over the names and contents of all files that influence a model's outputs.

    These are the weights, config and tokenizer, and the modules, pooling and prompts of sentence-transformers.
    """
    check_folder(folder, attention=_ATTENTION)
    files = {path.relative_to(folder): path for pattern in FILES_OF_OUTPUT for path in folder.glob(pattern)}
    lines = [f"{name} {sha256_of(files[name])}\n" for name in sorted(files) if files[name].is_file()]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:12]


# --- modules of sentence-transformers


def check_modules(folder: Path) -> None:
    """Check a folder before sentence-transformers reads it.

    The library imports any of its classes that modules.json names. Some of these classes load whole models from
    subfolders with keyword arguments that the subfolder chooses, which can enable pickles and remote attention kernels.
    This check accepts a Transformer, Pooling, Dense layers and Normalize, in this order. The Transformer's settings may
    only limit the text. A Dense layer must have its weights in safetensors, and an activation function from torch.

    Raises:
        ConversionError: A file names other modules, arguments of loaders, or prompts that are not texts.
        MissingInputError: The folder of a module has no config.json.
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
    if not (path := folder / "modules.json").exists():
        return
    entries = read_json(path)
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
        module, config = folder / name, folder / name / "config.json"
        if kind in ("Pooling", "Dense") and not config.is_file():
            raise MissingInputError(f"{config}: no such file; fetch the folder again.")
        if kind == "Dense":
            activation = read_object(config).get("activation_function", _TANH)
            if not isinstance(activation, str) or not _ACTIVATION.fullmatch(activation):
                raise ConversionError(
                    f"{config}: activation_function is {quote(activation)}, not a class like {_TANH}; name one."
                )
            if not (module / WEIGHTS).is_file() or any(module.glob("*.bin")):
                raise ConversionError(
                    f"{module}: the weights must be in {WEIGHTS} and not pickled; save them with safetensors."
                )
