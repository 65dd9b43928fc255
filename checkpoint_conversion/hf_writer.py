"""Hugging Face folders as they are written: NeoBERT in the words of three architectures.

`eurobert` is transformers' own class that computes the same function, `neobert` the published names with a modelling
file that the folder carries, `llama` the encoder alone for software that knows no other name. Every convention that
the function depends on (rotary base and style, epsilon, widths) is written out; nothing is left to a default. Nothing
is compared here; neobert convert does that before the folder gets its name.

Source: transformers >= 5.3 models/eurobert and models/llama; the published config.json of chandar-lab/NeoBERT.
"""

import json
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import Tensor

from checkpoint_conversion.comparison import dtype_name
from checkpoint_conversion.hf_folder import HEAD_FOLDER, HEAD_NAMES, MODELING_FILE
from checkpoint_conversion.mapping import TABLES, ModelShape, to_published
from megatron_neobert.config.schema import ModelConfig
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer
from megatron_neobert.errors import ConversionError
from megatron_neobert.huggingface.checks import WEIGHTS

_INIT_RANGE = 0.02  # of the heads that fine-tuning adds; the published model draws these from N(0, 0.02)

# What sentence-transformers shall ask for. Its old versions ignore this; transformers before 5.3 then refuses EuroBERT
# but computes a LlamaModel with causal attention.
_NATIVE = {"specifier": ">=5.3", "reason": "Older versions do not know this architecture as an encoder."}
_REMOTE_CODE = {"specifier": ">=4.48", "reason": "modeling_neobert.py needs its attention interface."}


@dataclass(frozen=True)
class FolderSpec:
    """Settings and tokenizer that a folder is written from."""

    model: ModelConfig
    shape: ModelShape
    tokenizer: Tokenizer
    dtype: torch.dtype = torch.float32
    model_max_length: int | None = None  # tokens at which the tokenizer truncates; None: max_position_embeddings


def write_folder(
    folder: Path, layout: str, spec: FolderSpec, tensors: dict[str, Tensor], *, max_shard_size: str = "5GB"
) -> None:
    """Fills an empty folder with config.json, safetensors files, the tokenizer's files, and what the layout adds.

    Args:
        layout: eurobert, neobert or llama.
        tensors: Under the internal names of mapping.py; rounded to the dtype of `spec`.
        max_shard_size: As in Hugging Face, such as "5GB"; weights above it are cut into several files with an index.

    Raises:
        ConversionError: The tensors are not those of such a model, or the layout cannot hold it.
        OSError: It cannot be written.
    """
    config = {**build_config(layout, spec), "transformers_version": version("transformers")}
    rounded = {name: tensor.to(spec.dtype) for name, tensor in tensors.items()}
    weights = to_published(rounded, spec.shape, TABLES[layout])
    _write_json(folder / "config.json", config)
    if layout == "llama":  # the class has no head
        head = {name: weights.pop(name) for name in HEAD_NAMES}
        (folder / HEAD_FOLDER).mkdir()
        save_file(head, folder / HEAD_FOLDER / WEIGHTS, metadata={"format": "pt"})
    save_torch_state_dict(weights, folder, max_shard_size=max_shard_size, metadata={"format": "pt"})
    if layout == "neobert":
        (folder / MODELING_FILE).write_bytes(modeling_source())
    longest = spec.model_max_length or spec.model.max_position_embeddings
    spec.tokenizer.save_tokenizer_files(folder, model_max_length=longest)
    for path in folder.rglob("*.safetensors"):  # written for the owner alone, but as public as the others
        path.chmod((folder / "config.json").stat().st_mode)


def modeling_source() -> bytes:
    """The modelling file that a folder of the neobert layout carries."""
    return (resources.files("megatron_neobert.huggingface") / MODELING_FILE).read_bytes()


def build_config(layout: str, spec: FolderSpec) -> dict[str, Any]:
    """The fields of config.json.

    Raises:
        ConversionError: The layout's fields cannot hold the model.
    """
    return {"eurobert": _eurobert_config, "neobert": _neobert_config, "llama": _llama_config}[layout](spec)


def _eurobert_config(spec: FolderSpec) -> dict[str, Any]:
    """EuroBERT's decoder has a bias only if its feed-forward layers have biases too, hence `mlp_bias`."""
    return {
        "architectures": ["EuroBertForMaskedLM"],
        "model_type": "eurobert",
        **_llama_like_fields(spec),
        "mlp_bias": True,
        "mask_token_id": spec.tokenizer.mask_id,
        "classifier_pooling": "bos",
    }


def _llama_config(spec: FolderSpec) -> dict[str, Any]:
    """A Llama whose tokens all see each other: each key below has readers that ignore the other.

    `is_causal` is read by transformers >= 5.3 and by vLLM; `use_bidirectional_attention`, with a base of the rotary
    angles outside `rope_parameters`, by Text Embeddings Inference, which otherwise computes causal attention.
    Source: huggingface/text-embeddings-inference@18ce33c backends/candle/src/models/llama.rs.
    """
    return {
        "architectures": ["LlamaModel"],
        "model_type": "llama",
        "is_causal": False,
        "use_bidirectional_attention": True,
        "rope_theta": float(spec.model.rotary_base),
        **_llama_like_fields(spec),
        "mlp_bias": False,
        "use_cache": False,
    }


def _neobert_config(spec: FolderSpec) -> dict[str, Any]:
    """The published fields, and `max_position_embeddings` beside `max_length`.

    The published class takes its longest input from the latter alone, 1,024 tokens without it; transformers 5 saves
    only the former, because it takes the other for a setting of text generation.

    Raises:
        ConversionError: The feed-forward's width has no value in these fields.
    """
    from megatron_neobert.huggingface.modeling_neobert import AUTO_MAP  # transformers: seconds

    model, shape, tokenizer = spec.model, spec.shape, spec.tokenizer
    if shape.ffn_hidden_size % 8:
        raise ConversionError(
            f"--ffn-hidden-size {shape.ffn_hidden_size} is not a multiple of 8, as every width in the neobert layout "
            "is; use --format eurobert."
        )
    return {
        "architectures": ["NeoBERTForMaskedLM"],
        "auto_map": AUTO_MAP,
        "model_type": "neobert",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "dim_head": shape.hidden_size // shape.num_attention_heads,
        "intermediate_size": shape.ffn_hidden_size * 3 // 2,  # whose two thirds are the width, as readers expect
        "max_position_embeddings": model.max_position_embeddings,
        "max_length": model.max_position_embeddings,
        "norm_eps": model.norm_epsilon,
        "rope_theta": float(model.rotary_base),
        "embedding_init_range": model.init_method_range,
        "decoder_init_range": model.init_method_range,
        "classifier_init_range": _INIT_RANGE,
        "tie_word_embeddings": False,
        "tokenizer_class": "PreTrainedTokenizerFast",  # pipelines of transformers 4.48 find the tokenizer by it
        "pad_token_id": tokenizer.pad_id,
        "bos_token_id": tokenizer.cls_id,
        "eos_token_id": tokenizer.sep_id,
        "cls_token_id": tokenizer.cls_id,
        "sep_token_id": tokenizer.sep_id,
        "mask_token_id": tokenizer.mask_id,
        "torch_dtype": dtype_name(spec.dtype),  # transformers 4.48 knows no other name
    }


def _llama_like_fields(spec: FolderSpec) -> dict[str, Any]:
    model, shape, tokenizer = spec.model, spec.shape, spec.tokenizer
    theta = float(model.rotary_base)
    return {
        "dtype": dtype_name(spec.dtype),
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_attention_heads,
        "head_dim": shape.hidden_size // shape.num_attention_heads,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "initializer_range": _INIT_RANGE,
        "rms_norm_eps": model.norm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_id,
        "bos_token_id": tokenizer.cls_id,
        "eos_token_id": tokenizer.sep_id,
    }


def write_sentence_transformers_files(folder: Path, layout: str, model: ModelConfig, *, max_seq_length: int) -> None:
    """Makes a folder one that `SentenceTransformer(folder)` encodes with.

    A text's embedding is the mean of its tokens' last hidden states, [CLS] and [SEP] included and padding excluded. A
    pre-trained encoder has learnt no embeddings yet; this is the start for training them. The files are written in the
    spelling of sentence-transformers 3, which 6 still reads, because 3 cannot read that of 6. No Normalize module
    follows the pooling: cosine similarity divides by the lengths itself, and training for dot products needs them.

    Args:
        layout: With `neobert`, loading takes trust_remote_code=True, which no file can give; only the versions of
            transformers that are asked for depend on it.
        max_seq_length: Tokens at which texts are truncated.

    Raises:
        OSError: A file cannot be written.
    """
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    _write_json(
        folder / "modules.json",
        [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
            for number, (path, name) in enumerate(modules)
        ],
    )
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    pooling = {f"pooling_mode_{mode}": mode == "mean_tokens" for mode in modes}
    _write_json(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": model.hidden_size, **pooling, "include_prompt": True},
    )
    # What is beyond max_seq_length is cut off; do_lower_case would be on top of what the tokenizer does.
    limits = {"max_seq_length": max_seq_length, "do_lower_case": False}
    _write_json(folder / "sentence_bert_config.json", limits)
    _write_json(
        folder / "config_sentence_transformers.json",
        {
            "model_type": "SentenceTransformer",
            "prompts": {},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
            "requirements": {"transformers": _REMOTE_CODE if layout == "neobert" else _NATIVE},
        },
    )


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
