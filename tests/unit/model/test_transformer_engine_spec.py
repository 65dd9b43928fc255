"""The layers of Transformer Engine compute, and save, what the local ones do.

Transformer Engine itself needs a GPU; tests/te_stand_in.py says what stands for it here and what that can show.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from processes import group_of
from spec_cases import CASES, build, compute, fill, load, save, settings_of, weights
from tolerances import LAYOUT_LOSS

from megatron_neobert.runtime import distributed
from megatron_neobert.runtime.rendezvous import serve_store

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    distributed.initialize(settings_of("neobert", impl="local"))
    yield
    distributed.shut_down()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, process_group: None) -> Path:
    """Where the other process left its results; beside them a checkpoint of each case by the local layers."""
    folder = tmp_path_factory.mktemp("engine")
    for case in CASES:
        model = build(case, impl="local")
        fill(model, 2.0)
        save(model, folder / f"local_{case}")
    store = serve_store("127.0.0.1", 0, nodes=2)
    paths = [REPOSITORY, REPOSITORY / "tests", HERE]
    child = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "te_child.py"), str(folder)],
        env={**os.environ, **group_of(store, world_size=2), "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    return folder


def read(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"{name}.pt", weights_only=True)


@pytest.mark.parametrize("case", CASES)
def test_both_implementations_give_the_same_losses_and_gradients_bit_for_bit(folder, case):
    local, engine = compute(build(case, impl="local")), read(folder, case)
    assert set(local) == set(engine)
    different = [name for name in local if not torch.equal(local[name], engine[name])]
    assert different == []


def test_causal_attention_would_show(folder):
    local, causal = compute(build("neobert", impl="local")), read(folder, "causal")
    gap = ((local["losses"] - causal["losses"]) / local["losses"]).abs().max()
    assert gap > 1e4 * torch.finfo(torch.float32).eps


def test_attention_gets_the_padding_mask_a_plain_length_and_no_padded_bounds(folder):
    calls = read(folder, "attention_calls")
    assert len(calls) == 2 * len(CASES)  # layers
    for call in calls:
        assert call["mask"] == call["mask_of_init"] == "padding"
        assert type(call["max_seqlen"]) is int  # None, or a tensor, would cost a synchronisation in each layer
        assert call["padded"] is None  # so would these, by a comparison with the bounds


@pytest.mark.parametrize("case", CASES)
def test_both_implementations_use_the_same_names_in_a_checkpoint(folder, case):
    model = build(case, impl="local")
    local = {entry.key for name, entry in model.sharded_state_dict().items() if not name.endswith("_extra_state")}
    engine = torch.load(folder / f"{case}_names.pt", weights_only=True)
    assert local == {name for name in without_layer_numbers(engine) if not name.endswith("_extra_state")}


def without_layer_numbers(names: list[str]) -> set[str]:
    """Keys of the tensors, which hold all layers, out of the entries of the state dict."""
    return {name.replace("layers.0.", "layers.").replace("layers.1.", "layers.") for name in names}


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_the_local_layers_loads_into_those_of_transformer_engine(folder, case):
    model = build(case, impl="local")
    fill(model, 2.0)
    expected, loaded = weights(model), read(folder, f"{case}_loaded")
    assert set(expected) == set(loaded)
    assert all(torch.equal(expected[name], loaded[name]) for name in expected)


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_transformer_engine_s_layers_loads_into_the_local_ones(folder, case):
    model = build(case, impl="local")
    before = weights(model)["decoder.final_layernorm.weight"].clone()
    load(model, folder / f"engine_{case}")
    expected = {name: 3.0 * value + 3.0 / 16 for name, value in read(folder, f"{case}_loaded").items()}
    assert all(torch.equal(expected[name], value) for name, value in weights(model).items())
    assert not torch.equal(weights(model)["decoder.final_layernorm.weight"], before)


@pytest.mark.parametrize("case", ["neobert", "layer_norm"])
def test_two_sequence_parallel_ranks_give_the_losses_of_one(folder, case):
    alone = compute(build(case, impl="local"))["losses"]
    for rank in range(2):
        results, marks = torch.load(folder / f"{case}_rank{rank}.pt", weights_only=True)
        torch.testing.assert_close(results["losses"], alone, rtol=LAYOUT_LOSS.gate, atol=0)
        assert marks and all(marks.values()), "Megatron sums the gradients of norms over ranks by this mark"


def test_transformer_engine_s_cross_entropy_gives_torch_s_losses_and_none_for_a_filler(folder):
    found = read(folder, "fused_losses")
    real = torch.tensor([0, 1, 3])
    labels = torch.tensor([3, 7, 11])
    logits = found["logits"].clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(logits[real], labels, reduction="none")
    expected.sum().backward()
    torch.testing.assert_close(found["losses"][real], expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found["gradient"], logits.grad, rtol=1e-6, atol=1e-7)
    assert found["losses"][2] == found["correct"][2] == 0


def test_weight_gradients_of_transformer_engine_s_layers_are_added_up_in_float32(folder):
    """Eight times the same micro-batch: rounded to bfloat16 each time, the sum is eight times a rounded number."""
    found = read(folder, "accumulated")
    fused, rounded = found["True"], found["False"]
    assert torch.equal((rounded / 8).bfloat16().float(), rounded / 8)
    assert not torch.equal((fused / 8).bfloat16().float(), fused / 8)
    torch.testing.assert_close(fused, rounded, rtol=2**-7, atol=1e-3)
