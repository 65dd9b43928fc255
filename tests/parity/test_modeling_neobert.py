"""The model of exported folders and the reference are one function, padded and packed, and share their weights."""

from typing import Any

import pytest
import torch
from tolerances import MODELING_LOGITS
from torch import Tensor

from checkpoint_conversion.comparison import make_loud
from megatron_neobert.huggingface import modeling_neobert
from megatron_neobert.huggingface.modeling_neobert import NeoBERTConfig, NeoBERTLMHead
from megatron_neobert.model.reference import ReferenceConfig, ReferenceNeoBERT

CONFIG = ReferenceConfig(num_layers=4, hidden_size=64, num_attention_heads=4, ffn_hidden_size=96, vocab_size=203)
LENGTHS = (128, 70, 1)


@pytest.fixture(scope="module")
def reference() -> ReferenceNeoBERT:
    return make_loud(ReferenceNeoBERT(CONFIG))


def build_model(reference: ReferenceNeoBERT, *, attention: str = "sdpa", **changes: Any) -> NeoBERTLMHead:
    """NeoBERT for transformers with the reference's settings, some of them changed, and its weights."""
    settings = {
        "vocab_size": CONFIG.vocab_size,
        "hidden_size": CONFIG.hidden_size,
        "num_hidden_layers": CONFIG.num_layers,
        "num_attention_heads": CONFIG.num_attention_heads,
        "intermediate_size": CONFIG.ffn_hidden_size * 3 // 2,
        "norm_eps": CONFIG.norm_epsilon,
        "rope_theta": CONFIG.rotary_base,
    }
    model = NeoBERTLMHead(NeoBERTConfig(**{**settings, **changes})).eval()
    model.load_state_dict(reference.state_dict())
    model.config._attn_implementation = attention
    return model


def build_documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(CONFIG.vocab_size, (length,), generator=generator) for length in LENGTHS]


@torch.no_grad()
def relative_gaps(reference: ReferenceNeoBERT, model: NeoBERTLMHead) -> dict[str, float]:
    """Largest difference of two logits, relative to the largest logit, of a padded and of a packed batch."""
    documents = build_documents()
    tokens_bs = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    mask_bs = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    packed = torch.cat(documents)
    pairs = {
        "padded": (model(tokens_bs, mask_bs).logits[mask_bs], reference(tokens_bs, mask_bs)[mask_bs]),
        "packed": (model(packed[None], cu_seqlens=starts).logits[0], reference.forward_packed(packed, starts)),
    }
    assert all(expected.abs().max() > 3 for _, expected in pairs.values()), "logits too small to show an error"
    return {name: float((found - wanted).abs().max() / wanted.abs().max()) for name, (found, wanted) in pairs.items()}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_model_of_exported_folders_computes_the_logits_of_the_reference(reference: ReferenceNeoBERT, attention: str):
    gaps = relative_gaps(reference, build_model(reference, attention=attention))
    assert max(gaps.values()) <= MODELING_LOGITS.gate, gaps


@pytest.mark.parametrize(
    "changes", [{"norm_eps": 1e-6}, {"rope_theta": 250_000.0}], ids=["norm epsilon", "rotary base"]
)
def test_another_setting_computes_something_else(reference: ReferenceNeoBERT, changes: dict[str, float]):
    gaps = relative_gaps(reference, build_model(reference, **changes))
    assert min(gaps.values()) > 10 * MODELING_LOGITS.gate, gaps


def rotate_halves(heads_bnsd: Tensor, rotation: modeling_neobert.Rotation) -> Tensor:
    """The other convention: channel i turns with channel i + d/2."""
    first, second = heads_bnsd.chunk(2, dim=-1)
    cosine, sine = rotation
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)


def test_rotation_of_halves_computes_something_else(reference: ReferenceNeoBERT, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(modeling_neobert, "rotate_pairs", rotate_halves)
    gaps = relative_gaps(reference, build_model(reference))
    assert min(gaps.values()) > 1000 * MODELING_LOGITS.gate, gaps


def test_gate_and_up_exchanged_compute_something_else(reference: ReferenceNeoBERT):
    model = build_model(reference)
    with torch.no_grad():
        for block in model.model.transformer_encoder:
            block.ffn.w12.weight.copy_(block.ffn.w12.weight.roll(CONFIG.ffn_hidden_size, dims=0))
    gaps = relative_gaps(reference, model)
    assert min(gaps.values()) > 1000 * MODELING_LOGITS.gate, gaps
