"""Computes on one device what training computes, and compares; started by kernel_test.py. One JSON line per result.

    python -c SOURCE compute cuda:0
    python -c SOURCE collective nccl RANK RANKS FILE

On a CPU the same code runs at a smaller size, which is how it is tested.
"""

from __future__ import annotations

import json
import sys
import time


def report(name: str, well: bool, words: str) -> None:
    print("@" + json.dumps([name, bool(well), words]), flush=True)


def relative_error(found, expected) -> float:  # type: ignore[no-untyped-def]
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def multiply(device: str) -> None:
    """A product in bfloat16 against float32's, and its rate: a GPU that is throttled or shared shows here."""
    import torch

    size, rounds = (8192, 20) if device.startswith("cuda") else (256, 2)
    left, right = torch.randn(2, size, size, device=device).div(size**0.5).bfloat16()
    error = relative_error(left @ right, left.float() @ right.float())
    started = finish(device)
    for _ in range(rounds):
        left @ right
    rate = 2 * size**3 * rounds / (finish(device) - started) / 1e12
    report("bfloat16 product", error < 1e-2, f"relative error {error:.1e}, {rate:.3g} TFLOP/s at {size} x {size}")


def finish(device: str) -> float:
    """The time when all that was asked of the device is done, in seconds."""
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter()


def attend(device: str) -> None:
    """The packed kernel in bfloat16, forward and backward, against one document at a time in float32."""
    import torch
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_neobert.model.attention import pack_row
    from megatron_neobert.model.packed_kernels import TorchAttention, attend_by_document

    config = TransformerConfig(num_layers=1, hidden_size=128, num_attention_heads=2)
    kernel = TorchAttention(config, 1, AttnMaskType.padding, "self")
    starts = torch.tensor([0, 5, 100, 512], dtype=torch.int32, device=device)
    row = pack_row(starts, 412, angles_t11d=None)
    inputs = [torch.randn(512, 2, 64, device=device).bfloat16().requires_grad_() for _ in range(3)]
    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    found = kernel.attend(inputs[0], inputs[1], inputs[2], row)
    expected = attend_by_document(exact[0], exact[1], exact[2], starts)
    found.float().square().sum().backward()
    expected.square().sum().backward()
    pairs = [(found, expected), *((one.grad, other.grad) for one, other in zip(inputs, exact))]  # noqa: B905
    error = max(relative_error(one, other) for one, other in pairs)
    report("packed attention", error < 3e-2, f"relative error {error:.1e}, forward and backward")


def step(device: str) -> None:
    """Adam's fused kernel against its plain form."""
    import torch

    weights = []
    for fused in (True, False):
        torch.manual_seed(0)
        weight = torch.randn(1000, device=device, requires_grad=True)
        optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
        weight.square().sum().backward()
        optimizer.step()
        weights.append(weight.detach())
    error = relative_error(*weights)
    report("fused Adam", error < 1e-5, f"relative error {error:.1e}")


def sum_over_ranks(backend: str, rank: int, ranks: int, file: str) -> None:
    """One sum over all GPUs of this machine, each rank contributing its number + 1."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=ranks)
    values = torch.full((2**20,), float(rank + 1), device=device)
    dist.all_reduce(values)
    expected = ranks * (ranks + 1) / 2
    well = bool((values == expected).all())
    dist.destroy_process_group()
    report(f"sum over {ranks} rank(s)", well, f"over {backend}: {values[0].item():g}, expected {expected:g}")


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    if what == "compute":
        for check in (multiply, attend, step):
            try:
                check(*words)
            except Exception as error:  # the next check may still say something about this device
                report(check.__name__, False, f"{type(error).__name__}: {error}")
    else:
        sum_over_ranks(words[0], int(words[1]), int(words[2]), words[3])
