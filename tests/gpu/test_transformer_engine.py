"""On a GPU, real kernels compute the model's numbers in bfloat16 and FP8, and the host does not wait for the device.

Results are compared with the same model in float32 on the same device, one document at a time, which tests/parity
compares with the reference. Without a GPU, the tests run over Transformer Engine emulated on CPU (conftest.py). This
tests the tests, not a GPU. Tests that need a device or a package are skipped with the reason. One H200 has passed them
(docs/performance.md).
"""

import itertools
from collections.abc import Iterator
from typing import Any

import emulated_engine
import pytest
import torch
from emulated_engine import ENGINE, LOCAL
from torch import Tensor

from megatron_neobert.config.schema import ModelConfig, Settings, TrainingConfig
from megatron_neobert.errors import ConfigError
from megatron_neobert.model.attention import TorchAttention, attend_by_document
from megatron_neobert.model.kernels import check_hardware
from megatron_neobert.model.neobert import NeoBERTModel
from megatron_neobert.runtime import distributed

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = [pytest.mark.gpu] if HAS_GPU else [emulated_engine.needs_sources]
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
VOCAB = 4000
LENGTHS = (5, 1, 250, 128, 640)
TOKENS = sum(LENGTHS)  # 1024, a multiple of 128, which all FP8 recipes accept
MAX_SEQLEN = 640
MASKED = slice(None, None, 4)


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    if not HAS_GPU:  # each test has its own process and group
        yield
        return
    distributed.initialize(Settings())
    yield
    distributed.shut_down()


@pytest.fixture(params=["local", "transformer_engine"])
def implementation(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"transformer_impl": request.param}


def settings(compute: dict[str, Any], *, bf16: bool, **model: Any) -> Settings:
    shape = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": MAX_SEQLEN}
    built = Settings(model=ModelConfig(**{**shape, **model}), training=TrainingConfig(bf16=bf16))
    return built.with_section("compute", **compute)


def build(compute: dict[str, Any], *, bf16: bool = True, **model: Any) -> NeoBERTModel:
    """Build the model, or skip the test with the error message of `check_hardware`."""
    run_settings = settings(compute, bf16=bf16, **model)
    try:
        check_hardware(run_settings)
    except ConfigError as error:
        pytest.skip(str(error))
    return NeoBERTModel(run_settings, vocab_size=VOCAB).to(DEVICE)


def pack_documents(*, lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor]:
    tokens_t = torch.randint(5, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    return tokens_t, torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)


def logits_of(model: NeoBERTModel, *, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    tokens_t, cu_seqlens_n = pack_documents(lengths=lengths)
    with torch.no_grad():
        logits_mv = model(tokens_t, cu_seqlens_n, max(lengths), torch.arange(TOKENS, device=DEVICE)[MASKED])
    return logits_mv[:, :VOCAB].float()


def losses_of(model: NeoBERTModel) -> Tensor:
    tokens_t, cu_seqlens_n = pack_documents()
    positions_m = torch.arange(TOKENS, device=DEVICE)[MASKED]
    losses_m, _ = model(tokens_t, cu_seqlens_n, MAX_SEQLEN, positions_m, tokens_t[positions_m])
    return losses_m


def cosine(first_mv: Tensor, second_mv: Tensor) -> float:
    """Return the cosine of the logits at the token where they differ most."""
    return torch.cosine_similarity(first_mv, second_mv, dim=1).min().item()


def test_bfloat16_logits_are_close_to_float32(implementation):
    exact_mv = logits_of(build(LOCAL, bf16=False))
    logits_mv = logits_of(build(implementation))
    assert cosine(logits_mv, exact_mv) > 0.99
    merged_mv = logits_of(build(LOCAL, bf16=False), lengths=(TOKENS,))
    assert cosine(merged_mv, exact_mv) < 0.99, "attention across documents must change the logits"


def test_bfloat16_gradients_are_close_to_float32(implementation):
    models = build(LOCAL, bf16=False), build(implementation)
    for model in models:
        losses_of(model).sum().backward()
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        exact_gradient, gradient = (dict(model.named_parameters())[name].grad.float() for model in models)
        assert torch.cosine_similarity(gradient.flatten(), exact_gradient.flatten(), dim=0) > 0.99, name


def test_document_has_the_same_logits_alone_and_packed(implementation):
    model = build(implementation)
    tokens_t, cu_seqlens_n = pack_documents()
    positions_t = torch.arange(TOKENS, device=DEVICE)
    with torch.no_grad():
        packed_tv = model(tokens_t, cu_seqlens_n, MAX_SEQLEN, positions_t)[:, :VOCAB].float()
        bounds = cu_seqlens_n.tolist()
        for start, end in itertools.pairwise(bounds):
            document = torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE)
            alone_tv = model(tokens_t[start:end], document, MAX_SEQLEN, positions_t[: end - start])[:, :VOCAB].float()
            assert cosine(packed_tv[start:end], alone_tv) > 0.999


@needs_gpu
def test_a_step_never_waits_for_the_device(implementation):
    """Forward and backward with arguments on the GPU. Only the first step, which compiles, may wait."""
    model = build(implementation)
    tokens_t, cu_seqlens_n = pack_documents(lengths=(*LENGTHS, 0, 0))
    positions_m = torch.arange(TOKENS, device=DEVICE)[MASKED]
    labels_m = tokens_t[positions_m]
    labels_m[-3:] = -100
    for mode in ("default", "error"):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            losses_m, _ = model(tokens_t, cu_seqlens_n, MAX_SEQLEN, positions_m, labels_m)
            losses_m.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert losses_m.isfinite().all() and not losses_m[-3:].any()


@needs_gpu
def test_sync_debug_mode_detects_waiting_for_the_device():
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError):
            torch.ones(1, device=DEVICE).item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise", "mxfp8"])
def test_fp8_step_is_close_to_a_bfloat16_step(recipe):
    fp8 = {"fp8_format": "hybrid", "fp8_recipe": recipe}
    exact, model = build(ENGINE), build({**ENGINE, **fp8})
    exact_losses_m, losses_m = losses_of(exact), losses_of(model)
    assert not torch.equal(losses_m, exact_losses_m), "FP8 must have an effect, or it is not on"
    torch.testing.assert_close(losses_m.mean(), exact_losses_m.mean(), rtol=0.02, atol=0)
    losses_m.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def make_heads(width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(TOKENS, 2, width, generator=generator).to(DEVICE, torch.bfloat16) for _ in range(3)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("width", [64, 84])  # 84 is not a multiple of 8
def test_packed_kernel_equals_one_call_per_document(width, is_causal):
    """With FlashAttention 4, if it is installed."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    _, cu_seqlens_n = pack_documents(lengths=(*LENGTHS, 0))
    config = build(LOCAL).config
    module = TorchAttention(config, 1, AttnMaskType.padding, "self", None)
    packed, by_document = make_heads(width), make_heads(width)
    for heads in (*packed, *by_document):
        heads.requires_grad_()
    bounds = PackedSeqParams("thd", cu_seqlens_n, cu_seqlens_n, max_seqlen_q=MAX_SEQLEN, max_seqlen_kv=MAX_SEQLEN)
    mask = AttnMaskType.padding_causal if is_causal else AttnMaskType.padding
    context = module(*packed, None, attn_mask_type=mask, packed_seq_params=bounds)
    expected = attend_by_document(*by_document, cu_seqlens_n, is_causal=is_causal)
    torch.testing.assert_close(context, expected, rtol=2e-2, atol=2e-2)
    weights = torch.randn(context.shape, generator=torch.Generator().manual_seed(1)).to(context)
    (context * weights).sum().backward()
    (expected * weights).sum().backward()
    for heads, expected_heads in zip(packed, by_document, strict=True):
        gradients = heads.grad.flatten().float(), expected_heads.grad.flatten().float()
        assert torch.cosine_similarity(*gradients, dim=0) > 0.999
