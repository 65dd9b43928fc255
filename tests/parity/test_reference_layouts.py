"""A document has the same logits in the reference alone, in a padded batch and packed with other documents."""

import pytest
import torch
from tolerances import PACKED_LOGITS, PADDED_LOGITS
from torch import Tensor

from checkpoint_conversion.compare import draw_large_weights
from megatron_neobert.model.reference import ReferenceConfig, ReferenceNeoBERT

CONFIG = ReferenceConfig(num_layers=3, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48, vocab_size=101)
LENGTHS = (5, 1, 17, 9)
TOKENS = torch.randint(CONFIG.vocab_size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model() -> ReferenceNeoBERT:
    return draw_large_weights(ReferenceNeoBERT(CONFIG))


@pytest.fixture(scope="module")
def expected_tv(model: ReferenceNeoBERT) -> Tensor:
    """Logits of each document alone."""
    with torch.no_grad():
        return torch.cat([model(tokens_s[None])[0] for tokens_s in TOKENS.split(LENGTHS)])


def relative_gap(logits_tv: Tensor, expected_tv: Tensor) -> float:
    return float((logits_tv - expected_tv).abs().max() / expected_tv.abs().max())


@torch.no_grad()
def test_document_has_the_same_logits_alone_and_in_a_padded_batch(model: ReferenceNeoBERT, expected_tv: Tensor):
    tokens_bs = torch.nn.utils.rnn.pad_sequence(TOKENS.split(LENGTHS), batch_first=True, padding_value=7)
    mask_bs = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    assert relative_gap(model(tokens_bs, mask_bs)[mask_bs], expected_tv) <= PADDED_LOGITS.gate
    gap_without_mask = relative_gap(model(tokens_bs)[mask_bs], expected_tv)
    assert gap_without_mask > 1000 * PADDED_LOGITS.gate, "padding must change the logits without a mask"


@torch.no_grad()
def test_document_has_the_same_logits_alone_and_packed(model: ReferenceNeoBERT, expected_tv: Tensor):
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    assert relative_gap(model.forward_packed(TOKENS, starts), expected_tv) <= PACKED_LOGITS.gate
    merged_tv = model.forward_packed(TOKENS, starts[[0, -1]])
    assert relative_gap(merged_tv, expected_tv) > 1000 * PACKED_LOGITS.gate, "other documents must change the logits"
