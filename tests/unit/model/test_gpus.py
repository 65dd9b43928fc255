"""Peak rates of known GPUs, and no rate for unknown ones."""

import pytest

from megatron_neobert.model.gpus import find_gpu


@pytest.mark.parametrize(
    ("device", "sparse_tflops"),  # data sheets print rates "with sparsity", twice the dense rate
    [("NVIDIA H100 80GB HBM3", 1979), ("NVIDIA H200", 1979), ("NVIDIA H100 PCIe", 1513), ("NVIDIA L40S", 733)],
)
def test_rate_is_half_of_the_data_sheet_s_rate_with_sparsity(device, sparse_tflops):
    gpu = find_gpu(device)
    assert gpu is not None and gpu.bf16_tflops == pytest.approx(sparse_tflops / 2, rel=0.02)


@pytest.mark.parametrize(
    "device", ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA L4S", "Radeon", ""]
)
def test_gpu_slice_or_unknown_gpu_has_no_rate(device):
    assert find_gpu(device) is None
