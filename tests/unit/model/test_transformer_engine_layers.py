"""Numbers of the model with Transformer Engine's layers. Its Python runs over an emulated extension on CPU."""

import functools
from collections.abc import Callable
from typing import Any

import emulated_engine
import pytest
import torch
from emulated_engine import ENGINE, FP8, LOCAL
from processes import run_on_ranks
from tolerances import ENGINE_GRADIENT, ENGINE_LOSS

from checkpoint_conversion.checkpoint import stored_name
from megatron_neobert.config.schema import ModelConfig, Settings, TrainingConfig
from megatron_neobert.model import kernels
from megatron_neobert.model.neobert import NeoBERTModel
from megatron_neobert.runtime import distributed
from megatron_neobert.training.setup import wrap_model

pytestmark = emulated_engine.needs_sources

VOCAB = 1000
LENGTHS = (5, 1, 250, 128, 640)
TOKENS = sum(LENGTHS)  # a multiple of 128, which the FP8 recipe "blockwise" needs
MAX_SEQLEN = 640
RECIPES: dict[str, dict[str, Any]] = {"bf16": ENGINE, **FP8}
MODELS: dict[str, dict[str, Any]] = {
    "layer_norm": {"normalization": "LayerNorm"},
    "gelu": {"swiglu": False},
    "learned_positions": {"position_embedding_type": "learned_absolute"},
}


def on_the_engine(test: Callable[..., None]) -> Callable[..., None]:
    """Decorate a test that runs in a process group of one rank, over the emulated extension."""

    def run_in_group(arguments: dict[str, Any]) -> None:
        distributed.initialize(Settings())
        test(**arguments)

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        run_on_ranks(run_in_group, arguments, world_size=1, preload="emulated_engine.preloaded")

    return run


def build(compute: dict[str, Any], *, bf16: bool = True, wrapped: bool = False, **model: Any) -> Any:
    """Build the model; `wrapped` adds the gradient buffers of training."""
    shape = {"num_layers": 3, "hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": MAX_SEQLEN}
    settings = Settings(model=ModelConfig(**{**shape, **model}), training=TrainingConfig(bf16=bf16))
    settings = settings.with_section("compute", **compute)
    built = NeoBERTModel(settings, vocab_size=VOCAB)
    if wrapped:
        return wrap_model(settings, built)
    return built.bfloat16() if bf16 else built  # learned positions are still float32


def losses_and_gradients(model: NeoBERTModel, *, is_causal: bool = False) -> dict[str, torch.Tensor]:
    tokens_t = torch.randint(5, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(0))
    cu_seqlens_n = torch.tensor([0, *LENGTHS, 0, 0]).cumsum(0).int()
    positions_m = torch.arange(0, TOKENS, 4)
    labels_m = tokens_t[positions_m]
    labels_m[-3:] = -100
    losses_m, _ = model(tokens_t, cu_seqlens_n, MAX_SEQLEN, positions_m, labels_m, is_causal=is_causal)
    losses_m.sum().backward()
    assert not losses_m[-3:].any()
    results = {"losses": losses_m.detach().float()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:  # None if the layer adds to a gradient buffer
            results[stored_name(name)] = parameter.grad.float()
    return results


def gaps(computed: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Return the relative error of the mean loss, and 1 - cosine of the gradient that differs most."""
    assert computed.keys() == exact.keys()
    loss = abs(computed["losses"].mean() / exact["losses"].mean() - 1).item()
    cosines = {
        name: torch.cosine_similarity(computed[name].flatten(), exact[name].flatten(), 0).item()
        for name in computed
        if name != "losses"
    }
    return loss, 1 - min(cosines.values())


@pytest.mark.parametrize(
    ("recipe", "model", "is_causal"),
    [
        *((recipe, {}, False) for recipe in RECIPES),
        *(("bf16", model, False) for model in MODELS.values()),
        ("bf16", {}, True),
    ],
    ids=[*RECIPES, *MODELS, "causal"],
)
@on_the_engine
def test_losses_and_gradients_equal_float32_within_the_rounding_of_the_recipe(recipe, model, is_causal):
    exact = losses_and_gradients(build(LOCAL, bf16=False, **model), is_causal=is_causal)
    computed = losses_and_gradients(build(RECIPES[recipe], **model), is_causal=is_causal)
    loss, gradient = gaps(computed, exact)
    print(f"{recipe}: loss {loss:.2e} gradient {gradient:.2e}")
    assert loss <= ENGINE_LOSS.gate
    assert gradient <= ENGINE_GRADIENT[recipe].gate
    if recipe != "bf16":
        in_bf16 = losses_and_gradients(build(ENGINE, **model))
        assert gaps(in_bf16, exact)[1] < gradient / 10, "FP8 must have an effect, or it is not on"
    if is_causal:
        bidirectional = losses_and_gradients(build(LOCAL, bf16=False, **model))
        assert gaps(computed, bidirectional)[1] > 10 * ENGINE_GRADIENT[recipe].gate, "the mask must have an effect"


@on_the_engine
def test_transformer_engine_refuses_the_recipes_that_this_gpu_cannot_run():
    assert list(kernels.fp8_refusals()) == ["mxfp8"]  # on an H200


@on_the_engine
def test_transformer_engine_s_layers_sum_weight_gradients_in_float32():
    """Without fusion, the sum over eight equal micro-batches is eight times a number rounded to bfloat16."""
    sums = []
    for fuses in (True, False):
        model = build(ENGINE, wrapped=True)
        for module in model.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = fuses
        for _ in range(8):
            losses_and_gradients(model.module.module)
        (weight,) = (
            value for name, value in model.named_parameters() if name.endswith("layers.0.mlp.linear_fc2.weight")
        )
        sums.append(weight.main_grad.clone())
    fused, rounded = sums
    assert torch.equal((rounded / 8).bfloat16().float(), rounded / 8)
    assert not torch.equal((fused / 8).bfloat16().float(), fused / 8)
    torch.testing.assert_close(fused, rounded, rtol=2**-7, atol=1e-3)
