"""Every rule of tools/check_environment.py: it speaks in its case, and is silent on a machine that is well."""

import sys
from dataclasses import replace

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from unit.tools.commands import REPOSITORY

sys.path.append(str(REPOSITORY / "tools"))  # as the command has it
from environment_checks.collect import read_requirements
from environment_checks.devices import has_kernels_for
from environment_checks.facts import OK, PROBLEM, WARNING, Disk, Driver, Facts, Gpu, Limits, Precision, Torch
from environment_checks.known_bad import PAIRS, VARIABLES
from environment_checks.report import judge, to_text, worst
from environment_checks.versions import fits

REQUIREMENTS = read_requirements(REPOSITORY / "setup.py")
CORE = {line.package: "2.12.0" if line.package == "torch" else line.versions for line in REQUIREMENTS if not line.extra}
INSTALLED = {name: Version(versions.split(",")[0].strip(">=")).public for name, versions in CORE.items()}
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 79.1, 0.5)
WELL = Facts(
    python="3.12.3",
    executable="python",
    packages={**INSTALLED, "transformer-engine": "2.11.0", "transformer-engine-cu13": "2.11.0"},
    project="/opt/neobert/megatron_neobert/__init__.py",
    repository="/opt/neobert",
    torch=Torch(
        version="2.12.0a0+5bff50d",
        cuda="13.2",
        cudnn="92000",
        nccl="2.30.4",
        architectures=("sm_90",),
        gpus=(H100, H100),
    ),
    precisions=(Precision("bfloat16", True, "Transformer Engine 2.11.0"), Precision("FP8 mxfp8", False, "too old")),
    driver=Driver(version="580.82.07", gpus=(H100.name,) * 2, links="NV18", error=""),
    disks=(Disk("--save", "runs", 900.0, 1000.0, "ext4", True),),
    limits=Limits(cores=32, memory_gib=256.0, shm_gib=64.0, open_files=65536, has_infiniband=True),
    variables={"OMP_NUM_THREADS": "4", "PATH": "bin"},
    requirements=REQUIREMENTS,
)


def complaints(facts):
    """Status and text of everything that is not ok."""
    findings = [one for several in judge(facts).values() for one in several if one.status != OK]
    assert all(finding.remedy for finding in findings), findings
    return [(finding.status, f"{finding.subject}: {finding.words}") for finding in findings]


def with_packages(**versions):
    """WELL with these versions; None removes a package. Underscores stand for hyphens."""
    changed = {**WELL.packages, **{name.replace("_", "-"): version for name, version in versions.items()}}
    return replace(WELL, packages={name: version for name, version in changed.items() if version is not None})


def with_torch(**changes):
    return replace(WELL, torch=replace(WELL.torch, **changes))


def with_limits(**changes):
    return replace(WELL, limits=replace(WELL.limits, **changes))


def with_disk(**changes):
    return replace(WELL, disks=(replace(WELL.disks[0], **changes),))


def without_gpu(*, cuda="13.2", because="No CUDA GPUs are available", variables=None):
    torch = replace(WELL.torch, gpus=(), cuda=cuda, no_gpu_because=because)
    return replace(WELL, torch=torch, variables=variables or {})


CASES = {
    "python too old": (replace(WELL, python="3.9.18"), PROBLEM, "Python 3.9.18"),
    "python too new": (replace(WELL, python="3.13.0"), PROBLEM, "needs 3.10, 3.11 or 3.12"),
    "project missing": (replace(WELL, project=""), PROBLEM, "megatron_neobert: cannot be imported"),
    "another copy of the project": (
        replace(WELL, project="/srv/other/megatron_neobert/__init__.py"),
        WARNING,
        "comes from /srv/other",
    ),
    "torch broken": (replace(WELL, torch=Torch(error="OSError: libcudart.so")), PROBLEM, "OSError: libcudart.so"),
    "torch too old": (with_torch(version="2.10.0", has_packed_scale=False), PROBLEM, "torch 2.10.0: is not >=2.11"),
    "torch before its release": (with_torch(version="2.11.0a0+nv"), PROBLEM, "torch 2.11.0a0+nv: is not >=2.11"),
    "torch for ROCm": (with_torch(hip="6.4"), WARNING, "ROCm"),
    "torch without gloo": (with_torch(has_gloo=False), PROBLEM, "without gloo"),
    "psutil missing": (with_packages(psutil=None), PROBLEM, "checkpoint writers hang"),
    "transformers missing": (with_packages(transformers=None), WARNING, "transformers>=5.3"),
    "transformers without EuroBERT": (with_packages(transformers="4.57.3"), WARNING, "EuroBERT's classes"),
    "megatron-core too new": (with_packages(megatron_core="0.17.1"), PROBLEM, "megatron-core 0.17.1: is not >=0.16.1"),
    "megatron-core too old": (with_packages(megatron_core="0.15.3"), PROBLEM, "megatron-core 0.15.3"),
    "numpy broken": (replace(WELL, import_errors={"numpy": "ImportError: x"}), PROBLEM, "cannot be imported: Imp"),
    "engine broken": (
        replace(WELL, import_errors={"transformer-engine": "undefined symbol"}),
        WARNING,
        "undefined symb",
    ),
    "flash-attn broken": (
        replace(with_packages(flash_attn="2.8.3"), import_errors={"flash-attn": "undefined symbol"}),
        WARNING,
        "flash-attn 2.8.3: is installed and cannot be imported",
    ),
    "fast back end of another version": (with_packages(nanotoken="0.2.0"), WARNING, "nanotoken 0.2.0: is not ==0.1.0"),
    "foreign apex": (replace(with_packages(apex="0.9.10.dev0"), foreign_apex=True), PROBLEM, "is not NVIDIA's"),
    "engine too old": (with_packages(transformer_engine="2.8.0"), WARNING, "2.8.0: is not >=2.9,<2.12, which"),
    "engine too new": (
        with_packages(transformer_engine="2.12.0"),
        WARNING,
        "megatron-core 0.16.1 declares 2.9 to 2.11",
    ),
    "mteb too old": (with_packages(mteb="1.39.7"), WARNING, "mteb 1.39.7: is not >=2.26,<3"),
    "engine's parts differ": (with_packages(transformer_engine_torch="2.10.0"), PROBLEM, "parts of different versions"),
    "shadowed": (replace(WELL, shadowed={"megatron": "/old/Megatron-LM/megatron"}), WARNING, "/old/Megatron-LM"),
    "GPU without kernels": (with_torch(architectures=("sm_80", "sm_100")), PROBLEM, "capability 9.0"),
    "GPU without bfloat16": (
        with_torch(gpus=(Gpu("Tesla T4", (7, 5), 15.0, 0.0),), architectures=("sm_75",)),
        WARNING,
        "Tesla T4: has compute capability 7.5",
    ),
    "GPU in use": (with_torch(gpus=(replace(H100, used_gib=40.0),)), WARNING, "40.0 of 79 GiB are in use"),
    "torch for the CPU beside a GPU": (without_gpu(cuda=""), PROBLEM, "built for the CPU"),
    "driver too old": (without_gpu(because="driver is too old"), PROBLEM, "reaches none: driver is too old"),
    "GPUs hidden": (without_gpu(variables={"CUDA_VISIBLE_DEVICES": ""}), PROBLEM, "CUDA_VISIBLE_DEVICES=''"),
    "no NVLink": (replace(WELL, driver=replace(WELL.driver, links="PIX SYS")), WARNING, "not by NVLink"),
    "few cores allowed": (with_limits(cgroup_cores=2.0), WARNING, "lets this process use 2"),
    "little memory": (with_limits(memory_gib=4.0), WARNING, "memory: 4.0 GiB"),
    "little memory allowed": (with_limits(cgroup_memory_gib=2.0), WARNING, "2.0 GiB, by a cgroup of 256 GiB"),
    "little shared memory": (with_limits(shm_gib=0.0625), WARNING, "/dev/shm: has 64 MiB"),
    "no shared memory": (with_limits(shm_gib=None), WARNING, "/dev/shm: is missing"),
    "few open files": (with_limits(open_files=1024, most_open_files=524288), WARNING, "at most 1,024"),
    "little locked memory": (with_limits(locked_bytes=65536), WARNING, "at most 64 KiB"),
    "disk full": (with_disk(free_gib=3.0), WARNING, "3.0 of 1000 GiB free"),
    "disk of another": (with_disk(writable=False), PROBLEM, "cannot be written to"),
    "file where a run would be written": (with_disk(obstacle="/srv/runs"), PROBLEM, "/srv/runs is no folder"),
    "disk in memory": (with_disk(kind="tmpfs"), WARNING, "a tmpfs is gone"),
    "slow attention alone": (
        replace(WELL, variables={"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "0"}),
        WARNING,
        "writes out all scores",
    ),
}


def test_machine_that_is_well_gets_no_complaint():
    assert complaints(WELL) == []
    assert worst(judge(WELL)) == OK


@pytest.mark.parametrize(("facts", "status", "words"), CASES.values(), ids=CASES)
def test_rule_speaks_in_its_case(facts, status, words):
    assert any(status == found and words in text for found, text in complaints(facts)), complaints(facts)


# For each pair of the table: versions that do not go together, and versions that do.
PAIR_CASES = {
    ("transformer-engine", ">=2.16"): ({"transformer_engine": "2.20.2", "transformer_engine_cu13": "2.20.2"}, {}),
    ("transformer-engine-cu12", ""): ({"transformer_engine_cu12": "2.11.0"}, {}),
    ("transformer-engine-cu13", ""): ({"cuda": "12.8"}, {}),
    ("nvidia-dali-cuda120", ""): ({"nvidia_dali_cuda120": "2.4.0"}, {"nvidia_dali_cuda130": "2.4.0"}),
    ("nvidia-dali-cuda130", ""): ({"nvidia_dali_cuda130": "2.4.0", "cuda": "12.8"}, {"nvidia_dali_cuda130": "2.4.0"}),
}


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.first}{pair.first_versions}")
def test_known_bad_pair_is_named_and_its_neighbours_are_not(pair):
    for versions, expected in zip(PAIR_CASES[pair.first, pair.first_versions], (True, False), strict=True):
        packages = {name: version for name, version in versions.items() if name not in ("python", "cuda")}
        facts = with_packages(**packages)
        facts = replace(facts, python=versions.get("python", WELL.python))
        facts = replace(facts, torch=replace(WELL.torch, cuda=versions.get("cuda", WELL.torch.cuda)))
        found = [text for status, text in complaints(facts) if status == pair.status and pair.why in text]
        assert bool(found) is expected, found


@pytest.mark.parametrize("line", VARIABLES, ids=lambda line: line.name)
def test_harmful_variable_is_named_and_a_harmless_value_is_not(line):
    harmful = line.values[0] if line.values else "3"
    harmless = "" if not line.values else {"0": "1"}.get(harmful, "0")
    assert (line.status, f"{line.name}={harmful}: {line.cost}") in complaints(
        replace(WELL, variables={line.name: harmful})
    )
    assert complaints(replace(WELL, variables={line.name: harmless})) == []


@pytest.mark.parametrize(("variable", "complained"), [("RANK=0", True), ("RANK=", False), ("PYTHONOPTIMIZE=0", False)])
def test_rank_0_of_a_launcher_that_has_gone_counts_and_optimisation_0_does_not(variable, complained):
    name, value = variable.split("=")
    found = [text for _, text in complaints(replace(WELL, variables={name: value}))]
    assert [text.split(":")[0] for text in found] == ([variable] if complained else [])


def test_optional_package_that_is_absent_is_no_complaint():
    assert complaints(with_packages(transformer_engine=None, transformer_engine_cu13=None)) == []


@pytest.mark.parametrize(
    ("architectures", "runs"),
    [
        (("sm_90",), True),
        (("sm_90a",), True),
        (("sm_80", "compute_80"), True),  # compiled by the driver when it is loaded
        (("sm_80", "sm_86"), False),
        (("sm_100",), False),
        (("compute_100",), False),
    ],
)
def test_kernels_run_on_a_gpu_of_their_own_major_version_or_from_portable_code(architectures, runs):
    assert has_kernels_for((9, 0), architectures) is runs


@pytest.mark.parametrize(
    "version", ["2.10.1", "2.11.0a0+5bff50d", "2.11", "2.11.0+cu130", "2.11.1", "2.12.0a0", "2.12"]
)
@pytest.mark.parametrize("wanted", [">=2.11", ">=2.9,<2.12", "==2.11.0", "!=2.11", "<=2.11.1", ""])
def test_versions_are_compared_as_pip_compares_them(version, wanted):
    assert fits(version, wanted) is SpecifierSet(wanted).contains(version, prereleases=True)


def test_ranges_are_those_of_setup_py():
    lines = {(line.package, line.extra): line for line in REQUIREMENTS}
    assert lines["transformer-engine", "gpu"].versions == ">=2.9,<2.12"
    assert lines["mteb", "eval"].least_python == "3.11"
    assert lines["torch", ""].versions == ">=2.11"


def test_report_names_each_complaint_with_its_remedy_and_counts_them():
    facts = replace(with_packages(psutil=None), variables={"CUDA_LAUNCH_BLOCKING": "1"})
    text = to_text(judge(facts), colour=False, width=300)
    assert "  problem not installed: psutil>=5.9" in text
    assert "-> run bash tools/prepare_environment.sh" in text
    assert text.endswith("1 problem(s) keep training from starting as it should; 1 warning(s).")
    assert "\033[" not in text and "\033[33mwarning" in to_text(judge(facts), colour=True, width=300)
