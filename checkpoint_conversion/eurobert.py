"""The Hugging Face folder: NeoBERT as transformers' own EuroBERT, loadable without anybody's remote code.

EuroBERT has the same norms, rotary embedding (pairing halves), SwiGLU and pre-norm blocks. Its decoder has a bias only
if its feed-forward layers have biases too, so these are written as zeros: 0.1 M of 245 M parameters.

Source: transformers >= 5.3 models/eurobert; tests/parity/test_huggingface_parity.py.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForMaskedLM, EuroBertConfig
from transformers.utils import logging as transformers_logging

from checkpoint_conversion.huggingface_folder import check_folder
from checkpoint_conversion.mapping import ModelShape
from megatron_neobert.config import ModelConfig
from megatron_neobert.data.tokenizer import Tokenizer
from megatron_neobert.errors import ConversionError

# Left by the decoder models that EuroBERT descends from; an encoder has no cache and no pretraining_tp.
_MEANINGLESS_KEYS = ("use_cache", "pretraining_tp")
_LONGEST_REASON = 500  # characters of what transformers says


def build_config(model: ModelConfig, shape: ModelShape, tokenizer: Tokenizer, *, dtype: torch.dtype) -> EuroBertConfig:
    """NeoBERT in EuroBERT's words; nothing is left to a default that could differ from the run's setting."""
    return EuroBertConfig(
        architectures=["EuroBertForMaskedLM"],
        dtype=str(dtype).removeprefix("torch."),
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_attention_heads,
        head_dim=shape.hidden_size // shape.num_attention_heads,
        hidden_act="silu",
        max_position_embeddings=model.max_position_embeddings,
        initializer_range=0.02,  # for the heads that fine-tuning adds; NeoBERT draws these from N(0, 0.02)
        rms_norm_eps=model.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": float(model.rotary_base)},
        attention_bias=False,
        attention_dropout=0.0,
        mlp_bias=True,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_id,
        bos_token_id=tokenizer.cls_id,
        eos_token_id=tokenizer.sep_id,
        mask_token_id=tokenizer.mask_id,
        classifier_pooling="bos",
    )


def write_folder(folder: Path, config: EuroBertConfig, weights: dict[str, Tensor], tokenizer: Tokenizer) -> None:
    """Fills an empty folder with config.json, model.safetensors and the tokenizer's files."""
    fields = json.loads(config.to_json_string())
    kept = {name: value for name, value in fields.items() if name not in _MEANINGLESS_KEYS}
    (folder / "config.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # safetensors lets nobody but the owner read its files; these are as public as the others.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)
    tokenizer.save_tokenizer_files(folder, model_max_length=config.max_position_embeddings)


def load_masked_lm(folder: Path) -> Any:
    """The model of a Hugging Face folder in fp32, as any user of transformers gets it; local files, no remote code.

    Raises:
        ConversionError: The folder names something outside it, or transformers cannot load it, or leaves out or
            invents a weight.
    """
    check_folder(folder)
    transformers_logging.disable_progress_bar()
    try:
        model, info = AutoModelForMaskedLM.from_pretrained(
            folder,
            dtype=torch.float32,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # a strange config.json makes transformers raise almost anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_REASON]
        raise ConversionError(
            f"{folder}: transformers cannot load it as a masked language model ({reason})."
        ) from error
    problems = {kind: names for kind, names in info.items() if names}
    if problems:
        raise ConversionError(f"{folder}: weights and architecture do not fit: {problems}.")
    return model.eval()
