"""Report the devices of torch and the kernels that training would use. A script that environment.py starts.

    python environment_probe.py               reports devices, kernels and broken packages
    python environment_probe.py --gpu-test    computes on every GPU, and communicates between them

It runs in its own process, because importing a compiled library that does not match torch can kill the process. Each
line that starts with "@" is JSON: an object with the version of CUDA, or a finding as [level, subject, detail, remedy].
All other lines are output of libraries.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Python puts the folder of this file there; imports need the folder of the package.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

OCCUPIED_GIB = 1.0  # a display and the driver use less
SEE_DRIVER = "see nvidia-smi -q and the driver's log"
OTHER_TORCH = "install the torch version of constraints.txt, built for this machine"
# Distribution -> module. These are compiled for one torch or one Python, so an installed one can fail to import.
COMPILED = {
    "megatron-core": "megatron.core",
    "pyarrow": "pyarrow",
    "tokenizers": "tokenizers",
    "transformer-engine": "transformer_engine.pytorch",
    "flash-attn": "flash_attn.flash_attn_interface",
    "flash-attn-3": "flash_attn_interface",
    "flash-attn-4": "flash_attn.cute.interface",
    "nvidia-dali-cuda120": "nvidia.dali",
    "nvidia-dali-cuda130": "nvidia.dali",
}
NEEDED = ("megatron-core", "pyarrow", "tokenizers")


def send(answer: Any) -> None:
    """Print an answer as a line that `environment.run_probe` reads."""
    print("\n@" + json.dumps(answer), flush=True)


def probe() -> None:
    """Print {"CUDA": version of torch's CUDA}, then [level, subject, detail, remedy] of each check, as JSON lines."""
    import torch
    from torch.utils import collect_env

    collected = collect_env.get_env_info()
    info = {name: "" if value in (None, "N/A") else value for name, value in collected._asdict().items()}
    send({"CUDA": info["cuda_compiled_version"]})
    # collect_env lists the files of cuDNN on the system, and torch may load another one.
    cudnn = torch.backends.cudnn.version()
    info["cudnn_version"] = f"{cudnn // 10_000}.{cudnn // 100 % 100}.{cudnn % 100}" if cudnn else ""
    shown = {"CUDA": "cuda_compiled_version", "cuDNN": "cudnn_version", "driver": "nvidia_driver_version", "on": "os"}
    detail = ", ".join(f"{name} {info[field]}" for name, field in shown.items() if info[field])
    send(["ok", f"torch {collected.torch_version}", detail, ""])
    for finding in [*gpu_findings(info["nvidia_gpu_models"]), *precision_findings(), *import_findings()]:
        send(finding)


def gpu_findings(nvidia_smi: str) -> Iterator[list[str]]:
    """Yield [level, subject, detail, remedy] for each GPU that torch can use, or once if it can use none.

    A warning of torch, such as that it has no kernels for a GPU, is yielded as a problem.

    Args:
        nvidia_smi: The GPUs that nvidia-smi lists, one per line; empty if there is none.
    """
    import torch

    with warnings.catch_warnings(record=True) as torch_warnings:
        warnings.simplefilter("always")
        try:
            torch.cuda.init()
        except Exception as error:  # torch raises errors of several classes here
            if not nvidia_smi:
                yield ["ok", "GPU", "none: training runs on the CPU, over gloo", ""]
                return
            visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
            detail = f"nvidia-smi lists {nvidia_smi.splitlines()[0]}, but torch cannot use it: {error}"
            remedy = (
                f"install a driver for CUDA {torch.version.cuda}, or a torch for this driver; start a container with "
                f"--gpus all; CUDA_VISIBLE_DEVICES is {visible_devices}"
                if torch.version.cuda
                else "install a CUDA build of torch; this one was built for the CPU"
            )
            yield ["problem", "GPU", detail, remedy]
            return
        for index in range(torch.cuda.device_count()):
            free, total = (amount / 2**30 for amount in torch.cuda.mem_get_info(index))
            subject = f"GPU {index}: {torch.cuda.get_device_name(index)}"
            if total - free > OCCUPIED_GIB:
                detail = f"other processes use {total - free:.1f} of {total:.0f} GiB"
                yield ["warning", subject, detail, "see nvidia-smi; the plan of a run assumes that all memory is free"]
            else:
                yield ["ok", subject, f"{total:.0f} GiB", ""]
    for warning in torch_warnings:  # torch has no kernels for this GPU
        yield ["problem", "GPU", " ".join(str(warning.message).split()), "install a build of torch for this GPU"]


def precision_findings() -> Iterator[list[str]]:
    """Yield [level, precision, kernels or why it is unsupported, ""] for each.

    The level is "ok", "note" for an unsupported precision, or "problem" for an unsupported float32.
    """
    from megatron_neobert.config.schema import Settings
    from megatron_neobert.errors import ConfigError
    from megatron_neobert.model.kernels import check_hardware, choose_kernels

    bf16 = Settings().with_section("training", bf16=True)
    precisions = {"float32": Settings(), "bfloat16": bf16}
    for recipe in ("tensorwise", "blockwise"):
        precisions[f"FP8 {recipe}"] = bf16.with_section("compute", fp8_format="hybrid", fp8_recipe=recipe)
    for name, settings in precisions.items():
        try:
            check_hardware(settings)
            summary = choose_kernels(settings).summary.replace("\nwarning: ", "; ")
            yield ["ok", name, summary.split(": ", 1)[1], ""]
        except ConfigError as error:
            level = "problem" if name == "float32" else "note"
            yield [level, name, f"not supported: {' '.join(error.problems)}", ""]


def import_findings() -> Iterator[list[str]]:
    """Yield [level, subject, detail, remedy] for each installed package in COMPILED that cannot be imported."""
    for package, module in COMPILED.items():
        try:
            version = importlib.metadata.version(package)
            importlib.import_module(module)
        except importlib.metadata.PackageNotFoundError:
            continue
        except Exception as error:  # a broken package can raise any exception
            level = "problem" if package in NEEDED else "warning"
            detail = f"is installed but cannot be imported: {type(error).__name__}: {error}"
            remedy = f"install it again for this Python and torch, or pip uninstall {package} if you do not need it"
            yield [level, f"{package} {version}", detail, remedy]


def run_gpu_test() -> None:
    """Run `compute` in one process per GPU. Print a problem if there is no GPU or a process fails."""
    import torch
    from torch import multiprocessing

    ranks = torch.cuda.device_count()
    if not ranks:
        send(["problem", "--gpu-test", "there is no GPU to test", "see above, or remove the flag"])
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            multiprocessing.spawn(compute, ("cuda", ranks, f"{folder}/store"), nprocs=ranks)
        except Exception as error:  # the error of a rank, or the signal that ended it
            send(["problem", "--gpu-test", f"a process failed: {str(error).strip().splitlines()[-1]}", SEE_DRIVER])


def compute(rank: int, device_type: str, ranks: int, store: str) -> None:
    """Check a bfloat16 matrix product on this rank, then a sum over all ranks, and print the results as JSON lines.

    Only rank 0 prints the result of the sum. A wrong result is printed as a problem; no error is raised.

    Args:
        device_type: "cuda", or "cpu" in tests, which communicates over gloo.
        store: Path of a new file that the ranks use to find each other.

    Collective: all ranks.
    """
    import torch
    import torch.distributed as dist

    is_cuda = device_type == "cuda"
    device = torch.device(device_type, rank) if is_cuda else torch.device(device_type)
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_cuda else "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    size = 4096 if is_cuda else 256
    left, right = torch.randn(2, size, size, device=device).div(size**0.5).bfloat16()
    product = left.float() @ right.float()
    error = float(((left @ right).float() - product).norm() / product.norm())
    send_check(f"{device} bfloat16 product", f"relative error {error:.1e}", is_correct=error < 1e-2)
    values = torch.full((2**20,), float(rank + 1), device=device)
    dist.all_reduce(values)  # collective: all ranks
    expected = ranks * (ranks + 1) / 2
    if rank == 0:
        is_correct = bool((values == expected).all())
        detail = f"{values[0].item():g}, expected {expected:g}"
        send_check(f"sum over {ranks} rank(s)", detail, is_correct=is_correct)
    dist.destroy_process_group()


def send_check(subject: str, detail: str, *, is_correct: bool) -> None:
    """Print the result of a computation as a line for `environment.run_probe`: "ok", or "problem" with a remedy."""
    send(["ok", subject, detail, ""] if is_correct else ["problem", subject, detail, SEE_DRIVER])


if __name__ == "__main__":
    try:
        run_gpu_test() if sys.argv[1:] == ["--gpu-test"] else probe()
    except Exception as error:  # importing torch can raise any exception
        send(["problem", "torch", f"cannot be used: {type(error).__name__}: {error}", OTHER_TORCH])
