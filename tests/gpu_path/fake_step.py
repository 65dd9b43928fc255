"""Training steps on fake CUDA tensors, with real shapes, dtypes and devices, and without numbers or a GPU.

Usage: `python fake_step.py LIBRARY CASES RESULTS`. LIBRARY is built from fake_cuda.cpp by test_fake_cuda.py; CASES and
RESULTS are JSON files. It runs in its own process, because it makes torch report a GPU. Model, step and optimizer are
the project's, with megatron.core's data parallelism. Operations on tensors of different devices raise, as on a GPU. For
the second step of each case, the results list where the host waits for the device, the copies and the collectives.
"""

import ctypes
import functools
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import MagicMock

LIBRARY = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)  # before torch, so that its hooks are found first

import numpy as np  # noqa: E402
import torch  # noqa: E402

LIBRARY.replace_guard()  # after torch, whose guard it replaces
from census import Census, calling_function, storage_of, tensors_of  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

DEVICE = torch.device("cuda", 0)
VOCAB, SEQ_LENGTH, SEQUENCES, MICRO_BATCHES, DOCUMENTS = 30_522, 1024, 64, 2, 256
CENSUS = Census()


def as_one_kernel(function: Callable[..., Any], **compiler_options: Any) -> Callable[..., Any]:
    """Replace torch.compile. The function keeps for its backward what Inductor keeps at best: its arguments.

    If autograd keeps only arguments, backward reads these. If it also keeps other tensors, backward computes them again
    from all arguments.
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        kept: set[int] = set()

        def keep(tensor: Tensor) -> Tensor:
            kept.add(storage_of(tensor))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = function(*args, **options)
        arguments = {storage_of(tensor): tensor for tensor in tensors_of(args)}
        for storage, tensor in arguments.items():
            if storage in kept or kept - arguments.keys():
                CENSUS.keep(tensor)
        return result

    return call


def synchronize(device: Any = None) -> None:
    CENSUS.waits[f"synchronize: {calling_function()}"] += 1


def believe_in_cuda(capability: tuple[int, int]) -> None:
    """Let torch's Python functions report one H200, with this compute capability.

    Must be called before megatron.core is imported.
    """
    values = {
        "is_available": True,
        "current_device": 0,
        "set_device": None,
        "get_device_name": "NVIDIA H200",
        "get_device_capability": capability,
        "get_device_properties": SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=132),
        "manual_seed": None,
        "_lazy_call": None,
        "is_current_stream_capturing": False,
    }
    for name, value in values.items():
        setattr(torch.cuda, name, lambda *args, value=value, **options: value)
    torch.cuda.synchronize = synchronize
    torch.cuda.Stream = torch.cuda.Event = torch.cuda.current_stream = torch.cuda.default_stream = MagicMock
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda device=None: torch.empty(0, dtype=torch.uint8)
    torch.version.cuda = "13.0"
    torch.compile = as_one_kernel
    torch.nn.Module._apply = replace_tensors
    torch.Tensor.type = type_name
    torch.tensor = functools.partial(build_tensor, torch.tensor)
    start, group = torch.distributed.init_process_group, torch.distributed.new_group
    torch.distributed.init_process_group = lambda backend, **options: start("fake", store=FakeStore(), **RANKS)
    torch.distributed.new_group = lambda *args, **options: group(
        *args, **{**options, "backend": "fake", "pg_options": None}
    )
    FakeTensor.tolist = list_of_ones  # torch's reads each number alone, which is slow for 1,024 ranks
    # The real function sends pickled objects as tensors, and fake tensors have no content.
    torch.distributed.all_gather_object = lambda objects, local, group=None: objects.__setitem__(
        slice(None), [local] * len(objects)
    )


RANKS = {"rank": 0, "world_size": 1}


def replace_tensors(module: torch.nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """Replace `Module._apply`, which `to` and `bfloat16` use. torch's swaps data, which fake tensors do not support."""
    for child in module.modules():
        for name, tensor in (*child._parameters.items(), *child._buffers.items()):
            if tensor is None:
                continue
            changed = change(tensor.detach())
            if (changed.device, changed.dtype) == (tensor.device, tensor.dtype):
                continue
            if name in child._parameters:
                changed = torch.nn.Parameter(changed)
                vars(changed).update((key, value) for key, value in vars(tensor).items() if "fake" not in key)
            setattr(child, name, changed)
    return module


def list_of_ones(tensor: Tensor) -> Any:
    """Return what Census returns for each number of a tensor on the host."""
    assert not tensor.is_cuda
    return np.ones(tensor.shape, dtype=float if tensor.dtype.is_floating_point else int).tolist()


def type_name(tensor: Tensor) -> str:
    """Return `tensor.type()` with the right device. For fake tensors it is wrong, and megatron.core compares it."""
    names = {torch.float32: "Float", torch.bfloat16: "BFloat16", torch.int64: "Long", torch.uint8: "Byte"}
    return f"torch.{'cuda.' if tensor.is_cuda else ''}{names[tensor.dtype]}Tensor"


def build_tensor(original: Any, data: Any, *, device: Any = None, pin_memory: bool = False, **options: Any) -> Tensor:
    """Replace `torch.tensor`, and count a wait for each number that is on the device, and for a copy to the device."""
    scalars = [tensor for tensor in tensors_of(data) if tensor.is_cuda]
    CENSUS.waits[f"item: {calling_function()}"] += len(scalars)
    if scalars:
        data = [0.0] * len(scalars)
    host = original(data, **options)
    if device is None or torch.device(device).type == "cpu":
        return host
    CENSUS.waits[f"torch.tensor: {calling_function()}"] += 1
    return torch.zeros(host.shape, dtype=host.dtype, device=device)


def settings_of(case: dict[str, Any]) -> Any:
    from megatron_neobert.config.schema import Settings

    settings = Settings().with_section("model", num_layers=case["num_layers"])
    # A fake device captures no graph.
    settings = settings.with_section("compute", cuda_graph_impl="none", **case.get("compute", {}))
    settings = settings.with_section("parallel", **case.get("parallel", {}))
    replicas = settings.data_parallel_size(case.get("world_size", 1))
    batch = {"micro_batch_size": SEQUENCES, "global_batch_size": SEQUENCES * MICRO_BATCHES * replicas}
    return settings.with_section("training", bf16=True, **batch)


def remove_patches(device: torch.device) -> None:
    """Restore Megatron's gradient norm and division by tokens, which wait for the device."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import clip_grads, optimizer

    from megatron_neobert.training import setup

    with mock.patch.dict(sys.modules):
        del sys.modules[clip_grads.__name__]
        original_norm = importlib.import_module(clip_grads.__name__).get_grad_norm_fp32

    def norm_as_tensor(*args: Any, **options: Any) -> Tensor:
        norm = original_norm(*args, **options)
        return norm if isinstance(norm, Tensor) else torch.full((), norm, device=device)

    optimizer.get_grad_norm_fp32 = norm_as_tensor
    setup.finalize_gradients = finalize_model_grads


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Run two steps and return the counts of the second one.

    Args:
        case: `num_layers`, `world_size`, `rank`, `capability`, sections of settings, and flags of the controls, which
            must run last.
    """
    from megatron.core import parallel_state

    from megatron_neobert.checkpoint.train_state import TrainState
    from megatron_neobert.data.batches.batch import MicroBatch, RankBatches
    from megatron_neobert.data.batches.windows import masked_capacity
    from megatron_neobert.model.kernels import engine_attention
    from megatron_neobert.planning.memory import plan_stage
    from megatron_neobert.planning.network import step_traffic
    from megatron_neobert.runtime import distributed
    from megatron_neobert.state import Run
    from megatron_neobert.training import setup, step
    from megatron_neobert.training.optimizer import build_optimizer, build_scheduler

    RANKS.update(rank=case.get("rank", 0), world_size=case.get("world_size", 1))
    settings = settings_of(case)
    device = distributed.initialize(settings)
    if case.get("without_patches"):
        remove_patches(device)
    if case.get("mixes_devices"):
        MicroBatch.to = lambda batch, device, **options: replace(batch, tokens_t=batch.tokens_t.to(device, **options))
    tokens = SEQUENCES * SEQ_LENGTH // settings.parallel.context_parallel_size
    masked = masked_capacity(tokens, probability=settings.data.predicted_share)
    with FakeTensorMode(allow_non_fake_inputs=True), CENSUS:
        torch._C._set_only_lift_cpu_tensors(True)
        model = setup.build_model(settings, device, vocab_size=VOCAB)
        assert all(tensor.is_cuda for tensor in model.parameters())
        optimizer = build_optimizer(settings, model)
        run: Any = Run(
            settings=settings,
            device=device,
            opened=(),
            model=model,
            optimizer=optimizer,
            scheduler=build_scheduler(settings, optimizer),
            training_stream=None,  # type: ignore[arg-type]
            validation_streams={},
            state=TrainState(corpus_sha256=""),
        )
        batches = [
            MicroBatch(
                tokens_t=torch.zeros(tokens, dtype=torch.int64),
                labels_m=torch.zeros(masked, dtype=torch.int64),
                masked_positions_m=torch.zeros(masked, dtype=torch.int64),
                cu_seqlens_n=torch.zeros(DOCUMENTS + 1, dtype=torch.int32),
                max_seqlen=SEQ_LENGTH,
                real_tokens=tokens,
            )
            for _ in range(MICRO_BATCHES)
        ]
        for _ in range(2):
            for counts in (CENSUS.waits, CENSUS.copies, CENSUS.sizes):
                counts.clear()
            result = step.train_step(run, RankBatches(batches, None))  # type: ignore[arg-type]
            assert result.skip_reason is None
        waits, copies = {name: count for name, count in CENSUS.waits.items() if count}, dict(CENSUS.copies)
        collectives = sorted((*key, len(sizes), sum(sizes)) for key, sizes in CENSUS.sizes.items())
        kept = kept_bytes(model, batches[0].to(device)) if case.get("counts_activations") else None
    stage = parallel_state.get_pipeline_model_parallel_rank()
    distributed.shut_down()
    sizes = {"vocab_size": VOCAB, "world_size": RANKS["world_size"]}
    plan = plan_stage(settings, **sizes, stage=stage)
    traffic = step_traffic(settings, **sizes, stage=stage)
    return {
        "attention": engine_attention(),
        "waits": waits,
        "copies": copies,
        "activations": kept,
        "planned_activations": plan.activations + plan.head,
        "collectives": collectives,
        "planned_collectives": sorted((each.group, each.operation, each.calls, each.bytes) for each in traffic),
    }


def kept_bytes(model: Any, batch: Any) -> int:
    """Return the bytes that autograd keeps for one micro-batch. Each storage counts once, and weights do not count."""
    CENSUS.kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(CENSUS.keep, lambda tensor: tensor):
        model(batch.tokens_t, batch.cu_seqlens_n, batch.max_seqlen, batch.masked_positions_m, batch.labels_m)
    weights = {storage_of(weight) for weight in model.parameters()}
    return sum(t.untyped_storage().nbytes() for storage, t in CENSUS.kept.items() if storage not in weights)


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[2]).read_text())
    believe_in_cuda(*{tuple(case.get("capability", (9, 0))) for case in cases.values()})  # one for all cases
    if any(case.get("compute", {}).get("transformer_impl") == "transformer_engine" for case in cases.values()):
        import fake_engine

        fake_engine.install(DEVICE)
    results: dict[str, Any] = {}
    for label, case in cases.items():
        try:
            results[label] = run_case(case)
        except Exception as error:
            if not case.get("fails"):
                raise
            results[label] = {"error": str(error)}
    Path(sys.argv[3]).write_text(json.dumps(results))
