"""`neobert check environment` on this machine, with a broken torch, and with each conflict that it detects."""

import ast
import os
import subprocess
import sys

import pytest
from commands import ENVIRONMENT, REPOSITORY, run
from processes import run_on_ranks

from megatron_neobert.commands import environment as check_environment
from megatron_neobert.commands.environment import (
    OK,
    PROBLEM,
    WARNING,
    find_all,
    folder_findings,
    package_findings,
)
from megatron_neobert.runtime.environment import installed_packages

NVIDIA_SMI = "#!/usr/bin/env bash\necho 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)'\n"


@pytest.mark.parametrize(
    ("package", "version", "level", "text"),
    [
        ("torch", "2.10.0", PROBLEM, "is not supported: megatron-neobert needs torch>=2.11"),
        ("transformers", "4.57.3", WARNING, "megatron-neobert needs transformers>=5.3"),
        ("apex", "0.9.10.dev0", PROBLEM, "not NVIDIA's Apex"),
        ("psutil", None, PROBLEM, "is not installed; megatron-neobert needs psutil>=5.9"),
        ("transformer-engine", "2.8.0", WARNING, "the extra gpu of megatron-neobert needs transformer-engine"),
    ],
)
def test_package_outside_its_range_is_reported(package, version, level, text):
    installed = installed_packages()
    assert list(package_findings(installed)) == [], "control: the packages of the tests"
    installed.pop(package, None)
    (finding,) = package_findings(installed if version is None else {**installed, package: version})
    assert (finding.level, finding.subject) == (level, package if version is None else f"{package} {version}")
    assert text in finding.detail and finding.remedy


def test_new_folder_is_checked_by_its_nearest_existing_parent(tmp_path):
    assert next(folder_findings(tmp_path / "runs" / "first")).level == OK
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to(tmp_path / "nothing")
    for folder in (file, file / "runs" / "first", link, link / "first"):
        (finding,) = folder_findings(folder)
        assert finding.level == PROBLEM and "cannot save checkpoints below" in finding.detail


def test_gpu_test_computes_correctly_on_two_cpu_ranks(tmp_path):
    def compute(store):
        findings = []
        check_environment.send = lambda *finding: findings.append(finding)
        check_environment.compute(int(os.environ["RANK"]), "cpu", 2, store)
        subjects = ["cpu bfloat16 product", "sum over 2 rank(s)"]
        assert [subject for _, subject, _ in findings] == subjects[: 2 - int(os.environ["RANK"])], findings
        assert {level for level, *_ in findings} == {OK}, findings

    run_on_ranks(compute, str(tmp_path / "store"), world_size=2)


@pytest.mark.slow
def test_this_machine_can_train_and_other_variables_are_not_printed(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    variables = {**ENVIRONMENT, "MY_TOKEN": "do-not-tell"}
    code, output, errors = run("check environment", "--save", tmp_path / "run", env=variables)
    assert (code, errors) == (0, "") and "Training can start; " in output
    assert "do-not-tell" not in output
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    code, output, _ = run("check environment", env={**variables, "PATH": path})
    assert code == 69 and "problem GPU: nvidia-smi lists GPU 0: NVIDIA H100 80GB HBM3, but" in output


def test_torch_that_cannot_be_imported_is_a_problem_and_ends_with_69(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import os\nos.abort()\n")
    modules = f"{tmp_path}{os.pathsep}{REPOSITORY}"
    code, output, errors = run("check environment", cwd=tmp_path, env={**ENVIRONMENT, "PYTHONPATH": modules})
    assert (code, errors) == (69, "")
    assert "problem torch: the process was ended by SIGABRT" in output
    assert "Training cannot start as it should: 1 problem(s)" in output


def test_environment_without_packages_names_the_script_that_prepares_one():
    command = [sys.executable, "-E", "-S", "-m", "megatron_neobert", "check", "environment"]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stderr) == (69, "")
    assert "problem packages: the packages that training needs are not installed" in ended.stdout
    assert "run bash tools/prepare_environment.sh" in ended.stdout


def test_python_that_is_too_old_is_the_only_finding(monkeypatch):
    monkeypatch.setattr(check_environment.sys, "version_info", (3, 9, 18))
    (finding,) = find_all(None, gpu_test=False)
    assert finding.level == PROBLEM and "this project needs 3.10 to 3.13" in finding.detail


@pytest.mark.parametrize(
    "path",
    [
        f"megatron_neobert/{name}.py"
        for name in ("__init__", "__main__", "cli", "errors", "text", "commands/environment")
    ],
)
def test_source_parses_on_python_3_8_and_imports_only_the_standard_library(path):
    tree = ast.parse((REPOSITORY / path).read_text(encoding="utf-8"), feature_version=(3, 8))
    imported = {
        name.split(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imported - {"megatron_neobert"} <= set(sys.stdlib_module_names)
    if path.endswith(("__main__.py", "errors.py", "commands/environment.py", "cli.py")):
        assert "__future__" in imported, "annotations such as `int | None` are evaluated on Python 3.9 without it"
