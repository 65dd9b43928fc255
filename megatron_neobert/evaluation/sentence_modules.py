"""Safe loading of sentence-transformers folders: modules are built from an allow-list.

The library's loader imports any of its classes that modules.json names. Some of these classes load whole models from
subfolders with keyword arguments that the subfolder chooses, which can enable pickles and remote attention kernels.
Here a folder may have a Transformer, Pooling and optionally Normalize. All settings are read from validated JSON, and
no setting becomes a keyword argument of `from_pretrained`.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta, Struct
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

from megatron_neobert.errors import ConversionError, short_reason
from megatron_neobert.huggingface.checks import quote, read_json, read_object

_PREFIX = "sentence_transformers."
_Nothing = Annotated[dict[str, Any], Meta(max_length=0)]


class TransformerSettings(Struct, forbid_unknown_fields=True):
    """Content of sentence_bert_config.json. Only settings of text inputs are accepted."""

    max_seq_length: Annotated[int, Meta(ge=1)] | None = None
    do_lower_case: bool = False
    transformer_task: Literal["feature-extraction"] = "feature-extraction"
    modality_config: dict[Literal["text"], dict[str, str]] | None = None
    module_output_name: Literal["token_embeddings"] = "token_embeddings"
    unpad_inputs: bool | None = None
    model_args: _Nothing = {}
    model_kwargs: _Nothing = {}
    config_args: _Nothing = {}
    config_kwargs: _Nothing = {}
    tokenizer_args: _Nothing = {}
    processor_kwargs: _Nothing = {}
    processing_kwargs: _Nothing = {}


_Mode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
# sentence-transformers before 5.4 writes one flag per pooling mode.
_OLD_MODES: dict[str, _Mode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class _PoolingSettings(Struct, forbid_unknown_fields=True):
    """Content of 1_Pooling/config.json."""

    embedding_dimension: int
    pooling_mode: _Mode | list[_Mode]
    include_prompt: bool = True


class _Prompts(Struct):
    """Content of config_sentence_transformers.json. Other keys are ignored."""

    prompts: dict[str, str] = {}


class _Entry(Struct, forbid_unknown_fields=True):
    """One module in modules.json."""

    idx: int
    name: str
    path: str
    type: str
    kwargs: Annotated[list[str], Meta(max_length=0)] = []


def build_modules(folder: Path, backbone: Any) -> tuple[list[torch.nn.Module], int | None]:
    """Build the modules that modules.json lists, or a Transformer and mean pooling without that file.

    Args:
        backbone: The encoder, already loaded.

    Returns:
        The modules, and the maximum number of tokens in sentence_bert_config.json (None: no limit).

    Raises:
        ConversionError: modules.json lists anything but a Transformer, a Pooling and optionally a Normalize, or a
            setting is not accepted.
        MissingInputError: The pooling folder has no config.json.
    """
    settings = TransformerSettings()
    if (path := folder / "sentence_bert_config.json").exists():
        settings = _convert(read_object(path), TransformerSettings, path)
    modules: list[torch.nn.Module] = [_wrap(folder, backbone, settings)]
    path = folder / "modules.json"
    if not path.exists():
        return [*modules, Pooling(backbone.config.hidden_size, "mean")], settings.max_seq_length
    entries = _convert(read_json(path), list[_Entry], path)
    kinds = [entry.type.rpartition(".")[2] if entry.type.startswith(_PREFIX) else "" for entry in entries]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or (
        # The fingerprint covers only the top folder and folders with names like 1_Pooling.
        entries[0].path or not re.fullmatch(r"[0-9]_\w+", entries[1].path)
    ):
        listed = ", ".join(f"{quote(entry.type)} in {quote(entry.path)}" for entry in entries[:8])
        raise ConversionError(
            f"{path}: lists {listed}. Only Transformer in the top folder, Pooling in a subfolder like 1_Pooling, and "
            "Normalize are supported; evaluate this model with mteb itself."
        )
    modules.append(_build_pooling(folder / entries[1].path))
    if "Normalize" in kinds:
        modules.append(Normalize())
    return modules, settings.max_seq_length


def read_prompts(folder: Path) -> dict[str, str]:
    """Return the prompts of a folder by name; {} if it has no config_sentence_transformers.json.

    Raises ConversionError if that file is not valid, or a prompt is not a string.
    """
    path = folder / "config_sentence_transformers.json"
    return _convert(read_object(path), _Prompts, path).prompts if path.exists() else {}


def _wrap(folder: Path, backbone: Any, settings: TransformerSettings) -> Transformer:
    """Build the Transformer module of a folder, with `backbone` as its encoder. Errors of libraries pass through."""
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    module = Transformer(
        str(folder),
        model_kwargs={**local, "use_safetensors": True},
        processor_kwargs=dict(local),
        config_kwargs=dict(local),
        # Text without a chat template.
        modality_config={"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        module_output_name="token_embeddings",
        do_lower_case=settings.do_lower_case,
    )
    module.model = backbone
    return module


def _build_pooling(folder: Path) -> Pooling:
    path = folder / "config.json"
    content = read_object(path)
    content.setdefault("embedding_dimension", content.pop("word_embedding_dimension", None))
    old_modes = [mode for key, mode in _OLD_MODES.items() if content.pop(key, None) is True]
    content.setdefault("pooling_mode", old_modes or ["mean"])
    return Pooling(**msgspec.structs.asdict(_convert(content, _PoolingSettings, path)))


def _convert(content: Any, kind: Any, path: Path) -> Any:
    """Return `content`, the parsed JSON of `path`, as a `kind`. Raises ConversionError if a value does not fit."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        reason = short_reason(error).partition(": ")[2]
        raise ConversionError(f"{path}: {reason}. Correct the value, or remove the key.") from None
