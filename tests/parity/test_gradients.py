"""A training step of the Megatron model has the loss and the gradients of the reference, in fp32."""

import torch
from processes import run_on_ranks
from tolerances import STEP_GRADIENT, STEP_LOSS

from checkpoint_conversion.checkpoint import model_shape, stored_name
from checkpoint_conversion.mapping import NEOBERT, to_internal
from megatron_neobert.commands.check_parity import build_loud_reference, megatron_model
from megatron_neobert.config.schema import ModelConfig, Settings
from megatron_neobert.model.reference import mlm_loss

LENGTHS = (5, 1, 250, 128, 640)
VOCAB = 203


def compare_steps() -> None:
    """The rules of the table move values and compute none, so they hold for gradients as for weights."""
    settings = Settings(model=ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=4))
    generator = torch.Generator().manual_seed(1)
    tokens_t, labels_t = torch.randint(VOCAB, (2, sum(LENGTHS)), generator=generator)
    starts_n = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    positions_m = torch.arange(sum(LENGTHS))[::4]
    labels_m = labels_t[positions_m]
    reference, tensors, wrong = build_loud_reference(settings, VOCAB)
    total, _ = mlm_loss(reference.forward_packed(tokens_t, starts_n)[positions_m], labels_m)
    total.backward()
    found = {name: one.grad for name, one in reference.named_parameters()}
    expected = to_internal(found, model_shape(settings, vocab_size=VOCAB), NEOBERT)

    def gaps(weights: dict[str, torch.Tensor]) -> tuple[float, float]:
        with megatron_model(settings, weights, VOCAB) as (model, _):
            losses_m, _ = model(tokens_t, starts_n, max(LENGTHS), positions_m, labels_m)
            losses_m.sum().backward()
            gradients = {stored_name(name): one.grad for name, one in model.named_parameters()}
        loss = abs(losses_m.double().sum().item() / total.item() - 1)
        angles = [
            1 - torch.cosine_similarity(gradients[name].flatten(), one.flatten(), dim=0, eps=0).item()
            for name, one in expected.items()
        ]
        return loss, max(angles)

    for gap, gate, control in zip(gaps(tensors), (STEP_LOSS.gate, STEP_GRADIENT.gate), gaps(wrong), strict=True):
        assert gap <= gate < control / 1000, "the control has rotary pairs that are not permuted"


def test_a_step_has_the_loss_and_the_gradients_of_the_reference():
    run_on_ranks(compare_steps, world_size=1)
