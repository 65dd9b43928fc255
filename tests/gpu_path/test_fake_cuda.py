"""Waits, copies and collectives of a training step on a GPU, counted without a GPU (fake_step.py).

The tests compare the exact list of waits and copies, for one rank and for every kind of parallelism, with local layers
and with Transformer Engine's.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import emulated_engine
import pytest
import torch
from emulated_engine import ENGINE, FP8
from megatron.core import package_info

FOLDER = Path(__file__).resolve().parent
REPOSITORY = FOLDER.parents[1]
IS_OLDEST_LINE = package_info.__version__.startswith("0.16")
LAYERS = 2
WAIT = {"cuda to cpu: training/step.py _gather_results": 1}
COPIES = {
    "cpu to cuda: batches/batch.py <lambda>": 2 * 4,  # micro-batches, tensors of a MicroBatch
    "cpu to cuda: training/step.py _gather_results": 1,
}
TWO_OF_EACH = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 2,
}
BOTH = pytest.mark.parametrize(
    "compute", [{}, pytest.param(ENGINE, marks=emulated_engine.needs_sources)], ids=["local", "transformer_engine"]
)


def of_two(**parallel: Any) -> dict[str, Any]:
    return {"world_size": 2, "parallel": parallel}


LAYOUTS = {
    "tensor": of_two(tensor_model_parallel_size=2),
    "context": of_two(context_parallel_size=2),
    "data": of_two(),
    "data, not overlapped": of_two(overlap_grad_reduce=False),
    "pipeline, first stage": of_two(pipeline_model_parallel_size=2),
    "pipeline, last stage": {**of_two(pipeline_model_parallel_size=2), "rank": 1},
    "64 ranks, the first": {"world_size": 64, "parallel": TWO_OF_EACH},
}


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake device, compiled for this torch in 4 s."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler, g++ or clang++")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, and tests/gpu runs on it")
    target, root = tmp_path_factory.mktemp("fake_cuda") / "fake_cuda.so", Path(torch.__file__).parent
    headers = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root / 'lib'}"]
    command = [compiler, "-shared", "-fPIC", "-std=c++20", *headers, str(FOLDER / "fake_cuda.cpp"), "-o", str(target)]
    subprocess.run([*command, *libraries], check=True)
    return target


def run_cases(library: Path, cases: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run the cases with fake_step.py, in one process, because importing megatron.core is slow."""
    cases_path, results_path = folder / "cases.json", folder / "results.json"
    cases_path.write_text(json.dumps({label: {"num_layers": LAYERS} | case for label, case in cases.items()}))
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(FOLDER / "fake_step.py"), str(library), str(cases_path), str(results_path)]
    environment = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(results_path.read_text())


@BOTH
def test_a_step_waits_for_the_device_once(library, tmp_path, compute):
    """One rank, and the last of 64 ranks with every kind of parallelism, which uses FP8 with Transformer Engine.

    Controls: a step without our patches of Megatron, and a step with a tensor on the CPU. Transformer Engine's C++
    bindings do not run here. In 2.11.0, their source has no wait in the functions that these steps call.
    """
    cases = {
        "one rank": {},
        "64 ranks, the last": {"world_size": 64, "rank": 63, "parallel": TWO_OF_EACH},
        "control": {"without_patches": True},
        "mixed": {"mixes_devices": True, "fails": True},
    }
    cases = {label: {"compute": compute, **case} for label, case in cases.items()}
    if compute:
        cases["64 ranks, the last"]["compute"] = FP8["tensorwise"]
    results = run_cases(library, cases, tmp_path)
    assert "at least two devices, cuda:0 and cpu" in results.pop("mixed")["error"]
    # If no supported release of megatron.core waits here, remove the patches.
    waits = results.pop("control")["waits"]
    assert ("item: optimizer/clip_grads.py get_grad_norm_fp32" in waits) == (IS_OLDEST_LINE or not compute)
    assert ("item: distributed/finalize_model_grads.py finalize_model_grads" in waits) == IS_OLDEST_LINE
    assert_waits_and_copies(results)
    # By the same choice as below, for the Hopper GPU of these cases.
    assert all(str(result["attention"]).startswith("cuDNN (") == bool(compute) for result in results.values())


def assert_waits_and_copies(results: dict[str, Any]) -> None:
    for label, result in results.items():
        assert (result["waits"], result["copies"]) == (WAIT, COPIES), label


@emulated_engine.needs_sources
@pytest.mark.parametrize(
    ("capability", "outcome"),
    [((10, 0), "cuDNN ("), ((8, 0), "Transformer Engine has no fused attention kernel for this model on this GPU")],
    ids=["Blackwell", "Ampere without flash-attn"],
)
def test_transformer_engine_chooses_cudnn_on_blackwell_and_nothing_on_ampere(library, tmp_path, capability, outcome):
    """Its Python chooses, by the conditions of its C++ source, which tests/emulated_engine repeats."""
    case = {"compute": ENGINE, "capability": capability, "fails": capability == (8, 0)}
    result = run_cases(library, {"case": case}, tmp_path)["case"]
    assert outcome in result.get("error", result.get("attention"))


@pytest.mark.parametrize(
    ("compute", "factor"),
    [
        pytest.param(ENGINE, 1.007, marks=emulated_engine.needs_sources),
        ({"transformer_impl": "local"}, 1.005),
        ({"recompute_granularity": "full"}, 1.06),
    ],
    ids=["transformer_engine", "local", "recomputed"],
)
def test_planned_activations_differ_by_the_documented_factor(library, tmp_path, compute, factor):
    case = {"num_layers": 12, "compute": compute, "counts_activations": True}
    result = run_cases(library, {"case": case}, tmp_path)["case"]
    assert result["activations"] / result["planned_activations"] == pytest.approx(factor, abs=0.002)


def test_planned_traffic_equals_the_counted_collectives(library, tmp_path):
    """Both pipeline stages of 64 ranks, with small buckets, so that there are several.

    On 192 data-parallel ranks, megatron.core's own size of a bucket would give one, and nothing would overlap.
    """
    split = {"num_layers": 4, "world_size": 64, "parallel": {**TWO_OF_EACH, "ddp_bucket_size": 1_000_000}}
    recomputed = {"recompute_granularity": "full"}
    results = run_cases(library, {
        "data": {"num_layers": 4, "world_size": 192},
        "first stage": {**split, "compute": recomputed},
        "last stage": {**split, "rank": 63},
    }, tmp_path)  # fmt: skip
    assert_planned_traffic(results)
    assert [calls for _, _, calls, _ in results["data"]["collectives"]] == [2, 2]
    assert len(results["last stage"]["collectives"]) == 7


def assert_planned_traffic(results: dict[str, Any]) -> None:
    for label, result in results.items():
        assert result["collectives"] == result["planned_collectives"], label


@pytest.mark.slow
@BOTH
def test_every_layout_waits_for_the_device_once_and_has_the_planned_traffic(library, tmp_path, compute):
    cases = {label: {**layout, "compute": compute} for label, layout in LAYOUTS.items()}
    if compute:
        cases |= {recipe: {"compute": FP8[recipe]} for recipe in FP8}
    results = run_cases(library, cases, tmp_path)
    assert_waits_and_copies(results)
    assert_planned_traffic(results)
