"""The model of a Hugging Face folder as any user of transformers gets it; local files, none of the folder's code.

A folder of the neobert layout is loaded with our own class, which is the file that our exports carry.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForMaskedLM
from transformers.utils import logging as transformers_logging

from checkpoint_conversion.comparison import LogitModel
from checkpoint_conversion.huggingface_folder import HEAD_FOLDER, check_folder
from megatron_neobert.errors import ConversionError
from megatron_neobert.huggingface.auto_classes import register_neobert

_LONGEST_REASON = 500  # characters of what transformers says
# Of a forward, whatever config.json says.
_OUTPUTS = {"return_dict": True, "output_hidden_states": False, "output_attentions": False}
_OWN_TYPE = "neobert"
_TAKES_BLOCKS = ("eurobert", "llama")  # models that accept a mask per pair of tokens, and positions that restart


def load_model(folder: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """The masked language model of a folder, in evaluation mode.

    Raises:
        ConversionError: The folder names something outside it, or transformers cannot load it, or leaves out or
            invents a weight.
    """
    check_folder(folder)
    return _load(AutoModelForMaskedLM, folder, dtype)


def load_backbone(folder: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """The encoder of a folder without any head, in evaluation mode.

    Raises:
        ConversionError: As `load_model`; weights of a head may be left out.
    """
    check_folder(folder)
    return _load(AutoModel, folder, dtype, may_leave_out=True)


def load_logit_model(folder: Path, *, dtype: torch.dtype = torch.float32) -> LogitModel:
    """The logits that a folder's model computes, of padded rows and, where its layout can, of a packed one.

    Raises:
        ConversionError: As `load_model`.
    """
    model = _with_head(folder, dtype) if (folder / HEAD_FOLDER).is_dir() else load_model(folder, dtype=dtype)
    config, kind = model.config, _model_type(folder)

    def padded(tokens_bs: Tensor, attention_mask_bs: Tensor) -> Tensor:
        return model(input_ids=tokens_bs, attention_mask=attention_mask_bs).logits

    def packed_by_blocks(tokens_t: Tensor, cu_seqlens_n: Tensor) -> Tensor:
        lengths = cu_seqlens_n.diff()
        document_t = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        positions_t = torch.arange(len(tokens_t)) - cu_seqlens_n[document_t]
        mask_tt = document_t[:, None] == document_t[None, :]
        return model(
            input_ids=tokens_t[None], attention_mask=mask_tt[None, None], position_ids=positions_t[None]
        ).logits[0]

    def packed_by_lengths(tokens_t: Tensor, cu_seqlens_n: Tensor) -> Tensor:
        longest = int(cu_seqlens_n.diff().max())
        return model(input_ids=tokens_t[None], cu_seqlens=cu_seqlens_n, max_seqlen=longest).logits[0]

    packed: Callable[[Tensor, Tensor], Tensor] | None = None
    if kind in _TAKES_BLOCKS:
        packed = packed_by_blocks
    elif kind == _OWN_TYPE:
        packed = packed_by_lengths
    return LogitModel(
        description=f"{folder} ({type(model).__name__})",
        vocab_size=config.vocab_size,
        max_tokens=config.max_position_embeddings,
        padded=padded,
        packed=packed,
    )


class BackboneWithHead(nn.Module):
    """An encoder and the masked-language-model head that lies beside it."""

    def __init__(self, backbone: Any, head: dict[str, Tensor]) -> None:
        super().__init__()
        self.config = backbone.config
        self.backbone = backbone
        vocab_size, hidden_size = head["decoder.weight"].shape
        self.decoder = nn.Linear(hidden_size, vocab_size, dtype=head["decoder.weight"].dtype)
        self.load_state_dict(head | {f"backbone.{name}": value for name, value in backbone.state_dict().items()})

    def forward(self, **inputs: Tensor) -> Any:
        """The backbone's output, with `logits`."""
        output = self.backbone(**inputs)
        output.logits = self.decoder(output.last_hidden_state)
        return output


def _with_head(folder: Path, dtype: torch.dtype) -> BackboneWithHead:
    head = load_file(folder / HEAD_FOLDER / "model.safetensors")
    backbone = load_backbone(folder, dtype=dtype)
    return BackboneWithHead(backbone, {name: tensor.to(dtype) for name, tensor in head.items()}).eval()


def _model_type(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type"))


def _load(kind: Any, folder: Path, dtype: torch.dtype, *, may_leave_out: bool = False) -> Any:
    register_neobert()
    transformers_logging.disable_progress_bar()
    try:
        model, info = kind.from_pretrained(
            folder,
            dtype=dtype,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **_OUTPUTS,
        )
    except Exception as error:  # a strange config.json makes transformers raise almost anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_REASON]
        raise ConversionError(
            f"{folder}: transformers cannot load it as a masked language model ({reason})."
        ) from error
    problems = {
        kind: names for kind, names in info.items() if names and not (may_leave_out and kind == "unexpected_keys")
    }
    if problems:
        raise ConversionError(f"{folder}: weights and architecture do not fit: {problems}.")
    return model.eval()
