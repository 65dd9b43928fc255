"""Rules about torch, the GPUs and what can be computed on them."""

from __future__ import annotations

from environment_checks.facts import OK, PROBLEM, WARNING, Facts, Finding, Gpu
from environment_checks.packages import PREPARE
from environment_checks.versions import fits

LEAST_BF16 = (8, 0)  # compute capability that the packed attention kernels need
ANOTHER_TORCH = (
    "install the torch of constraints.txt, in the build for this machine, then run bash tools/prepare_environment.sh, "
    "which keeps the torch that is there"
)
OCCUPIED_GIB = 1.0  # more than a display or a driver takes


def torch_findings(facts: Facts) -> list[Finding]:
    torch = facts.torch
    if torch.error:
        installed = f"torch {facts.packages['torch']}" if "torch" in facts.packages else "torch"
        remedy = ANOTHER_TORCH if "torch" in facts.packages else PREPARE
        return [Finding(PROBLEM, installed, f"cannot be imported: {torch.error}", remedy)]
    wanted = next((line.versions for line in facts.requirements if line.package == "torch"), "")
    build = f"built with CUDA {torch.cuda}" if torch.cuda else "built for the CPU"
    if torch.hip:
        build = f"built for ROCm {torch.hip}"
    details = [build] + [f"{name} {value}" for name, value in (("cuDNN", torch.cudnn), ("NCCL", torch.nccl)) if value]
    found = [Finding(OK, f"torch {torch.version}", ", ".join(details))]
    if not fits(torch.version, wanted):
        found = [
            Finding(
                PROBLEM,
                f"torch {torch.version}",
                f"is not {wanted}, which setup.py asks for"
                + ("" if torch.has_packed_scale else ": its packed attention takes no scale"),
                ANOTHER_TORCH,
            )
        ]
    if torch.hip:
        found.append(Finding(WARNING, "ROCm", "has never been tried with this project", "use a CUDA or a CPU build"))
    if not torch.has_gloo:
        found.append(
            Finding(PROBLEM, "torch", "was built without gloo, which ranks meet over", "install another build of torch")
        )
    return found


def gpu_findings(facts: Facts) -> list[Finding]:
    """One line per GPU, or why there is none."""
    torch = facts.torch
    if torch.error:
        gpus = facts.driver.gpus
        return [Finding(OK, f"driver {facts.driver.version}", f"{len(gpus)} GPU(s), {gpus[0]}")] if gpus else []
    if not torch.gpus:
        return _no_gpu_findings(facts)
    found = []
    for index, gpu in enumerate(torch.gpus):
        capability = f"{gpu.capability[0]}.{gpu.capability[1]}"
        words = f"compute capability {capability}, {gpu.memory_gib:.0f} GiB"
        found.append(_judge_gpu(facts, gpu) or Finding(OK, f"GPU {index}: {gpu.name}", words))
        if gpu.used_gib > OCCUPIED_GIB:
            found.append(
                Finding(
                    WARNING,
                    f"GPU {index}",
                    f"{gpu.used_gib:.1f} of {gpu.memory_gib:.0f} GiB are in use by other processes",
                    "see nvidia-smi; a run plans with all of it",
                )
            )
    if facts.driver.version:
        links = f", GPUs linked by {facts.driver.links}" if facts.driver.links else ""
        found.append(Finding(OK, f"driver {facts.driver.version}", f"{len(facts.driver.gpus)} GPU(s){links}"))
    return found + _link_findings(facts)


def _no_gpu_findings(facts: Facts) -> list[Finding]:
    torch, driver = facts.torch, facts.driver
    if not driver.gpus:
        reason = "" if driver.error == "nvidia-smi is not on the PATH" else f" ({driver.error})"
        return [Finding(OK, "GPU", f"none{reason}: training runs on the CPU, over gloo")]
    here = f"nvidia-smi lists {len(driver.gpus)} GPU(s), {driver.gpus[0]}"
    hidden = facts.variables.get("CUDA_VISIBLE_DEVICES")
    if not torch.cuda:
        return [Finding(PROBLEM, "GPU", f"{here}, and torch was built for the CPU", "install a CUDA build of torch")]
    if hidden is not None:
        return [
            Finding(
                PROBLEM,
                "GPU",
                f"{here}, and CUDA_VISIBLE_DEVICES={hidden!r} leaves none",
                "unset CUDA_VISIBLE_DEVICES",
            )
        ]
    return [
        Finding(
            PROBLEM,
            "GPU",
            f"{here}, driver {driver.version}, but torch reaches none: {torch.no_gpu_because}",
            f"install a driver for CUDA {torch.cuda}, or a torch for the driver; a container needs --gpus all",
        )
    ]


def _judge_gpu(facts: Facts, gpu: Gpu) -> Finding | None:
    capability = f"{gpu.capability[0]}.{gpu.capability[1]}"
    if not has_kernels_for(gpu.capability, facts.torch.architectures):
        return Finding(
            PROBLEM,
            gpu.name,
            f"has compute capability {capability}, and torch's kernels are for {' '.join(facts.torch.architectures)}",
            "install a build of torch for this GPU",
        )
    if gpu.capability < LEAST_BF16:
        return Finding(
            WARNING,
            gpu.name,
            f"has compute capability {capability}; the packed attention kernels for bfloat16 need 8.0",
            "train with --no-bf16, slowly",
        )
    return None


def has_kernels_for(capability: tuple[int, int], architectures: tuple[str, ...]) -> bool:
    """Whether kernels run: those of the same major and no higher minor version, and code that is compiled later."""
    for architecture in architectures:
        kind, _, number = architecture.partition("_")
        digits = number.rstrip("af")
        if not digits.isdigit():
            continue
        major, minor = int(digits[:-1]), int(digits[-1])
        if kind == "sm" and major == capability[0] and minor <= capability[1]:
            return True
        if kind == "compute" and (major, minor) <= capability:
            return True
    return not architectures


def _link_findings(facts: Facts) -> list[Finding]:
    links = facts.driver.links.split()
    if not links or any(link.startswith("NV") for link in links):
        return []
    return [
        Finding(
            WARNING,
            "links",
            f"the GPUs are linked by {facts.driver.links} and not by NVLink",
            "prefer data parallelism; tensor and context parallelism exchange activations in every layer",
        )
    ]


def precision_findings(facts: Facts) -> list[Finding]:
    """What training would compute with; what is impossible here is said, and is no fault."""
    names: dict[str, list[str]] = {}
    for line in facts.precisions:
        names.setdefault(line.words if line.possible else f"not here: {line.words}", []).append(line.name)
    return [Finding(OK, ", ".join(several), words) for words, several in names.items()]
