"""Training steps on fake CUDA tensors, with real shapes, dtypes and devices, and without numbers or a GPU.

Usage: `python fake_step.py LIBRARY CASES RESULTS`. LIBRARY is built from fake_cuda.cpp by test_fake_cuda.py; CASES and
RESULTS are JSON files. It runs in its own process, because it makes torch report a GPU. Model, step and optimizer are
the project's, with megatron.core's data parallelism. Operations on tensors of different devices raise, as on a GPU. For
the second step of each case, the results list where the host waits for the device, the copies and the collectives.

A compiled function keeps for its backward what Inductor keeps at best: its arguments.
"""

import contextlib
import ctypes
import functools
import importlib
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

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


class OneKernel(torch.autograd.Function):
    """Runs a function of tensors, and computes it again in backward."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], options: Any, keeps: bool, *args: Any) -> Any:
        ctx.function, ctx.options = function, options
        ctx.args = [arg.detach().requires_grad_(arg.requires_grad) if isinstance(arg, Tensor) else arg for arg in args]
        with CENSUS.inside_kernel():
            result = function(*args, **options)
        if not CENSUS.is_inside_kernel:
            for tensor in read_again(function, ctx.args, options) if keeps else ():
                CENSUS.keep(tensor)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        inputs = [arg for arg in ctx.args if isinstance(arg, Tensor) and arg.requires_grad]
        with CENSUS.inside_kernel(), torch.enable_grad():
            results = tensors_of(ctx.function(*ctx.args, **ctx.options))
            pairs = [pair for pair in zip(results, gradients, strict=True) if pair[0].requires_grad]
            results, gradients_of_results = zip(*pairs, strict=True)
            computed = torch.autograd.grad(results, inputs, gradients_of_results)
        remaining = iter(computed)
        return (
            *[None] * 3,
            *(next(remaining) if isinstance(arg, Tensor) and arg.requires_grad else None for arg in ctx.args),
        )


def read_again(function: Callable[..., Any], args: list[Any], options: Any) -> list[Tensor]:
    """Return the arguments that backward reads: those that autograd keeps, or all if it also keeps other tensors."""
    kept: list[Tensor] = []
    keep = torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda kept: kept)
    with CENSUS.inside_kernel(), torch.enable_grad(), keep:
        function(*args, **options)
    needed, all_tensors = {storage_of(tensor) for tensor in kept}, tensors_of(args)
    is_enough = needed <= {storage_of(tensor) for tensor in all_tensors}
    return [tensor for tensor in all_tensors if not is_enough or storage_of(tensor) in needed]


def as_one_kernel(function: Callable[..., Any] | None = None, **compiler_options: Any) -> Any:
    """Replace torch.compile."""
    if function is None:
        return as_one_kernel

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return OneKernel.apply(function, options, torch.is_grad_enabled(), *args)

    return call


class Idle:
    """A stream or event that does nothing."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None

    def __enter__(self) -> "Idle":
        return self

    def __exit__(self, *error: Any) -> None: ...


def synchronize(device: Any = None) -> None:
    CENSUS.waits[f"synchronize: {calling_function()}"] += 1


class Properties:
    major, minor, name, total_memory, multi_processor_count = 9, 0, "NVIDIA H200", 139 << 30, 132


def believe_in_cuda(capability: tuple[int, int]) -> None:
    """Let torch's Python functions report one H200, with this compute capability.

    Must be called before megatron.core is imported.
    """
    Properties.major, Properties.minor = capability
    values = {
        "is_available": True,
        "current_device": 0,
        "device_count": 1,
        "set_device": None,
        "get_device_name": Properties.name,
        "get_device_capability": capability,
        "get_device_properties": Properties(),
        "max_memory_allocated": 0,
        "reset_peak_memory_stats": None,
        "set_rng_state": None,
        "manual_seed": None,
        "manual_seed_all": None,
        "_lazy_call": None,
        "_lazy_init": None,
        "_is_in_bad_fork": False,
        "is_current_stream_capturing": False,
    }
    for name, value in values.items():
        setattr(torch.cuda, name, lambda *args, value=value, **options: value)
    torch.cuda.synchronize = synchronize
    torch.cuda.Stream = torch.cuda.Event = Idle
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: Idle()
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda device=None: torch.empty(0, dtype=torch.uint8)
    torch.version.cuda = "13.0"
    torch.compile = as_one_kernel
    torch.nn.Module._apply = replace_tensors
    torch.Tensor.type = functools.partialmethod(type_name, torch.Tensor.type)
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
                attributes = {key: value for key, value in vars(tensor).items() if "fake" not in key}
                changed = torch.nn.Parameter(changed)
                for key in ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel"):
                    if key in attributes:
                        setattr(changed, key, attributes[key])
                child._parameters[name] = changed
            else:
                child._buffers[name] = changed
    return module


def list_of_ones(tensor: Tensor) -> Any:
    """Return what Census returns for each number of a tensor on the host."""
    assert not tensor.is_cuda
    return np.ones(tensor.shape, dtype=float if tensor.dtype.is_floating_point else int).tolist()


def type_name(tensor: Tensor, original: Any, *args: Any, **options: Any) -> Any:
    """Return `tensor.type()` with the right device. For fake tensors it is wrong, and megatron.core compares it."""
    if args or options:
        return original(tensor, *args, **options)
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
    from megatron_neobert.config.schema import ModelConfig, Settings, TrainingConfig

    parallel = case.get("parallel", {})
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    replicas = case.get("world_size", 1) // math.prod(parallel.get(size, 1) for size in sizes)
    settings = Settings(
        model=ModelConfig(num_layers=case["num_layers"]),
        training=TrainingConfig(
            bf16=True, micro_batch_size=SEQUENCES, global_batch_size=SEQUENCES * MICRO_BATCHES * replicas
        ),
    )
    # A fake device captures no graph.
    settings = settings.with_section("compute", cuda_graph_impl="none", **case.get("compute", {}))
    return settings.with_section("parallel", **parallel)


def remove_patches(device: torch.device) -> None:
    """Restore Megatron's gradient norm and division by tokens, which wait for the device."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import clip_grads, optimizer

    from megatron_neobert.training import setup

    patched = sys.modules.pop(clip_grads.__name__)
    original_norm = importlib.import_module(clip_grads.__name__).get_grad_norm_fp32
    sys.modules[clip_grads.__name__] = patched

    def norm_as_tensor(*args: Any, **options: Any) -> Tensor:
        norm = original_norm(*args, **options)
        return norm if isinstance(norm, Tensor) else torch.full((), norm, device=device)

    optimizer.get_grad_norm_fp32 = norm_as_tensor
    setup.finalize_gradients = finalize_model_grads


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Run two steps and return the counts of the second one, or build the model and return the sizes of its buckets.

    Args:
        case: `num_layers`, `world_size`, `rank`, `capability`, sections of settings, and flags of the controls, which
            must run last.
    """
    from collectives import Collectives  # imports megatron.core
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

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
    results = []
    collectives = Collectives()
    with FakeTensorMode(allow_non_fake_inputs=True), CENSUS:
        torch._C._set_only_lift_cpu_tensors(True)
        model = setup.build_model(settings, device, vocab_size=VOCAB)
        assert all(tensor.is_cuda for tensor in model.parameters())
        if case.get("builds_only"):
            distributed.shut_down()
            return {"buckets": [bucket.grad_data.numel() for buffer in model.buffers for bucket in buffer.buckets]}
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
        results.append(step.train_step(run, RankBatches(batches, None)))  # type: ignore[arg-type]
        CENSUS.clear()
        with collectives, counted_passes(schedules) as passes:
            results.append(step.train_step(run, RankBatches(batches, None)))  # type: ignore[arg-type]
        waits, copies = {name: count for name, count in CENSUS.waits.items() if count}, dict(CENSUS.copies)
        in_flight = max(itertools.accumulate(passes))
        kept = in_flight * kept_bytes(model, batches[0].to(device)) if case.get("counts_activations") else None
    stage = parallel_state.get_pipeline_model_parallel_rank()
    distributed.shut_down()
    assert [result.skip_reason for result in results] == [None, None]
    sizes = {"vocab_size": VOCAB, "world_size": RANKS["world_size"]}
    plan = plan_stage(settings, **sizes, stage=stage)
    traffic = step_traffic(settings, **sizes, stage=stage)
    return {
        "attention": engine_attention(),
        "waits": waits,
        "copies": copies,
        "activations": kept,
        "planned_activations": plan.activations + plan.head,
        "collectives": [total for total in collectives.totals(smallest=1024) if is_planned(*total)],
        "planned_collectives": sorted((each.group, each.operation, each.calls, each.bytes) for each in traffic),
    }


@contextlib.contextmanager
def counted_passes(schedules: Any) -> Iterator[list[int]]:
    """Yield a list to which the block adds 1 for each forward pass and -1 for each backward pass, in their order."""
    passes: list[int] = []

    def counted(function: Callable[..., Any], change: int) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            passes.append(change)
            return function(*args, **options)

        return call

    forward, backward = schedules.forward_step, schedules.backward_step
    schedules.forward_step, schedules.backward_step = counted(forward, 1), counted(backward, -1)
    yield passes
    schedules.forward_step, schedules.backward_step = forward, backward


def is_planned(group: str, operation: str, *_: int) -> bool:
    """Return whether the plan contains a collective. Ranks receive what others send, and share scalars with all."""
    return group != "all" and operation != "receive"


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
