"""A document's logits in the reference are the same alone, in a padded batch and in a packed row."""

import pytest
import torch
from tolerances import PACKED_LOGITS, PADDED_LOGITS
from torch import Tensor

from checkpoint_conversion.compare import make_loud
from megatron_neobert.model.reference import ReferenceConfig, ReferenceNeoBERT

CONFIG = ReferenceConfig(num_layers=3, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48, vocab_size=101)
LENGTHS = (5, 1, 17, 9)


@pytest.fixture(scope="module")
def model() -> ReferenceNeoBERT:
    return make_loud(ReferenceNeoBERT(CONFIG))


@pytest.fixture(scope="module")
def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(CONFIG.vocab_size, (length,), generator=generator) for length in LENGTHS]


@pytest.fixture(scope="module")
def alone(model: ReferenceNeoBERT, documents: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [model(tokens_s[None])[0] for tokens_s in documents]


def relative_gap(found: Tensor, alone: list[Tensor]) -> float:
    expected = torch.cat(alone)
    return float((found - expected).abs().max() / expected.abs().max())


@torch.no_grad()
def test_documents_of_a_padded_batch_get_the_logits_they_get_alone(
    model: ReferenceNeoBERT, documents: list[Tensor], alone: list[Tensor]
):
    tokens_bs = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_value=7)
    mask_bs = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    assert relative_gap(model(tokens_bs, mask_bs)[mask_bs], alone) <= PADDED_LOGITS.gate
    without_mask = model(tokens_bs)[mask_bs]
    assert relative_gap(without_mask, alone) > 1000 * PADDED_LOGITS.gate, "padding must matter without a mask"


@torch.no_grad()
def test_documents_of_a_packed_row_get_the_logits_they_get_alone(
    model: ReferenceNeoBERT, documents: list[Tensor], alone: list[Tensor]
):
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    assert relative_gap(model.forward_packed(torch.cat(documents), starts), alone) <= PACKED_LOGITS.gate
    one_document = torch.tensor([0, sum(LENGTHS)], dtype=torch.int32)
    as_one = model.forward_packed(torch.cat(documents), one_document)
    assert relative_gap(as_one, alone) > 1000 * PACKED_LOGITS.gate, "documents must matter to each other as one"
