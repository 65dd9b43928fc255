"""A NeoBERT of 2 layers x 32, with weights so large that errors are visible, and inputs for tests."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import modeling_flash_attention_utils as flash_attention

from megatron_neobert.huggingface.modeling_neobert import NeoBERTConfig, NeoBERTForMaskedLM

VOCABULARY = 101
LENGTHS = (9, 1, 6)  # tokens of the documents


def build_config(**changes: Any) -> NeoBERTConfig:
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 72,
        "max_position_embeddings": 64,
    }
    return NeoBERTConfig(**{**settings, **changes})


def build_model(kind: type = NeoBERTForMaskedLM, *, attention: str = "sdpa", **changes: Any) -> Any:
    """Return a model with the same weights on every call."""
    torch.manual_seed(0)
    model = kind(build_config(**changes)).eval()
    model.config._attn_implementation = attention
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(15 if parameter.dim() > 1 else 1)
    return model


def build_documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def pad(documents: list[Tensor]) -> dict[str, Tensor]:
    tokens_bs = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_value=7)
    mask_bs = torch.arange(tokens_bs.shape[1]) < torch.tensor([len(document) for document in documents])[:, None]
    return {"input_ids": tokens_bs, "attention_mask": mask_bs.long()}


def pack(documents: list[Tensor]) -> dict[str, Tensor]:
    starts = torch.tensor([0, *(len(document) for document in documents)]).cumsum(0).int()
    return {"input_ids": torch.cat(documents)[None], "cu_seqlens": starts}


@torch.no_grad()
def logits_alone(model: Any, documents: list[Tensor]) -> Tensor:
    """Return the concatenated logits [t, v] of single documents."""
    return torch.cat([model(input_ids=document[None]).logits[0] for document in documents])


def gap(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest expected value."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()


class FlashKernel:
    """Stands in for the kernel of the package flash-attn, and records the arguments of its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[dict[str, Any]] = []

        def attend(
            q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
            max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        ) -> Tensor:  # fmt: skip
            longest = (max_seqlen_q, max_seqlen_k)
            self.calls.append({"starts": cu_seqlens_q, "key_starts": cu_seqlens_k, "longest": longest})
            assert not causal and dropout_p == 0
            if q.is_meta:
                return torch.empty_like(q)
            edges = list(pairwise(cu_seqlens_q.tolist()))
            documents = (tuple(heads[a:b].transpose(0, 1) for heads in (q, k, v)) for a, b in edges)
            contexts = (F.scaled_dot_product_attention(*heads, scale=softmax_scale) for heads in documents)
            return torch.cat([context.transpose(0, 1) for context in contexts])

        replaced = {
            "_loaded_implementation": "flash_attention_2",
            "_flash_varlen_fn": attend,
            "_process_flash_kwargs_fn": flash_attention._lazy_define_process_function(attend),
            "_process_with_kvcache_kwargs_fn": dict,
            "_pad_fn": flash_attention._pad_input,
            "_unpad_fn": flash_attention._unpad_input,
        }
        for name, value in replaced.items():
            monkeypatch.setattr(flash_attention, name, value)
