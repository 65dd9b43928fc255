"""tools/check_environment.py looks at real machines: this one, this one with a broken torch, and files of others."""

import ast
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from unit.tools.commands import ENVIRONMENT, REPOSITORY, command_line

sys.path.append(str(REPOSITORY / "tools"))  # as the command has it
from environment_checks.collect import find_shadowed, import_error, links_of, read_driver, start_import, to_requirement
from environment_checks.facts import OK, PROBLEM, WARNING, Requirement
from environment_checks.kernel_test import compute_on, results_of, sum_over
from environment_checks.limits import cgroup_cores, cgroup_memory_gib, kind_of_file_system, read_disk
from environment_checks.report import terminal

OWN = [REPOSITORY / "megatron_neobert" / name for name in ("__init__.py", "errors.py", "text.py")]
SOURCES = sorted(
    [REPOSITORY / "tools" / "check_environment.py", *REPOSITORY.glob("tools/environment_checks/*.py"), *OWN]
)
PROBES = ("torch_probe.py", "kernel_child.py")  # whose imports happen in child processes

NVIDIA_SMI = """#!/usr/bin/env bash
if [[ $1 == topo ]]; then
    printf '\\tGPU0\\tGPU1\\tNIC0\\tCPU Affinity\\nGPU0\\t X \\tNV18\\tPIX\\t0-7\\nGPU1\\tNV18\\t X \\tPIX\\t0-7\\n'
else
    printf '580.82.07, NVIDIA H100 80GB HBM3\\n580.82.07, NVIDIA H100 80GB HBM3\\n'
fi
"""
BROKEN_SMI = "#!/usr/bin/env bash\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n"


def write_command(folder: Path, source: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "nvidia-smi").write_text(source)
    (folder / "nvidia-smi").chmod(0o755)
    return folder


def check(*flags: object, cwd: Path, **variables: str):
    """What it ended with, and its JSON; a secret in the environment is there for it to keep."""
    environment = {**ENVIRONMENT, "MY_TOKEN": "do-not-tell", **variables}
    command = command_line("check_environment", "--json", *flags)
    ended = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert ended.stderr == ""
    assert "do-not-tell" not in ended.stdout
    return ended.returncode, json.loads(ended.stdout)


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A torch that dies on import, two GPUs by nvidia-smi, a variable that training refuses, --gpu-test."""
    place = tmp_path_factory.mktemp("broken")
    (place / "modules" / "torch").mkdir(parents=True)
    (place / "modules" / "torch" / "__init__.py").write_text("import os\nos.abort()\n")
    path = f"{write_command(place / 'bin', NVIDIA_SMI)}{os.pathsep}{os.environ['PATH']}"
    modules = f"{place / 'modules'}{os.pathsep}{REPOSITORY}"
    return check("--gpu-test", cwd=place, PATH=path, PYTHONPATH=modules, CUDA_LAUNCH_BLOCKING="1")


def findings_of(answer, subject):
    return [(one["status"], one["words"]) for one in answer["findings"] if one["subject"].startswith(subject)]


def test_this_environment_is_described_as_its_metadata_say(tmp_path):
    code, answer = check("--save", tmp_path / "run", cwd=tmp_path)
    assert code == (69 if answer["status"] == PROBLEM else 0)
    torch = importlib.metadata.version("torch")
    assert answer["facts"]["torch"]["version"].split("+")[0] == torch.split("+")[0]
    assert answer["facts"]["packages"]["megatron-core"] == importlib.metadata.version("megatron-core")
    assert answer["facts"]["import_errors"] == {}
    assert answer["facts"]["project"] == str(REPOSITORY / "megatron_neobert" / "__init__.py")
    possible = {line["name"]: line["possible"] for line in answer["facts"]["precisions"]}
    assert possible["float32"] is True and "FP8 delayed" in possible
    assert [disk["flag"] for disk in answer["facts"]["disks"]] == ["the current folder", "--save"]
    assert answer["facts"]["disks"][1]["path"] == str(tmp_path / "run")


def test_torch_that_kills_its_process_is_a_problem_and_ends_with_69(broken):
    code, answer = broken
    assert code == 69 and answer["status"] == PROBLEM
    assert findings_of(answer, "torch ") == [(PROBLEM, "cannot be imported: the process was ended by SIGABRT")]
    ((status, words),) = findings_of(answer, "torch")[1:]
    assert status == WARNING and "comes before the installed one" in words


def test_gpus_are_named_by_their_driver_where_torch_is_broken(broken):
    assert findings_of(broken[1], "driver 580.82.07") == [(OK, "2 GPU(s), NVIDIA H100 80GB HBM3")]


def test_variable_that_slows_training_is_told_and_no_other_variable(broken):
    assert findings_of(broken[1], "CUDA_LAUNCH_BLOCKING=1")[0][0] == WARNING
    assert list(broken[1]["facts"]["variables"]) == ["CUDA_LAUNCH_BLOCKING"]


def test_gpu_test_without_a_gpu_is_a_problem(broken):
    assert findings_of(broken[1], "--gpu-test") == [(PROBLEM, "there is no GPU to test")]


def test_driver_is_read_from_nvidia_smi_with_the_links_between_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{write_command(tmp_path, NVIDIA_SMI)}{os.pathsep}{os.environ['PATH']}")
    driver = read_driver()
    assert (driver.version, len(driver.gpus), driver.error) == ("580.82.07", 2, "")
    assert driver.links == links_of("GPU0  X  NV18  PIX  0-7") == "NV18 PIX"


def test_driver_that_does_not_answer_is_quoted(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{write_command(tmp_path, BROKEN_SMI)}{os.pathsep}{os.environ['PATH']}")
    assert read_driver().error == "Failed to initialize NVML: Driver/library version mismatch"
    assert read_driver().gpus == ()


def test_packages_that_training_computes_with_are_tried_on_every_device():
    found = compute_on("cpu")
    assert [one.subject for one in found] == ["cpu: bfloat16 product", "cpu: packed attention", "cpu: fused Adam"]
    assert {one.status for one in found} == {OK}


def test_sum_over_ranks_meets_and_is_right():
    (found,) = sum_over(2, backend="gloo")
    assert (found.status, found.words) == (OK, "over gloo: 3, expected 3")


def test_device_that_computes_wrongly_or_dies_is_a_problem():
    wrong, dead = results_of('@["packed attention", false, "relative error 1.0"]', "ended by SIGSEGV", "cuda:1")
    assert (wrong.status, wrong.subject) == (PROBLEM, "cuda:1: packed attention")
    assert (dead.status, dead.words) == (PROBLEM, "its process failed: ended by SIGSEGV")


def test_import_error_is_the_last_line_of_the_traceback():
    assert import_error(start_import("no_such_module")) == "ModuleNotFoundError: No module named 'no_such_module'"
    assert import_error(start_import("json")) == ""


def test_copies_on_pythonpath_are_found_and_the_project_itself_is_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old" / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "old" / "megatron" / "core" / "__init__.py").touch()
    assert find_shadowed(f"{tmp_path / 'old'}{os.pathsep}{REPOSITORY}") == {
        "megatron": str(tmp_path / "old" / "megatron")
    }
    assert find_shadowed("") == {}
    (tmp_path / "torch.py").touch()
    assert find_shadowed("") == {"torch": str(tmp_path / "torch.py")}


@pytest.mark.parametrize(
    ("files", "cores", "gib"),
    [
        ({"cpu.max": "max 100000", "memory.max": "max"}, None, None),
        ({"cpu.max": "150000 100000", "memory.max": str(3 * 2**30)}, 1.5, 3.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None, None),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4.0, None),
        ({"memory/memory.limit_in_bytes": str(2**63 - 4096)}, None, None),
        ({"memory/memory.limit_in_bytes": str(2**31)}, None, 2.0),
        ({}, None, None),
    ],
)
def test_limits_of_a_container_are_read_from_both_versions_of_cgroups(tmp_path, files, cores, gib):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    nowhere = tmp_path / "no_listing"
    assert (cgroup_cores(tmp_path, nowhere), cgroup_memory_gib(tmp_path, nowhere)) == (cores, gib)


def test_limits_of_a_job_lie_in_its_own_cgroup_or_one_above_it_and_the_least_counts(tmp_path):
    """As Slurm writes them, where the root of cgroups has no limit."""
    (tmp_path / "v2" / "job_7" / "step_0").mkdir(parents=True)
    (tmp_path / "v2" / "job_7" / "memory.max").write_text(f"{16 * 2**30}\n")
    (tmp_path / "v2" / "job_7" / "step_0" / "memory.max").write_text(f"{20 * 2**30}\n")
    (tmp_path / "v2" / "job_7" / "step_0" / "cpu.max").write_text("400000 100000\n")
    (tmp_path / "v2" / "job_8").mkdir()
    (tmp_path / "v2" / "job_8" / "memory.max").write_text("1\n")
    own = tmp_path / "own"
    own.write_text("0::/job_7/step_0\n")
    assert (cgroup_cores(tmp_path / "v2", own), cgroup_memory_gib(tmp_path / "v2", own)) == (4.0, 16.0)

    for name, text in {"memory/uid/job_7/memory.limit_in_bytes": 2**34, "memory/memory.limit_in_bytes": 2**40}.items():
        (tmp_path / "v1" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "v1" / name).write_text(f"{text}\n")
    (tmp_path / "v1" / "cpu").mkdir()
    own.write_text("4:memory:/uid/job_7\n2:cpu,cpuacct:/\n0::/\n")
    assert (cgroup_cores(tmp_path / "v1", own), cgroup_memory_gib(tmp_path / "v1", own)) == (None, 16.0)


def test_file_system_is_that_of_the_longest_mount_point(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "overlay / overlay rw 0 0\nserver:/x /data nfs4 rw 0 0\nscratch /data/my\\040runs lustre rw 0 0\n"
    )
    kinds = {"/data2": "overlay", "/data/corpus": "nfs4", "/data": "nfs4", "/data/my runs/first": "lustre"}
    assert {place: kind_of_file_system(Path(place), mounts) for place in kinds} == kinds


def test_folder_that_is_not_there_yet_is_judged_by_the_one_it_will_lie_in(tmp_path):
    disk = read_disk("--save", tmp_path / "runs" / "first")
    assert (disk.path, disk.writable) == (str(tmp_path / "runs" / "first"), True)
    assert disk.free_gib > 0 and disk.obstacle == ""


def test_place_that_is_a_file_or_lies_in_one_or_is_a_link_to_nothing_is_no_place_for_a_run(tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to(tmp_path / "nothing")
    places = {file: file, file / "runs" / "first": file, link: link, link / "first": link}
    assert {place: read_disk("--save", place).obstacle for place in places} == {
        place: str(obstacle) for place, obstacle in places.items()
    }


def test_requirements_with_extras_and_markers_are_read():
    assert to_requirement("mteb>=2.26,<3; python_version >= '3.11'", "eval") == Requirement(
        "mteb", ">=2.26,<3", "3.11", "eval"
    )
    assert to_requirement("transformer-engine[pytorch]>=2.9,<2.12", "gpu").versions == ">=2.9,<2.12"


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colour_is_for_terminals_that_want_it(monkeypatch, variables, coloured):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert terminal(variables)[0] is coloured
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert terminal(variables)[0] is False


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_source_runs_on_python_3_8_and_imports_the_standard_library_alone(path):
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    if path.name not in PROBES:
        assert imported - {"environment_checks", "megatron_neobert"} <= set(sys.stdlib_module_names)
    if imported - {"environment_checks"} and path.name not in ("__init__.py", "text.py"):
        assert "__future__" in imported, "annotations such as `int | None` are evaluated on Python 3.9 without it"
