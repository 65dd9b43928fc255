"""Kernels that are chosen, and settings that are refused, for descriptions of several machines."""

import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import emulated_engine
import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor

from megatron_neobert.config.schema import Settings
from megatron_neobert.errors import ConfigError
from megatron_neobert.model import kernels
from megatron_neobert.model.attention import attend_by_document
from megatron_neobert.model.kernels import Hardware, Library, check_hardware, choose_kernels, detect_hardware
from megatron_neobert.model.neobert import NeoBERTModel

CPU = Hardware()
H100 = Hardware(gpu="NVIDIA H100", capability=(9, 0), transformer_engine=Library(version="2.11.0"))
BARE_H100 = replace(H100, transformer_engine=Library(problem="transformer_engine.pytorch cannot be imported: no"))
V100 = replace(BARE_H100, gpu="NVIDIA V100", capability=(7, 0))


def settings(*, bf16: bool = True, hidden_size: int = 768, stages: int = 1, **compute: Any) -> Settings:
    built = Settings().with_section("training", bf16=bf16).with_section("model", hidden_size=hidden_size)
    return built.with_section("parallel", pipeline_model_parallel_size=stages).with_section("compute", **compute)


def refusal(settings: Settings, hardware: Hardware) -> str:
    with pytest.raises(ConfigError) as caught:
        check_hardware(settings, hardware)
    return str(caught.value)


@pytest.mark.parametrize(
    ("hardware", "changes", "implementation", "attention"),
    [
        (CPU, {}, "local", "torch"),
        (H100, {}, "transformer_engine", "transformer_engine"),
        (H100, {"bf16": False}, "local", "torch"),
        (H100, {"transformer_impl": "local"}, "local", "torch"),
        (H100, {"attention_backend": "flash"}, "transformer_engine", "transformer_engine"),
        (H100, {"hidden_size": 1008}, "transformer_engine", "torch"),  # 12 heads of 84, which is not a multiple of 8
        (BARE_H100, {}, "local", "torch"),
    ],
)
def test_kernels_follow_from_machine_and_settings(hardware, changes, implementation, attention):
    chosen = choose_kernels(settings(**changes), hardware)
    assert (chosen.transformer_impl, chosen.attention) == (implementation, attention)
    assert "FlashAttention 4" not in chosen.summary, "which is not installed"


@pytest.mark.parametrize(
    ("compute", "flag"),
    [
        ({"transformer_impl": "transformer_engine"}, "--transformer-impl transformer_engine"),
        ({"attention_backend": "fused"}, "--attention-backend fused"),
        ({"attention_backend": "flash"}, "--attention-backend flash"),
        ({"fp8_format": "e4m3"}, "--fp8-format e4m3"),
    ],
)
def test_settings_that_need_transformer_engine_are_refused_without_it(compute, flag, monkeypatch):
    assert f"{flag} needs Transformer Engine: this machine has no CUDA device" in refusal(settings(**compute), CPU)
    assert f"{flag} needs Transformer Engine: transformer_engine.pytorch cannot" in refusal(
        settings(**compute), BARE_H100
    )
    monkeypatch.setattr(kernels, "fp8_refusals", dict)
    check_hardware(settings(**compute), replace(H100, flash_attn=Library(version="2.8.3")))


def test_flash_attn_is_refused_without_the_package_and_a_cuda_graph_without_a_gpu():
    flash, graphed = settings(attention_backend="flash"), settings(cuda_graph_impl="full_iteration")
    assert "needs flash-attn, or from compute capability 9.0 on flash-attn-4 (not installed)" in refusal(flash, H100)
    assert "--cuda-graph-impl full_iteration needs a CUDA device; use --cuda-graph-impl auto." in refusal(graphed, CPU)
    check_hardware(graphed, H100)


@pytest.mark.parametrize(
    ("changes", "launch"),
    [
        ({}, "one CUDA graph per step"),
        ({"fp8_format": "hybrid"}, "one CUDA graph per step"),
        ({"bf16": False}, "no CUDA graph (in float32 the host waits for the lengths of the documents)"),
        ({"stages": 2}, "no CUDA graph (a graph holds no exchange between stages)"),
        ({"cuda_graph_impl": "none"}, "no CUDA graph (--cuda-graph-impl none)"),
    ],
)
def test_a_step_is_one_cuda_graph_where_that_can_run_and_the_log_says_why_not(changes, launch):
    assert choose_kernels(settings(**changes), H100).summary.endswith(f"; {launch}")
    assert "graph" not in choose_kernels(settings(**changes), CPU).summary


@pytest.mark.skipif(torch.cuda.is_available(), reason="replaces the GPU by the CPU")
def test_local_layers_use_flash_attention_4_if_it_computes_attention_and_else_torch_s(site, monkeypatch):
    (site / "flash_attn" / "cute").mkdir(parents=True)
    code = "def flash_attn_varlen_func(*_, **__): raise ValueError('sm_120')\n"
    (site / "flash_attn" / "cute" / "interface.py").write_text(code)
    with mock.patch.dict(sys.modules):
        assert kernels._find_flash_attention((9, 0)).version and not kernels._find_flash_attention((8, 0)).version
    failure = "FlashAttention 2; FlashAttention 4 is installed and does not work here (ValueError: sm_120)"
    local = settings(transformer_impl="local")
    with mock.patch.dict(sys.modules), emulated_engine._OnCpu():
        for expected in (failure, "FlashAttention 4;"):
            kernels.choose_packed_attention.cache_clear()
            assert expected in choose_kernels(local, H100).summary
            monkeypatch.setattr(kernels, "_check_packed_attention", lambda *_: None)
    kernels.choose_packed_attention.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="replaces the GPU by the CPU")
def test_packed_attention_that_computes_something_else_is_detected():
    def attend(heads: Any, cu_seqlens_n: Tensor, *_: Any, is_causal: bool, **__: Any) -> Any:
        return attend_by_document(*heads, cu_seqlens_n, is_causal=is_causal).view_as(heads[0])

    def attend_across_documents(heads: Any, *_: Any, **flags: Any) -> Any:
        return attend(heads, torch.tensor([0, 256]), **flags)

    def attend_without_gradients(heads: Any, *bounds: Any, **flags: Any) -> Any:
        return attend([*heads[:2].detach(), heads[2]], *bounds, **flags)

    def attend_without_a_causal_mask(heads: Any, *bounds: Any, **_: Any) -> Any:
        return attend(heads, *bounds, is_causal=False)

    with emulated_engine._OnCpu():
        kernels._check_packed_attention(attend, 64)
        for wrong in (attend_across_documents, attend_without_gradients, attend_without_a_causal_mask):
            with pytest.raises(AssertionError):
                kernels._check_packed_attention(wrong, 64)


def test_fp8_recipe_is_refused_with_transformer_engine_s_reason_and_possible_recipes(monkeypatch):
    refusals = {"mxfp8": "Compute capability 10.0 or higher required.", "blockwise": "No."}
    monkeypatch.setattr(kernels, "fp8_refusals", lambda: refusals)
    message = refusal(settings(fp8_format="hybrid", fp8_recipe="mxfp8"), H100)
    assert "(compute capability 9.0): Compute capability 10.0 or higher required. Use --fp8-recipe tensor" in message
    check_hardware(settings(fp8_format="hybrid"), H100)


def test_bfloat16_is_refused_on_gpus_below_compute_capability_8():
    assert "--bf16 needs compute capability 8.0 or higher" in refusal(settings(), V100)
    check_hardware(settings(bf16=False), V100)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on sys.path; `detect_hardware` examines the machine again."""
    monkeypatch.syspath_prepend(str(tmp_path))
    detect_hardware.cache_clear()
    yield tmp_path
    detect_hardware.cache_clear()


def test_package_that_fails_at_its_import_is_a_problem_of_the_settings_that_need_it(site):
    (site / "broken.py").write_text("raise AttributeError('of another release')\n")
    library = kernels._try_import("broken", distribution="broken")
    assert (library.version, library.problem) == (None, "broken cannot be imported: of another release")


def test_apex_of_pypi_is_refused_without_being_imported_and_nvidia_s_is_not(site):
    (site / "apex").mkdir()
    (site / "apex" / "__init__.py").write_text("raise RuntimeError('apex was imported')\n")
    (site / "apex-0.9.dist-info").mkdir()
    (site / "apex-0.9.dist-info" / "METADATA").write_text("Name: apex\nVersion: 0.9\n")
    message = refusal(Settings(), detect_hardware())
    assert "apex 0.9 is not NVIDIA Apex" in message
    assert "pip uninstall apex" in message
    assert "apex" not in sys.modules
    (site / "apex" / "optimizers").mkdir()  # only NVIDIA's has it
    detect_hardware.cache_clear()
    assert detect_hardware().foreign_apex is None


def test_environment_never_allows_transformer_engine_s_unfused_attention(monkeypatch):
    for name in ("FLASH", "FUSED", "UNFUSED"):
        monkeypatch.setenv(f"NVTE_{name}_ATTN", "1")  # as a user may have set it
    for backend, allowed in (("auto", "110"), ("flash", "100"), ("fused", "010")):
        model = SimpleNamespace(config=SimpleNamespace(attention_backend=AttnBackend[backend]))
        NeoBERTModel._set_attention_backend(model)
        assert "".join(os.environ[f"NVTE_{name}_ATTN"] for name in ("FLASH", "FUSED", "UNFUSED")) == allowed
