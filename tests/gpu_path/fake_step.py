"""Training steps on fake CUDA tensors: real shapes, dtypes and devices, no numbers and no GPU.

A process of its own, since it lets torch believe in a device: `python fake_step.py LIBRARY CASES RESULTS`, with the
library that test_fake_cuda.py builds of fake_cuda.cpp, and two JSON files. What runs is the project's own model, step
and optimizer under megatron.core's data parallelism; tensors on different devices raise, as they would on a GPU. Of the
second step of each case it is written down where the host waits for the device and what it copies, and per operation
how many kernels were started and how many bytes they read and wrote.

A function that is compiled, by megatron.core or by us, counts as one kernel that reads its arguments and writes its
results, and backward reads arguments and incoming gradients and writes their gradients: what Inductor makes of
elementwise functions and reductions at best. The same holds for torch's fused RMSNorm, whose CUDA kernel a build for
CPU does not have.
"""

import ctypes
import functools
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

LIBRARY = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)  # its hooks come before torch's

import torch  # noqa: E402

LIBRARY.replace_guard()  # and its guard after
from census import Census, place, storage_of, tensors_of  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

DEVICE = torch.device("cuda", 0)
VOCAB, SEQ_LENGTH, ROWS, MICRO_BATCHES, DOCUMENTS = 30_522, 1024, 64, 2, 256
CENSUS = Census()


class OneKernel(torch.autograd.Function):
    """A function of tensors, counted as one kernel forward and one backward."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], name: str, options: Any, keeps: bool, *args: Any) -> Any:
        ctx.function, ctx.name, ctx.options = function, name, options
        ctx.args = [arg.detach().requires_grad_(arg.requires_grad) if isinstance(arg, Tensor) else arg for arg in args]
        with CENSUS.inside_kernel():
            result = function(*args, **options)
        if not CENSUS.is_inside_kernel:
            CENSUS.note_kernel(name, tensors_of((args, options)), tensors_of(result))
            for tensor in read_again(function, ctx.args, options) if keeps else ():
                CENSUS.keep(tensor)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        wanted = [arg for arg in ctx.args if isinstance(arg, Tensor) and arg.requires_grad]
        with CENSUS.inside_kernel(), torch.enable_grad():
            results = tensors_of(ctx.function(*ctx.args, **ctx.options))
            pairs = [pair for pair in zip(results, gradients, strict=True) if pair[0].requires_grad]
            found = torch.autograd.grad([one for one, _ in pairs], wanted, [gradient for _, gradient in pairs])
        read = read_again(ctx.function, ctx.args, ctx.options)
        CENSUS.note_kernel(f"{ctx.name}, backward", [*read, *tensors_of(gradients)], list(found))
        own = iter(found)
        return (
            *[None] * 4,
            *(next(own) if isinstance(arg, Tensor) and arg.requires_grad else None for arg in ctx.args),
        )


def read_again(function: Callable[..., Any], args: list[Any], options: Any) -> list[Tensor]:
    """The arguments that backward reads: those that autograd keeps, or all if it keeps something computed from them."""
    kept: list[Tensor] = []
    keep = torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda kept: kept)
    with CENSUS.inside_kernel(), torch.enable_grad(), keep:
        function(*args, **options)
    needed, all_tensors = {storage_of(tensor) for tensor in kept}, tensors_of(args)
    is_enough = needed <= {storage_of(tensor) for tensor in all_tensors}
    return [tensor for tensor in all_tensors if not is_enough or storage_of(tensor) in needed]


def as_one_kernel(function: Callable[..., Any] | None = None, name: str = "", **compiler_options: Any) -> Any:
    """In place of torch.compile."""
    if function is None:
        return functools.partial(as_one_kernel, name=name)
    name = name or f"compiled {function.__name__}"

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return OneKernel.apply(function, name, options, torch.is_grad_enabled(), *args)

    return call


class Idle:
    """A stream or an event."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None

    def __enter__(self) -> "Idle":
        return self

    def __exit__(self, *error: Any) -> None: ...


def synchronize(device: Any = None) -> None:
    CENSUS.waits[f"synchronize: {place()}"] += 1


class Properties:
    major, minor, name, total_memory, multi_processor_count = 9, 0, "NVIDIA H200", 139 << 30, 132


def believe_in_cuda() -> None:
    """Lets torch's Python half answer as on one H200; before megatron.core is imported, which asks."""
    answers = {
        "is_available": True,
        "current_device": 0,
        "device_count": 1,
        "set_device": None,
        "get_device_name": Properties.name,
        "get_device_capability": (9, 0),
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
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **options: answer)
    torch.cuda.synchronize = synchronize
    torch.cuda.Stream = torch.cuda.Event = Idle
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: Idle()
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda device=None: torch.empty(0, dtype=torch.uint8)
    torch.version.cuda = "13.0"
    torch.compile = as_one_kernel
    torch.nn.functional.rms_norm = as_one_kernel(torch.nn.functional.rms_norm, name="fused rms_norm")
    torch.nn.Module._apply = replace_tensors
    torch.Tensor.type = functools.partialmethod(type_name, torch.Tensor.type)
    torch.tensor = functools.partial(build_tensor, torch.tensor)
    start, group = torch.distributed.init_process_group, torch.distributed.new_group
    torch.distributed.init_process_group = lambda backend, **options: start("fake", store=FakeStore(), **RANKS)
    torch.distributed.new_group = lambda *args, **options: group(
        *args, **{**options, "backend": "fake", "pg_options": None}
    )
    # Pickled objects travel as tensors, whose content is asked for.
    torch.distributed.all_gather_object = lambda found, own, group=None: found.__setitem__(
        slice(None), [own] * len(found)
    )


RANKS = {"rank": 0, "world_size": 1}


def replace_tensors(module: torch.nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """`_apply`, of which `to` and `bfloat16` are made: torch's own swaps a tensor's content, which fake ones refuse."""
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


def type_name(tensor: Tensor, original: Any, *args: Any, **options: Any) -> Any:
    """megatron.core sorts parameters by `tensor.type()`, which for fake tensors names the device wrongly."""
    if args or options:
        return original(tensor, *args, **options)
    names = {torch.float32: "Float", torch.bfloat16: "BFloat16", torch.int64: "Long", torch.uint8: "Byte"}
    return f"torch.{'cuda.' if tensor.is_cuda else ''}{names[tensor.dtype]}Tensor"


def build_tensor(original: Any, data: Any, *, device: Any = None, pin_memory: bool = False, **options: Any) -> Tensor:
    """`torch.tensor`: of numbers on the device it waits for each, on the device it waits for the copy."""
    scalars = [tensor for tensor in tensors_of(data) if tensor.is_cuda]
    CENSUS.waits[f"item: {place()}"] += len(scalars)
    if scalars:
        data = [0.0] * len(scalars)
    host = original(data, **options)
    if device is None or torch.device(device).type == "cpu":
        return host
    CENSUS.waits[f"torch.tensor: {place()}"] += 1
    return torch.zeros(host.shape, dtype=host.dtype, device=device)


def settings_of(case: dict[str, Any]) -> Any:
    from megatron_neobert.config.schema import ModelConfig, Settings, TrainingConfig

    parallel = case.get("parallel", {})
    of_one_copy = 1
    for kind in ("tensor", "pipeline"):
        of_one_copy *= parallel.get(f"{kind}_model_parallel_size", 1)
    copies = case.get("world_size", 1) // (of_one_copy * parallel.get("context_parallel_size", 1))
    settings = Settings(
        model=ModelConfig(num_layers=case["num_layers"]),
        training=TrainingConfig(bf16=True, micro_batch_size=ROWS, global_batch_size=ROWS * MICRO_BATCHES * copies),
    )
    for section in ("parallel", "compute"):
        settings = settings.with_section(section, **case.get(section, {}))
    return settings


def remove_patches(device: torch.device) -> None:
    """Megatron's own norm and division by tokens again, which wait."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import clip_grads, optimizer

    from megatron_neobert.training import setup

    imported = sys.modules.pop(clip_grads.__name__)
    own_norm = importlib.import_module(clip_grads.__name__).get_grad_norm_fp32
    sys.modules[clip_grads.__name__] = imported

    def norm_as_tensor(*args: Any, **options: Any) -> Tensor:
        norm = own_norm(*args, **options)
        return norm if isinstance(norm, Tensor) else torch.full((), norm, device=device)

    optimizer.get_grad_norm_fp32 = norm_as_tensor
    setup.finalize_gradients = finalize_model_grads


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Two steps of a case: `num_layers`, `world_size`, `rank`, sections of settings; controls come last."""
    from megatron_neobert.data.batches.rows import usual_masked
    from megatron_neobert.data.batches.stream import PackedBatch, StepBatches
    from megatron_neobert.model.kernels import choose_kernels
    from megatron_neobert.planning.memory import plan_memory
    from megatron_neobert.runtime import distributed
    from megatron_neobert.state import Run, TrainState
    from megatron_neobert.training import setup, step
    from megatron_neobert.training.optimizer import build_optimizer, build_scheduler

    RANKS.update(rank=case.get("rank", 0), world_size=case.get("world_size", 1))
    settings = settings_of(case)
    device = distributed.initialize(settings)
    if case.get("without_patches"):
        remove_patches(device)
    if case.get("mixes_devices"):
        PackedBatch.to = lambda batch, device, **options: replace(batch, tokens_t=batch.tokens_t.to(device, **options))
    slots = ROWS * SEQ_LENGTH // settings.parallel.context_parallel_size
    masked = usual_masked(slots, probability=settings.data.mask_prob)
    reports = []
    with FakeTensorMode(allow_non_fake_inputs=True), CENSUS:
        torch._C._set_only_lift_cpu_tensors(True)
        model = setup.build_model(settings, device, vocab_size=VOCAB)
        assert all(tensor.is_cuda for tensor in model.parameters())
        optimizer = build_optimizer(settings, model)
        run: Any = Run(
            settings=settings,
            device=device,
            tokenizer=None,  # type: ignore[arg-type]
            model=model,
            optimizer=optimizer,
            scheduler=build_scheduler(settings, optimizer),
            training_stream=None,  # type: ignore[arg-type]
            validation_streams={},
            state=TrainState(corpus_sha256=""),
        )
        batches = [
            PackedBatch(
                tokens_t=torch.zeros(slots, dtype=torch.int64),
                labels_m=torch.zeros(masked, dtype=torch.int64),
                masked_positions_m=torch.zeros(masked, dtype=torch.int64),
                cu_seqlens_n=torch.zeros(DOCUMENTS + 1, dtype=torch.int32),
                max_seqlen=SEQ_LENGTH,
                real_tokens=slots,
            )
            for _ in range(MICRO_BATCHES)
        ]
        for _ in range(2):
            CENSUS.clear()
            reports.append(step.train_step(run, StepBatches(batches, None)))  # type: ignore[arg-type]
        counts = {name: (CENSUS.kernels[name], CENSUS.bytes[name]) for name in CENSUS.kernels}
        waits, copies = {name: count for name, count in CENSUS.waits.items() if count}, dict(CENSUS.copies)
        kept = kept_bytes(model, batches[0].to(device)) if case.get("counts_kept_bytes") else 0
    distributed.shut_down()
    assert [report.skip_reason for report in reports] == [None, None]
    plan = plan_memory(settings, vocab_size=VOCAB, world_size=RANKS["world_size"], masked_tokens=masked)
    return {
        "summary": choose_kernels(settings).summary,
        "waits": waits,
        "copies": copies,
        "counts": counts,
        "kept": kept,
        "planned": plan.activations + plan.head,
    }


def kept_bytes(model: Any, batch: Any) -> int:
    """The bytes that autograd keeps of one micro-batch: each storage once, weights not counted."""
    CENSUS.kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(CENSUS.keep, lambda tensor: tensor):
        model(batch.tokens_t, batch.cu_seqlens_n, batch.max_seqlen, batch.masked_positions_m, batch.labels_m)
    weights = {storage_of(weight) for weight in model.parameters()}
    return sum(t.untyped_storage().nbytes() for storage, t in CENSUS.kept.items() if storage not in weights)


if __name__ == "__main__":
    believe_in_cuda()
    cases = json.loads(Path(sys.argv[2]).read_text())
    if any(case.get("compute", {}).get("transformer_impl") == "transformer_engine" for case in cases.values()):
        import fake_engine

        fake_engine.install(CENSUS, DEVICE)
    results: dict[str, Any] = {}
    for label, case in cases.items():
        try:
            results[label] = run_case(case)
        except Exception as error:
            if not case.get("mixes_devices"):
                raise
            results[label] = {"error": str(error)}
    Path(sys.argv[3]).write_text(json.dumps(results))
