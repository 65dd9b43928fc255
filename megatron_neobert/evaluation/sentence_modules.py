"""The modules of a sentence-transformers folder, built here from an allow-list.

The library's own loading imports any of its classes that modules.json names, and some of them load whole models from
nested folders, with keywords that those folders choose (pickles and remote attention kernels among them). Here a folder
is one Transformer followed by Pooling, Normalize, Dense and LayerNorm; each setting is read from checked JSON and each
weight from safetensors, and none is passed on as a keyword of a loader.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta, Struct
from safetensors.torch import load_file
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling

from megatron_neobert.errors import ConversionError, short_reason
from megatron_neobert.huggingface.checks import WEIGHTS, quote, read_json, read_object

_PREFIX = "sentence_transformers."
_ACTIVATION_MODULES = ("torch.nn.modules.activation", "torch.nn.modules.linear")  # the latter has Identity


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


class _DenseSettings(Struct, forbid_unknown_fields=True):
    in_features: int
    out_features: int
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"
    module_input_name: Literal["sentence_embedding", "token_embeddings"] = "sentence_embedding"
    module_output_name: Literal["sentence_embedding", "token_embeddings"] | None = None
    use_residual: bool = False


class _LayerNormSettings(Struct, forbid_unknown_fields=True):
    dimension: int


class _Entry(Struct, forbid_unknown_fields=True):
    """One module of modules.json."""

    idx: int
    name: str
    path: str
    type: str
    kwargs: Annotated[list[str], Meta(max_length=0)] = []

    @property
    def kind(self) -> str:
        """Name of the class, if it is one of sentence-transformers."""
        return self.type.rpartition(".")[2] if self.type.startswith(_PREFIX) else ""


def read_transformer_settings(folder: Path) -> TransformerSettings:
    """Return what sentence_bert_config.json says; the defaults if there is no such file.

    Raises:
        ConversionError: The file sets anything that is passed on to a loader, or is damaged.
    """
    path = folder / "sentence_bert_config.json"
    return _convert(read_object(path), TransformerSettings, path) if path.exists() else TransformerSettings()


def read_prompts(folder: Path) -> dict[str, str]:
    """Return the prompts of config_sentence_transformers.json; none if there is no such file.

    Raises:
        ConversionError: A prompt is not text.
    """
    path = folder / "config_sentence_transformers.json"
    prompts = read_object(path).get("prompts", {}) if path.exists() else {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ConversionError(f"{path}: prompts is {quote(prompts)}, not text by name; remove it.")
    return prompts


def build_modules(folder: Path, backbone: Any, settings: TransformerSettings) -> list[torch.nn.Module]:
    """Build the modules that modules.json lists; a Transformer and mean pooling if there is no such file.

    Args:
        backbone: The loaded encoder.

    Raises:
        ConversionError: A module is not one of the allow-list, is in the wrong place, or does not fit its weights.
    """
    path = folder / "modules.json"
    builders = {"Pooling": _build_pooling, "Dense": _build_dense, "LayerNorm": _build_layer_norm}
    modules: list[torch.nn.Module] = [_wrap(folder, backbone, settings)]
    if not path.exists():
        return [*modules, Pooling(backbone.config.hidden_size, "mean")]
    entries = _convert(read_json(path), Annotated[list[_Entry], Meta(min_length=1)], path)
    for number, entry in enumerate(entries):
        where = folder / entry.path
        if number == 0:
            if entry.kind != "Transformer" or entry.path != "":
                raise ConversionError(f"{path}: the first module is {quote(entry.type)}, not a Transformer at its top.")
        elif entry.kind == "Normalize":
            modules.append(Normalize())
        elif entry.kind in builders and entry.path not in ("", ".", "..") and where.parent == folder:
            modules.append(builders[entry.kind](where))
        else:
            raise ConversionError(
                f"{path}: {quote(entry.type)} in {quote(entry.path)} is not loaded. After the Transformer only "
                "Pooling, Normalize, Dense and LayerNorm are, each from a folder of its own; evaluate this model with "
                "mteb itself."
            )
    return modules


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


def _build_dense(folder: Path) -> Dense:
    path = folder / "config.json"
    settings = _convert(read_object(path), _DenseSettings, path)
    module, _, name = settings.activation_function.rpartition(".")
    activation: Any = getattr(torch.nn, name, None)
    if module not in _ACTIVATION_MODULES or not isinstance(activation, type):
        raise ConversionError(
            f"{path}: activation_function is {quote(settings.activation_function)}; only classes of torch.nn are used, "
            "such as torch.nn.modules.activation.Tanh."
        )
    with torch.device("meta"):  # a size in the JSON takes no memory
        dense = Dense(**msgspec.structs.asdict(settings) | {"activation_function": activation()})
    return _load_weights(dense, folder)


def _build_layer_norm(folder: Path) -> LayerNorm:
    path = folder / "config.json"
    settings = _convert(read_object(path), _LayerNormSettings, path)
    with torch.device("meta"):
        norm = LayerNorm(settings.dimension)
    return _load_weights(norm, folder)


def _load_weights(module: Any, folder: Path) -> Any:
    """Fill a module on the meta device from the safetensors file of its folder."""
    path = folder / WEIGHTS
    if not path.is_file():
        raise ConversionError(f"{folder} holds no {WEIGHTS}; weights are read from safetensors only. Convert them.")
    weights = load_file(path)
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if wanted != found:
        raise ConversionError(f"{path} holds {quote(str(found))} and config.json asks for {quote(str(wanted))}.")
    module.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, assign=True)
    return module


def _convert(content: Any, kind: Any, path: Path) -> Any:
    """Return a parsed JSON value as `kind`; values of other types and unknown keys are refused."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        reason = short_reason(error).partition(": ")[2]
        raise ConversionError(f"{path}: {reason}. Remove the key if the model does not need it.") from None
