"""The modules of a sentence-transformers folder, built here from an allow-list.

The library's own loading imports any of its classes that modules.json names, and some of them load whole models from
nested folders, with keywords that those folders choose (pickles and remote attention kernels among them). Here a folder
is a Transformer, Pooling and perhaps Normalize; each setting is read from checked JSON, and none is passed on as a
keyword of a loader.
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
    """sentence_bert_config.json: only settings of plain text are accepted."""

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
_OLD_MODES: dict[str, _Mode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class _PoolingSettings(Struct, forbid_unknown_fields=True):
    """1_Pooling/config.json, of sentence-transformers before 5.4 (a flag per mode) or later."""

    embedding_dimension: int
    pooling_mode: _Mode | list[_Mode]
    include_prompt: bool = True


class _Prompts(Struct):
    """config_sentence_transformers.json; its other keys are not used."""

    prompts: dict[str, str] = {}


class _Entry(Struct, forbid_unknown_fields=True):
    """One module of modules.json."""

    idx: int
    name: str
    path: str
    type: str
    kwargs: Annotated[list[str], Meta(max_length=0)] = []


def build_modules(folder: Path, backbone: Any) -> tuple[list[torch.nn.Module], int | None]:
    """Build the modules that modules.json lists; a Transformer and mean pooling if there is no such file.

    Args:
        backbone: The loaded encoder.

    Returns:
        The modules, and the tokens of the longest text that the folder names.

    Raises:
        ConversionError: A module is not one of the allow-list, or is in the wrong place.
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
        entries[0].path or not re.fullmatch(r"[0-9]_\w+", entries[1].path)  # as the fingerprint reads it
    ):
        found = ", ".join(f"{quote(entry.type)} in {quote(entry.path)}" for entry in entries[:8])
        raise ConversionError(
            f"{path}: lists {found}. Only a Transformer at the top, Pooling in a folder of its own and Normalize are "
            "loaded; evaluate this model with mteb itself."
        )
    modules += [_build_pooling(folder / entries[1].path), *([Normalize()] if len(kinds) > 2 else [])]
    return modules, settings.max_seq_length


def read_prompts(folder: Path) -> dict[str, str]:
    """Return the prompts of a folder by name.

    Raises:
        ConversionError: The prompts are not texts.
    """
    path = folder / "config_sentence_transformers.json"
    return _convert(read_object(path), _Prompts, path).prompts if path.exists() else {}


def _wrap(folder: Path, backbone: Any, settings: TransformerSettings) -> Transformer:
    """Build the library's Transformer from a local folder, and put the encoder that was loaded before into it."""
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    module = Transformer(
        str(folder),
        model_kwargs={**local, "use_safetensors": True},
        processor_kwargs=dict(local),
        config_kwargs=dict(local),
        modality_config={"text": {"method": "forward", "method_output_name": "last_hidden_state"}},  # no chat template
        module_output_name="token_embeddings",
        do_lower_case=settings.do_lower_case,
    )
    module.model = backbone
    return module


def _build_pooling(folder: Path) -> Pooling:
    path = folder / "config.json"
    content = read_object(path)
    content.setdefault("embedding_dimension", content.pop("word_embedding_dimension", None))
    flags = {mode: content.pop(key) for key, mode in _OLD_MODES.items() if key in content}
    if "pooling_mode" not in content:
        content["pooling_mode"] = [mode for mode, flag in flags.items() if flag is True] or ["mean"]
    return Pooling(**msgspec.structs.asdict(_convert(content, _PoolingSettings, path)))


def _convert(content: Any, kind: Any, path: Path) -> Any:
    """Return a parsed JSON value as `kind`; values of other types and unknown keys are refused."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        reason = short_reason(error).partition(": ")[2]
        raise ConversionError(f"{path}: {reason}. Remove the key if the model does not need it.") from None
