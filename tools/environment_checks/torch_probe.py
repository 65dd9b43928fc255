"""What torch and the project find here; run as a child process, since either may crash. Prints one JSON line each."""

from __future__ import annotations

import json
from typing import Any


def describe_torch() -> dict[str, Any]:
    import inspect

    import torch

    found: dict[str, Any] = {
        "version": torch.__version__,
        "location": torch.__file__,
        "cuda": torch.version.cuda or "",
        "hip": getattr(torch.version, "hip", None) or "",
        "cudnn": str(torch.backends.cudnn.version() or "") if torch.version.cuda else "",
        "has_gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
    }
    try:
        from torch.nn.attention.varlen import varlen_attn

        found["has_packed_scale"] = "scale" in inspect.signature(varlen_attn).parameters
    except ImportError:
        found["has_packed_scale"] = False
    if not torch.version.cuda:
        return found
    if torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        torch.cuda.init()
    except Exception as error:  # whatever the driver's trouble is, the report goes on and quotes it
        return {**found, "no_gpu_because": f"{type(error).__name__}: {error}"}
    gpus = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        gpus.append([name, list(capability), total / 2**30, (total - free) / 2**30])
    return {**found, "gpus": gpus, "architectures": torch.cuda.get_arch_list()}


def describe_precisions() -> list[Any]:
    from megatron_neobert.config.schema import Settings
    from megatron_neobert.errors import ConfigError
    from megatron_neobert.model.kernels import check_hardware, choose_kernels

    wanted: dict[str, dict[str, Any]] = {"float32": {}, "bfloat16": {"bf16": True}}
    wanted.update({f"FP8 {recipe}": {"bf16": True, "fp8": recipe} for recipe in ("delayed", "tensorwise", "blockwise")})
    found = []
    for name, options in wanted.items():
        settings = Settings().with_section("training", bf16=options.get("bf16", False))
        if "fp8" in options:
            settings = settings.with_section("compute", fp8_format="hybrid", fp8_recipe=options["fp8"])
        try:
            check_hardware(settings)
            found.append([name, True, choose_kernels(settings).summary.split(": ", 1)[1]])
        except ConfigError as error:
            found.append([name, False, " ".join(error.problems)])
    return found


def describe_project() -> str:
    import megatron_neobert

    return str(megatron_neobert.__file__)


def describe_megatron() -> None:
    import megatron.core  # noqa: F401


for part in (describe_project, describe_torch, describe_precisions, describe_megatron):
    try:
        answer: dict[str, Any] = {"found": part()}
    except Exception as error:  # a package that is broken may raise anything, and its words are the answer
        answer = {"error": f"{type(error).__name__}: {error}"}
    print("\n@" + json.dumps({"part": part.__name__, **answer}), flush=True)
