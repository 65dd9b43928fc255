"""Which models can compute what, which kernels ran, and what a step costs."""

import pytest
import torch
from throughput_subjects import POSITIONS, build_bert, build_roberta, subject_of
from unit.huggingface.tiny_neobert import build_model

from megatron_neobert.evaluation.throughput.models import (
    FORWARD,
    TRAINING,
    build_batch,
    find_kernels,
    has_memory_for,
    make_step,
    prepare,
    time_step,
    why_not,
)

CPU = torch.device("cpu")


def step_of(model, passes=FORWARD, length=POSITIONS):
    labels = passes == TRAINING
    batch = build_batch([length, length], layout="padded", labels=labels, config=model.config, seed=0, device=CPU)
    prepare(subject_of(model), passes)
    return make_step(subject_of(model), batch, passes)


@pytest.mark.parametrize("build", [build_bert, build_roberta])
def test_learned_positions_end_where_the_model_does(build):
    model = build()
    assert subject_of(model).longest == POSITIONS
    step_of(model)()
    with pytest.raises((IndexError, RuntimeError)):
        step_of(model, length=POSITIONS + 1)()


def test_computed_positions_have_no_end():
    model = build_model()
    assert subject_of(model).longest is None
    step_of(model, length=2 * model.config.max_position_embeddings)()


def test_only_a_model_that_keeps_documents_apart_is_measured_packed():
    assert why_not(subject_of(build_model()), "packed") is None
    assert "cu_seqlens" in why_not(subject_of(build_bert()), "packed")
    assert why_not(subject_of(build_bert()), "padded") is None


def test_flash_attention_is_not_asked_to_compute_in_float32():
    model = build_bert()
    model.config._attn_implementation = "flash_attention_2"
    assert "bfloat16" in why_not(subject_of(model), "padded")


def test_the_kernel_is_the_one_that_ran_and_not_the_one_asked_for():
    model = build_bert()  # whose dropout the fused kernel of a CPU cannot do
    fused = "scaled_dot_product_flash_attention_for_cpu"
    assert find_kernels(subject_of(model), step_of(model)) == [fused]
    assert find_kernels(subject_of(model), step_of(model, TRAINING)) == ["math"]
    model.set_attn_implementation("eager")
    assert find_kernels(subject_of(model), step_of(model)) == []


def test_a_training_step_has_gradients_and_a_forward_has_none():
    model = build_bert()
    step_of(model)()
    assert all(parameter.grad is None for parameter in model.parameters())
    step_of(model, TRAINING)()
    assert model.training
    assert model.bert.embeddings.word_embeddings.weight.grad.abs().sum() > 0


def test_memory_of_a_step_is_what_it_allocates_at_most():
    size = 32 << 20  # floats
    assert time_step(lambda: _drop(torch.ones(size)), CPU).grown_bytes >= 0.9 * 4 * size
    assert time_step(lambda: _drop(torch.ones(1)), CPU).grown_bytes < 0.5 * 4 * size


def _drop(tensor):
    del tensor


def test_running_out_of_memory_is_an_answer_and_any_other_error_is_raised():
    assert not has_memory_for(lambda: _drop(torch.empty(1 << 50, dtype=torch.uint8)), CPU)
    assert has_memory_for(lambda: _drop(torch.empty(1)), CPU)
    with pytest.raises(RuntimeError, match="must match"):
        has_memory_for(lambda: _drop(torch.empty(2) + torch.empty(3)), CPU)
