"""Number of operations, size of a checkpoint, and peak rates of known GPUs."""

import pytest

from megatron_neobert.config.schema import Settings
from megatron_neobert.model.flops import checkpoint_bytes, find_gpu, training_flops_per_token

VOCAB = 30_522  # google-bert/bert-base-uncased


def test_flops_per_token_with_a_fifth_of_the_head_are_1_48_giga():
    flops = training_flops_per_token(Settings(), vocab_size=VOCAB, document_tokens=1024)
    blocks = 28 * (4 * 768**2 + 3 * 768 * 2048)
    assert flops == pytest.approx(6 * (blocks + 0.2 * VOCAB * 768) + 12 * 28 * 768 * 1024)
    assert flops / 1e9 == pytest.approx(1.482, abs=1e-3)


def test_a_causal_token_attends_to_half_of_its_document_and_is_always_predicted():
    settings = Settings().with_section("data", objective="clm")
    flops = training_flops_per_token(settings, vocab_size=VOCAB, document_tokens=1024)
    blocks = 28 * (4 * 768**2 + 3 * 768 * 2048)
    assert flops == pytest.approx(6 * (blocks + VOCAB * 768) + 12 * 28 * 768 * 512)


def test_layout_concatenated_costs_as_much_as_documents_of_the_sequence_length():
    settings = Settings().with_section("data", batch_layout="concatenated")
    expected = training_flops_per_token(Settings(), vocab_size=VOCAB, document_tokens=1024)
    assert training_flops_per_token(settings, vocab_size=VOCAB, document_tokens=300) == expected
    assert training_flops_per_token(Settings(), vocab_size=VOCAB, document_tokens=300) < expected


def test_checkpoint_has_the_bytes_of_weights_main_weights_and_two_moments():
    assert checkpoint_bytes(Settings(), vocab_size=VOCAB) == 245_136_954 * 12


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
