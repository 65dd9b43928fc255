"""The kinds of Hugging Face folder that are written: NeoBERT in the words of three architectures.

`eurobert` is transformers' own class that computes the same function, `neobert` the published names with a modelling
file that the folder carries, `llama` the encoder alone for software that knows no other name. Every convention that
the function depends on (rotary base and style, epsilon, widths) is written out; nothing is left to a default.

Source: transformers >= 5.3 models/eurobert and models/llama; the published config.json of chandar-lab/NeoBERT.
"""

import ast
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch

from checkpoint_conversion.comparison import dtype_name
from checkpoint_conversion.hf_folder import MODELING_FILE
from checkpoint_conversion.mapping import EUROBERT, LLAMA, NEOBERT, Table
from checkpoint_conversion.tensor_rules import ModelShape
from megatron_neobert.config.schema import ModelConfig
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer
from megatron_neobert.errors import ConversionError

_INIT_RANGE = 0.02  # of the heads that fine-tuning adds; the published model draws these from N(0, 0.02)


@dataclass(frozen=True)
class Source:
    """What config.json is made of."""

    model: ModelConfig
    shape: ModelShape
    tokenizer: Tokenizer
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        return dtype_name(self.dtype)


@dataclass(frozen=True)
class Layout:
    """One kind of folder."""

    table: Table
    build_config: Callable[[Source], dict[str, Any]]
    carries_code: bool = False  # modeling_neobert.py lies in the folder
    has_head: bool = True  # else the masked-language-model head is a file of its own


def build_eurobert_config(source: Source) -> dict[str, Any]:
    """EuroBERT's decoder has a bias only if its feed-forward layers have biases too, hence `mlp_bias`."""
    return {
        "architectures": ["EuroBertForMaskedLM"],
        "model_type": "eurobert",
        **_llama_like_fields(source),
        "mlp_bias": True,
        "mask_token_id": source.tokenizer.mask_id,
        "classifier_pooling": "bos",
    }


def build_llama_config(source: Source) -> dict[str, Any]:
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
        "rope_theta": float(source.model.rotary_base),
        **_llama_like_fields(source),
        "mlp_bias": False,
        "use_cache": False,
    }


def build_neobert_config(source: Source) -> dict[str, Any]:
    """The published fields, and `max_position_embeddings` beside `max_length`.

    The published class takes its longest input from the latter alone, 1,024 tokens without it; transformers 5 saves
    only the former, because it takes the other for a setting of text generation.

    Raises:
        ConversionError: The feed-forward's width cannot be said in these fields.
    """
    model, shape, tokenizer = source.model, source.shape, source.tokenizer
    if shape.ffn_hidden_size % 8:
        raise ConversionError(
            f"--ffn-hidden-size {shape.ffn_hidden_size} is not a multiple of 8, as every width in the neobert layout "
            "is; use --format eurobert."
        )
    return {
        "architectures": ["NeoBERTLMHead"],
        "auto_map": read_auto_map(),
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
        "torch_dtype": source.dtype_name,  # transformers 4.48 knows no other name
    }


def read_auto_map() -> dict[str, str]:
    """AUTO_MAP of the modelling file, which is not imported for it: transformers takes seconds."""
    source = (resources.files("megatron_neobert.huggingface") / MODELING_FILE).read_text(encoding="utf-8")
    assignments = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    (value,) = [node.value for node in assignments if ast.unparse(node.targets[0]) == "AUTO_MAP"]
    found: dict[str, str] = ast.literal_eval(value)
    return found


def _llama_like_fields(source: Source) -> dict[str, Any]:
    model, shape, tokenizer = source.model, source.shape, source.tokenizer
    theta = float(model.rotary_base)
    return {
        "dtype": source.dtype_name,
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


LAYOUTS = {
    "eurobert": Layout(EUROBERT, build_eurobert_config),
    "neobert": Layout(NEOBERT, build_neobert_config, carries_code=True),
    "llama": Layout(LLAMA, build_llama_config, has_head=False),
}
