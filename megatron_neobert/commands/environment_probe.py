"""Report the devices that torch finds and the kernels that training would use. Started by environment.py.

    python probe.py               looks
    python probe.py --gpu-test    computes on every GPU, and between them

A process of its own, because a compiled library that does not fit its torch may end the process that imports it.
Prints lines that begin with "@" and hold JSON: an object with the version of CUDA, or a finding as a list
of level, subject, words and remedy. Other lines are those of libraries.
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
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # not the folder of this file

OCCUPIED_GIB = 1.0  # more than a display or a driver takes
SEE_DRIVER = "see nvidia-smi -q and the driver's log"
ANOTHER_TORCH = "install the torch of constraints.txt in the build for this machine"
# Compiled for one torch or one Python: being installed says little. Distribution -> module.
COMPILED = {
    "megatron-core": "megatron.core",
    "pyarrow": "pyarrow",
    "tokenizers": "tokenizers",
    "transformer-engine": "transformer_engine.pytorch",
    "flash-attn": "flash_attn",
    "nvidia-dali-cuda120": "nvidia.dali",
    "nvidia-dali-cuda130": "nvidia.dali",
}
NEEDED = ("megatron-core", "pyarrow", "tokenizers")


def tell(answer: Any) -> None:
    print("\n@" + json.dumps(answer), flush=True)


def look() -> None:
    """Print facts and findings in the order in which a failure explains those after it."""
    from torch.utils import collect_env

    found = collect_env.get_env_info()
    known = {name: "" if value in (None, "N/A") else value for name, value in found._asdict().items()}
    tell({"CUDA": known["cuda_compiled_version"]})
    shown = {"CUDA": "cuda_compiled_version", "cuDNN": "cudnn_version", "driver": "nvidia_driver_version", "on": "os"}
    words = ", ".join(f"{name} {known[field]}" for name, field in shown.items() if known[field])
    tell(["ok", f"torch {found.torch_version}", words, ""])
    for finding in [*gpu_findings(known["nvidia_gpu_models"]), *precision_findings(), *import_findings()]:
        tell(finding)


def gpu_findings(listed: str) -> Iterator[list[str]]:
    """Yield a finding per GPU that torch reaches, or why it reaches none of those that nvidia-smi lists."""
    import torch

    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        try:
            torch.cuda.init()
        except Exception as error:  # the driver's trouble in torch's words, of any class
            if not listed:
                yield ["ok", "GPU", "none: training runs on the CPU, over gloo", ""]
                return
            hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
            words = f"nvidia-smi lists {listed.splitlines()[0]}, but torch reaches none: {error}"
            remedy = (
                f"a driver for CUDA {torch.version.cuda} or a torch for the driver; --gpus all for a container; "
                f"CUDA_VISIBLE_DEVICES is {hidden}"
                if torch.version.cuda
                else "install a CUDA build of torch; this one was built for the CPU"
            )
            yield ["problem", "GPU", words, remedy]
            return
        for index in range(torch.cuda.device_count()):
            free, total = (amount / 2**30 for amount in torch.cuda.mem_get_info(index))
            subject = f"GPU {index}: {torch.cuda.get_device_name(index)}"
            if total - free > OCCUPIED_GIB:
                words = f"{total - free:.1f} of {total:.0f} GiB are in use by other processes"
                yield ["warning", subject, words, "see nvidia-smi; a run plans with all of it"]
            else:
                yield ["ok", subject, f"{total:.0f} GiB", ""]
    for complaint in complaints:  # torch compares the GPU with what its kernels were compiled for
        yield ["problem", "GPU", " ".join(str(complaint.message).split()), "install a build of torch for this GPU"]


def precision_findings() -> Iterator[list[str]]:
    """Yield what the check of training itself finds; a machine that cannot even compute in float32 cannot train."""
    from megatron_neobert.config.schema import Settings
    from megatron_neobert.errors import ConfigError
    from megatron_neobert.model.kernels import check_hardware, choose_kernels

    bf16 = Settings().with_section("training", bf16=True)
    wanted = {"float32": Settings().with_section("training", bf16=False), "bfloat16": bf16}
    for recipe in ("tensorwise", "blockwise"):
        wanted[f"FP8 {recipe}"] = bf16.with_section("compute", fp8_format="hybrid", fp8_recipe=recipe)
    for name, settings in wanted.items():
        try:
            check_hardware(settings)
            summary = choose_kernels(settings).summary.replace("\nwarning: ", "; ")
            yield ["ok", name, summary.split(": ", 1)[1], ""]
        except ConfigError as error:
            level = "problem" if name == "float32" else "ok"
            yield [level, name, f"not here: {' '.join(error.problems)}", ""]


def import_findings() -> Iterator[list[str]]:
    """Yield installed packages that cannot be imported."""
    for package, module in COMPILED.items():
        try:
            version = importlib.metadata.version(package)
            importlib.import_module(module)
        except importlib.metadata.PackageNotFoundError:
            continue
        except Exception as error:  # a broken package may raise anything, and its words are the answer
            level = "problem" if package in NEEDED else "warning"
            words = f"is installed and cannot be imported: {type(error).__name__}: {error}"
            remedy = f"install it again for this Python and this torch, or pip uninstall {package} if it is optional"
            yield [level, f"{package} {version}", words, remedy]


def compute_on_all() -> None:
    """Start one process per GPU; torch names the first that dies and ends the others."""
    import torch
    from torch import multiprocessing

    ranks = torch.cuda.device_count()
    if not ranks:
        tell(["problem", "--gpu-test", "there is no GPU to test", "see above, or leave the flag out"])
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            multiprocessing.spawn(compute_on, ("cuda", ranks, f"{folder}/store"), nprocs=ranks)
        except Exception as error:  # that of the rank, or how it was ended
            tell(["problem", "--gpu-test", f"a process failed: {str(error).strip().splitlines()[-1]}", SEE_DRIVER])


def compute_on(rank: int, kind: str, ranks: int, store: str) -> None:
    """Compute what training does, on one device and then between all of them. The same code runs on a CPU over gloo.

    Collective: all ranks.
    """
    import torch
    import torch.distributed as dist

    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks
    )
    size = 4096 if kind == "cuda" else 256
    left, right = torch.randn(2, size, size, device=device).div(size**0.5).bfloat16()
    expected_product = left.float() @ right.float()
    error = float(((left @ right).float() - expected_product).norm() / expected_product.norm())
    well = error < 1e-2
    remedy = "" if well else SEE_DRIVER
    tell(["ok" if well else "problem", f"{device} bfloat16 product", f"relative error {error:.1e}", remedy])
    values = torch.full((2**20,), float(rank + 1), device=device)
    dist.all_reduce(values)  # collective: all ranks
    expected = ranks * (ranks + 1) / 2
    if rank == 0:
        well = bool((values == expected).all())
        words = f"{values[0].item():g}, expected {expected:g}"
        tell(["ok" if well else "problem", f"sum over {ranks} rank(s)", words, "" if well else SEE_DRIVER])
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        compute_on_all() if sys.argv[1:] == ["--gpu-test"] else look()
    except Exception as error:  # of torch's own import above all, which may raise anything
        tell(["problem", "torch", f"cannot be used: {type(error).__name__}: {error}", ANOTHER_TORCH])
