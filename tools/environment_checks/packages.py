"""Rules about what is installed: the ranges of setup.py, what can be imported, and pairs that do not go together."""

from __future__ import annotations

from environment_checks.facts import OK, PROBLEM, WARNING, Facts, Finding, Requirement
from environment_checks.known_bad import PAIRS
from environment_checks.versions import fits

PYTHONS = ">=3.10,<3.13"
PREPARE = "run bash tools/prepare_environment.sh, which installs the tested versions of constraints.txt"
# Packages without which, or outside the range of which, training does not start; others cost a conversion or a format.
FOR_TRAINING = frozenset(
    {
        *("torch", "megatron-core", "numpy", "pyarrow", "orjson", "fsspec", "tokenizers", "safetensors", "PyYAML"),
        *("psutil", "tensorboard", "rich", "packaging", "backports.zstd"),
    }
)
# What a package that is missing or too old costs, where that is not plain.
_WHY = {
    "psutil": "without it the launcher does not start and megatron.core's checkpoint writers hang",
    "transformers": "EuroBERT's classes, by which exports load without remote code, came with 5.3",
    "megatron-core": "inner functions of 0.16.1 are used, to save safely and on CPU",
    # Source: the extra `dev` of megatron-core 0.16.1. Up to 2.20.2 all that it imports is there; behaviour is unknown.
    "transformer-engine": "megatron-core 0.16.1 declares 2.9 to 2.11, and imports what earlier ones lack",
}
# How to install one that pip alone would install without its compiled parts.
_REMEDIES = {
    "transformer-engine": "install transformer-engine[core_cu13,pytorch]==2.11.0, or [core_cu12,pytorch] beside CUDA 12"
}
_EXTRAS_SHOWN = ("gpu", "fast", "dali", "wandb", "eval")


def python_findings(facts: Facts) -> list[Finding]:
    if fits(facts.python, PYTHONS):
        return [Finding(OK, f"Python {facts.python}", facts.executable)]
    return [
        Finding(
            PROBLEM,
            f"Python {facts.python}",
            f"{facts.executable}; this project needs 3.10, 3.11 or 3.12",
            "activate an environment of one of them, or run bash tools/prepare_environment.sh, which makes .venv",
        )
    ]


def project_findings(facts: Facts) -> list[Finding]:
    """Whether the code that runs is the code that lies beside this command."""
    if not facts.project:
        return [Finding(PROBLEM, "megatron_neobert", "cannot be imported by this Python", PREPARE)]
    if not facts.project.startswith(facts.repository + "/"):
        return [
            Finding(
                WARNING,
                "megatron_neobert",
                f"comes from {facts.project}, not from {facts.repository}",
                "change to the folder that you mean to run, or pip install --editable . there",
            )
        ]
    return [Finding(OK, "megatron_neobert", facts.project)]


def requirement_findings(facts: Facts) -> list[Finding]:
    """What setup.py asks for: missing packages together, those that are there one by one."""
    lines = [line for line in facts.requirements if line.package != "torch"]  # which has lines of its own
    core = [line for line in lines if not line.extra]
    optional: dict[str, Requirement] = {}
    for line in lines:
        if line.extra in _EXTRAS_SHOWN:
            optional.setdefault(line.package, line)
    return [
        *_missing_findings(facts, core),
        *(_core_finding(facts, line) for line in core if line.package in facts.packages),
        *(_extra_finding(facts, line) for line in optional.values() if line.package in facts.packages),
        *_absent_findings(facts, list(optional.values())),
    ]


def _missing_findings(facts: Facts, core: list[Requirement]) -> list[Finding]:
    missing = [line for line in core if line.package not in facts.packages]
    by_status = {
        PROBLEM: [line for line in missing if line.package in FOR_TRAINING],
        WARNING: [line for line in missing if line.package not in FOR_TRAINING],
    }
    return [
        Finding(
            status,
            "not installed",
            ", ".join(f"{line.package}{line.versions}" for line in lines)
            + "".join(f"; {line.package}: {_WHY[line.package]}" for line in lines if line.package in _WHY),
            PREPARE,
        )
        for status, lines in by_status.items()
        if lines
    ]


def _core_finding(facts: Facts, line: Requirement) -> Finding:
    bad = PROBLEM if line.package in FOR_TRAINING else WARNING
    version = facts.packages[line.package]
    if not fits(version, line.versions):
        words = f"is not {line.versions}, which setup.py asks for{_why(line)}"
        return Finding(bad, f"{line.package} {version}", words, PREPARE)
    if line.package in facts.import_errors:
        return _broken(facts, line.package, bad)
    return Finding(OK, f"{line.package} {version}", "")


def _extra_finding(facts: Facts, line: Requirement) -> Finding:
    version = facts.packages[line.package]
    if line.package in facts.import_errors:
        return _broken(facts, line.package, WARNING)
    if not fits(version, line.versions):
        return Finding(
            WARNING,
            f"{line.package} {version}",
            f"is not {line.versions}, which the extra {line.extra} asks for{_why(line)}",
            _REMEDIES.get(line.package, f"pip install '{line.package}{line.versions}'"),
        )
    return Finding(OK, f"{line.package} {version}", "")


def _why(line: Requirement) -> str:
    return f": {_WHY[line.package]}" if line.package in _WHY else ""


def _absent_findings(facts: Facts, optional: list[Requirement]) -> list[Finding]:
    names = [
        f"{line.package} (extra {line.extra}"
        + (f", needs Python {line.least_python})" if not _python_suffices(facts, line) else ")")
        for line in optional
        if line.package not in facts.packages
    ]
    return [Finding(OK, "not installed, optional", ", ".join(names))] if names else []


def _python_suffices(facts: Facts, line: Requirement) -> bool:
    return not line.least_python or fits(facts.python, f">={line.least_python}")


def _broken(facts: Facts, package: str, status: str) -> Finding:
    return Finding(
        status,
        f"{package} {facts.packages[package]}",
        f"is installed and cannot be imported: {facts.import_errors[package]}",
        f"install it again for this Python and this torch, or pip uninstall {package} if it is optional",
    )


def other_package_findings(facts: Facts) -> list[Finding]:
    """Compiled extensions that setup.py does not name, where they are installed."""
    found = []
    for package in ("flash-attn", "nvidia-dali-cuda120"):
        if package in facts.import_errors:
            found.append(_broken(facts, package, WARNING))
        elif package in facts.packages:
            found.append(Finding(OK, f"{package} {facts.packages[package]}", ""))
    return found + _apex_findings(facts) + _engine_findings(facts)


def _apex_findings(facts: Facts) -> list[Finding]:
    if facts.foreign_apex:
        return [
            Finding(
                PROBLEM,
                f"apex {facts.packages.get('apex', '')}".strip(),
                "is not NVIDIA's: the registry's package of that name is another project, which Megatron would import",
                "pip uninstall apex; NVIDIA's is optional and built from its repository",
            )
        ]
    if "apex" in facts.packages:
        return [Finding(OK, f"apex {facts.packages['apex']}", "NVIDIA's; optional")]
    return []


def _engine_findings(facts: Facts) -> list[Finding]:
    """The parts of Transformer Engine are built for each other."""
    parts = {name: version for name, version in facts.packages.items() if name.startswith("transformer-engine")}
    if len({version.split("+")[0] for version in parts.values()}) < 2:
        return []
    return [
        Finding(
            PROBLEM,
            "transformer-engine",
            "has parts of different versions: " + ", ".join(f"{name} {version}" for name, version in parts.items()),
            "pip uninstall all of them, then install transformer-engine[core_cu13,pytorch]==2.11.0",
        )
    ]


def pair_findings(facts: Facts) -> list[Finding]:
    """The lines of the table that describe this environment."""
    versions = {**facts.packages, "python": facts.python}
    if facts.torch.cuda:
        versions["cuda"] = facts.torch.cuda
    return [
        Finding(
            pair.status, _named(pair.first, versions), f"with {_named(pair.second, versions)}: {pair.why}", pair.remedy
        )
        for pair in PAIRS
        if pair.first in versions
        and pair.second in versions
        and fits(versions[pair.first], pair.first_versions)
        and fits(versions[pair.second], pair.second_versions)
    ]


def _named(package: str, versions: dict[str, str]) -> str:
    shown = {"python": "Python", "cuda": "CUDA"}.get(package, package)
    return f"{shown} {versions[package]}"


def shadow_findings(facts: Facts) -> list[Finding]:
    return [
        Finding(
            WARNING,
            module,
            f"a copy at {place} comes before the installed one (current folder or PYTHONPATH)",
            "take that folder out of PYTHONPATH, start elsewhere, or rename it",
        )
        for module, place in facts.shadowed.items()
    ]
