"""Communication of a training step: bytes by group, and the time of a step on an assumed network.

`step_traffic` follows from the settings, and tests/gpu_path counts the same collectives. `plan_step` divides by assumed
rates, which are the constants below; only the host's time per kernel was measured.
"""

import math
from typing import NamedTuple

from megatron_neobert.config.rules import graph_obstacle
from megatron_neobert.config.schema import Settings
from megatron_neobert.planning.memory import masked_tokens

GPUS_PER_NODE = 8
NVLINK_GB_PER_S = 450  # an H100's NVLink 4, in one direction
# NCCL counts 20.6 of the 25 GB/s of an NVLink (SM90_NVLINK_BW in src/graph/topo.h). Assumed for the network, too.
REACHED = 0.82
# NCCL's own estimates, by protocol: microseconds at the start of a ring, per step on NVLink and per step between nodes,
# and the share of the bandwidth. Source: NVIDIA/nccl@b647562 src/graph/tuning.cc (hwLat), and v2.28.7 (baseLat).
_RING = {"LL": (6.6, 0.6, 2.7, 0.05), "LL128": (14.0, 1.9, 4.0, 0.92), "Simple": (8.4, 3.4, 14.0, 1.0)}
# Launches of a micro-batch, forward and backward, counted by tests/gpu_path: per layer, and for embedding and head.
_LAUNCHES_PER_LAYER, _OTHER_LAUNCHES = 38, 60
# Of Transformer Engine's layers, measured on the host of one H200 (docs/performance.md). Local layers take 67 us.
_HOST_SECONDS_PER_LAUNCH = 103e-6


class Traffic(NamedTuple):
    """All calls of a collective operation, or of sends, by a rank in one group during a training step."""

    group: str  # "data" (with context-parallel ranks), "tensor", "context" or "pipeline"
    operation: str
    calls: int
    bytes: int  # of the whole tensors, over all calls: inputs of reductions, outputs of gathers


def step_traffic(settings: Settings, *, vocab_size: int, world_size: int, stage: int = 0) -> list[Traffic]:
    """Return a rank's traffic in a training step. Collectives of scalars (loss, norm, tokens) are left out."""
    parallel, hidden = settings.parallel, settings.model.hidden_size
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    stages, layers = parallel.pipeline_model_parallel_size, settings.layers_per_stage
    is_first, is_last = stage == 0, stage == stages - 1
    micro_batches = settings.micro_batches_per_rank(world_size)
    element_bytes = 2 if settings.training.bf16 else 4
    hidden_bytes = element_bytes * hidden * settings.tokens_per_micro_batch // cp
    # A recomputed layer repeats the collectives of its forward pass.
    forwards = 2 if settings.compute.recompute_granularity == "full" else 1
    traffic: list[Traffic] = []

    def add(group: str, operation: str, calls: int, total_bytes: int) -> None:
        if calls:
            traffic.append(Traffic(group, operation, calls, total_bytes))

    if settings.data_parallel_size(world_size) * cp > 1:
        buckets = gradient_buckets(settings, vocab_size=vocab_size, world_size=world_size, stage=stage)
        calls, parameters = len(buckets), sum(buckets)
        if settings.use_distributed_optimizer:
            add("data", "reduce-scatter", calls, 4 * parameters)
            add("data", "all-gather", calls, element_bytes * parameters)
        else:
            add("data", "all-reduce", calls, 4 * parameters)
    if tp > 1:
        # Sequence parallelism: before and after attention and feed-forward, in both directions. The products of the
        # weight gradients gather their inputs again.
        gathers = micro_batches * ((2 * forwards + 4) * layers + is_first + is_last)
        scatters = micro_batches * ((2 * forwards + 2) * layers + is_first)
        add("tensor", "all-gather", gathers, gathers * hidden_bytes)
        add("tensor", "reduce-scatter", scatters, scatters * hidden_bytes)
        # Gradient of the head's input, and maximum, sum and label logit in float32; per step, gradients of the norms.
        head_bytes = is_last * masked_tokens(settings) * (element_bytes * hidden + 3 * 4)
        norms = (2 * layers + is_last) * (2 if settings.model.normalization == "LayerNorm" else 1)
        reductions = 3 * micro_batches * is_last + 1
        add("tensor", "all-reduce", reductions, micro_batches * head_bytes + 4 * hidden * norms)
    if cp > 1:  # queries, keys, values and context
        exchanges = micro_batches * 4 * (forwards + 1) * layers
        add("context", "all-to-all", exchanges, exchanges * hidden_bytes // tp)
    if stages > 1:
        sends = micro_batches * (2 - is_first - is_last)
        add("pipeline", "send", sends, sends * hidden_bytes // tp)
    return traffic


def gradient_buckets(settings: Settings, *, vocab_size: int, world_size: int, stage: int = 0) -> list[int]:
    """Return the padded parameter count of each gradient bucket on a rank, in the order of the backward pass.

    Source: megatron-core 0.16.1 distributed/param_and_grad_buffer.py and distributed_data_parallel.py. Megatron uses a
        single bucket if overlap is off, and on all pipeline stages except the first.
    """
    parallel, model, hidden = settings.parallel, settings.model, settings.model.hidden_size
    tp = parallel.tensor_model_parallel_size
    rows = model.padded_vocab_size(vocab_size, tensor_parallel=tp) // tp
    norm = [hidden] * (2 if model.normalization == "LayerNorm" else 1)
    layer = [hidden * model.ffn_width // tp, (2 if model.swiglu else 1) * hidden * model.ffn_width // tp, *norm]
    layer += [3 * hidden * hidden // tp, hidden * hidden // tp, *norm]
    # Parameters of each tensor, from the last layer to the first.
    tensors = [rows, rows * hidden, *norm] if stage == parallel.pipeline_model_parallel_size - 1 else []
    tensors += layer * settings.layers_per_stage
    if stage == 0:
        tensors += [*([model.position_rows * hidden] if model.position_rows else []), rows * hidden]
    replicas = settings.data_parallel_size(world_size) * parallel.context_parallel_size
    is_distributed = settings.use_distributed_optimizer
    limit = parallel.bucket_parameters if parallel.overlap_grad_reduce is not False and stage == 0 else math.inf
    alignment, bucket_alignment = (64, math.lcm(replicas, 128)) if is_distributed else (1, 1)
    buckets, size = [], 0
    for parameters in tensors:
        size = -(-size // alignment) * alignment + parameters
        if size >= limit:
            buckets.append(size)
            size = 0
    buckets += [size] if size else []
    return [-(-bucket // bucket_alignment) * bucket_alignment for bucket in buckets]


# ---- time


def traffic_seconds(settings: Settings, traffic: Traffic, *, world_size: int, network_gbps: float) -> float:
    """Return the seconds that all calls in `traffic` take, one after another.

    Assumes nodes of eight GPUs with NVLink, and a network adapter of `network_gbps` gigabits per second for each GPU.
    """
    size, operation, microseconds = traffic.bytes, traffic.operation, 1e-6 * traffic.calls
    parallel = settings.parallel
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    stages = parallel.pipeline_model_parallel_size
    # Ranks of the group, and the distance between them. Megatron's order of ranks is tensor, context, data, pipeline.
    ranks, distance = {
        "tensor": (tp, 1),
        "context": (cp, tp),
        "data": (settings.data_parallel_size(world_size) * cp, tp),
        "pipeline": (stages, world_size // stages),
    }[traffic.group]
    network, nvlink = REACHED * network_gbps * 1e9 / 8, REACHED * NVLINK_GB_PER_S * 1e9  # bytes per second
    local = max(1, min(ranks, GPUS_PER_NODE // distance))  # ranks of the group in a node
    nodes = -(-ranks // local)
    if operation in ("send", "all-to-all"):
        start, nvlink_step, network_step, _ = _RING["Simple"]
        # Shares of the bytes for ranks in other nodes and in this node.
        outside = (ranks - local) / ranks if operation == "all-to-all" else float(nodes > 1)
        inside = (local - 1) / ranks if operation == "all-to-all" else float(nodes == 1)
        latency = start + (network_step if nodes > 1 else nvlink_step)
        return microseconds * latency + size * max(inside / nvlink, outside / network)
    # A ring enters and leaves a node once, and NCCL builds as many rings as the group has adapters in a node.
    bandwidth = nvlink if nodes == 1 else min(nvlink, local * network)
    passes = 2 if operation == "all-reduce" else 1
    transfer = passes * (ranks - 1) / ranks * size / bandwidth
    return min(
        microseconds * (start + passes * ((ranks - nodes) * nvlink_step + (nodes - 1) * network_step))
        + transfer / share
        for start, nvlink_step, network_step, share in _RING.values()
    )


class StepTime(NamedTuple):
    """Seconds of a training step on the first pipeline stage."""

    total: float
    exposed: float  # communication during which the GPU does not compute


def plan_step(
    settings: Settings, *, vocab_size: int, world_size: int, compute_seconds: float, network_gbps: float
) -> StepTime:
    """Return the time of a training step. Collectives of scalars are left out.

    With overlap, gradients are reduced during the backward pass of the last micro-batch, except the last
    bucket. Weights are gathered during the forward pass of the first micro-batch, except the first bucket.
    Nothing hides the communication of tensor, context and pipeline parallelism.

    Args:
        compute_seconds: Time of the step on a rank that only computes.
        network_gbps: Gigabits per second of each GPU's network adapter, in one direction.
    """
    micro_batches, parallel = settings.micro_batches_per_rank(world_size), settings.parallel
    launches = _LAUNCHES_PER_LAYER * settings.layers_per_stage + _OTHER_LAUNCHES
    host = 0.0 if graph_obstacle(settings, on_cuda=True) is None else _HOST_SECONDS_PER_LAUNCH * launches
    busy = max(compute_seconds / micro_batches, host)  # per micro-batch: the GPU computes, or waits for the host
    exposed = 0.0
    for each in step_traffic(settings, vocab_size=vocab_size, world_size=world_size):
        seconds = traffic_seconds(settings, each, world_size=world_size, network_gbps=network_gbps)
        if each.group == "data" and parallel.overlap_grad_reduce is not False:
            # Backward takes two thirds of a micro-batch, and forward one third.
            hidden = busy * (1 / 3 if each.operation == "all-gather" else 2 / 3)
            seconds = max(seconds / each.calls, seconds - hidden)
        exposed += seconds * (2 if each.operation == "send" else 1)  # as many receives
    waits = parallel.pipeline_model_parallel_size - 1  # for the first and the last micro-batches of other stages
    return StepTime(total=(micro_batches + waits) * busy + exposed, exposed=exposed)
