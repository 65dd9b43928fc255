"""Padding, packing, head and initial weights of the Megatron model."""

import math

import pytest
import torch
from tolerances import FILLED_UP_GRADIENT, PACKED_LOSS

from megatron_neobert.config.schema import ModelConfig, Settings
from megatron_neobert.model.loss import masked_token_losses
from megatron_neobert.model.neobert import NeoBERTModel

VOCAB = 203  # padded to 256
LENGTHS = (5, 1, 17, 41)
TOKENS = sum(LENGTHS)


pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def model() -> NeoBERTModel:
    shape = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, max_position_embeddings=64)
    return NeoBERTModel(Settings(model=shape), vocab_size=VOCAB).eval()


def pack_documents() -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and document bounds."""
    tokens_t = torch.randint(5, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(0))
    return tokens_t, torch.tensor([0, *LENGTHS]).cumsum(0).int()


def test_vocabulary_padding_has_no_share_of_the_softmax_and_no_gradient(model):
    tokens_t, cu_seqlens_n = pack_documents()
    with torch.no_grad():
        model.output_layer.bias[VOCAB:] = 1e4  # would win every softmax
    logits_mv = model(tokens_t, cu_seqlens_n, 64, torch.arange(TOKENS))
    assert logits_mv.argmax(1).max() < VOCAB
    losses_m, _ = model(tokens_t, cu_seqlens_n, 64, torch.arange(TOKENS), tokens_t)
    expected_m = torch.nn.functional.cross_entropy(logits_mv[:, :VOCAB], tokens_t, reduction="none")
    torch.testing.assert_close(losses_m, expected_m)
    losses_m.sum().backward()
    assert not model.output_layer.weight.grad[VOCAB:].any()
    assert not model.output_layer.bias.grad[VOCAB:].any()


def test_a_loss_depends_on_no_other_document_and_with_causal_attention_on_no_later_token(model):
    tokens_t, cu_seqlens_n = pack_documents()
    changed_t = tokens_t.clone()
    changed_t[TOKENS - 10] = (changed_t[TOKENS - 10] + 1) % VOCAB  # in the last document
    positions_t = torch.arange(TOKENS)
    for is_causal in (True, False):
        before_t, after_t = (
            model(inputs_t, cu_seqlens_n, 64, positions_t, tokens_t, is_causal=is_causal)[0]
            for inputs_t in (tokens_t, changed_t)
        )
        is_equal_t = before_t == after_t
        assert is_equal_t[: TOKENS - LENGTHS[-1]].all(), "another document"
        assert is_equal_t[TOKENS - LENGTHS[-1] : TOKENS - 10].all() == is_causal
        assert not is_equal_t[TOKENS - 10 :].any()


def test_prediction_is_correct_only_if_no_logit_is_larger(model):
    logits_mv = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0], [1.0, 5.0, 5.0]])
    _, correct_m = masked_token_losses(logits_mv, torch.tensor([1, 2, 2]), model.config)
    assert correct_m.tolist() == [1.0, 0.0, 1.0]


def test_initial_matrices_are_uniform_norms_one_and_bias_and_padding_zero(model):
    parameters = dict(model.named_parameters())
    embedding = parameters["embedding.word_embeddings.weight"]
    assert not embedding[VOCAB:].any()
    assert embedding[:VOCAB].abs().max() <= 0.02
    assert embedding[:VOCAB].std().item() == pytest.approx(0.02 / math.sqrt(3), rel=0.05)  # 203 x 32 draws
    assert not parameters["output_layer.bias"].any()
    assert (parameters["decoder.final_layernorm.weight"] == 1).all()


def test_empty_documents_and_filler_positions_change_nothing(model):
    """On a GPU, they give all micro-batches the same shape."""
    tokens_t, cu_seqlens_n = pack_documents()
    positions_m = torch.tensor([0, 7, 33])
    filled_n = torch.cat([cu_seqlens_n, cu_seqlens_n[-1:].repeat(5)])
    filled_positions_m, filled_labels_m = (
        torch.cat([values, torch.full((4,), filler)])
        for values, filler in ((positions_m, 0), (tokens_t[positions_m], -100))
    )
    losses_m, correct_m = model(tokens_t, cu_seqlens_n, 64, positions_m, tokens_t[positions_m])
    filled_losses_m, filled_correct_m = model(tokens_t, filled_n, 64, filled_positions_m, filled_labels_m)
    torch.testing.assert_close(filled_losses_m[:3], losses_m, rtol=PACKED_LOSS.gate, atol=0)
    assert torch.equal(filled_correct_m[:3], correct_m)
    assert not filled_losses_m[3:].any() and not filled_correct_m[3:].any()
    parameters = dict(model.named_parameters())
    gradients, filled_gradients = (
        torch.autograd.grad(losses.sum(), parameters.values()) for losses in (losses_m, filled_losses_m)
    )
    for name, gradient, filled_gradient in zip(parameters, gradients, filled_gradients, strict=True):
        gap = (filled_gradient - gradient).abs().max() / gradient.abs().max()
        assert gap <= FILLED_UP_GRADIENT.gate, name
