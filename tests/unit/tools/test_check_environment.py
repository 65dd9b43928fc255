"""`neobert check environment` on this machine, with a broken torch, and with each conflict that it detects."""

import os
import platform
import sys

import pytest
from commands import ENVIRONMENT, REPOSITORY, run, run_program

from megatron_neobert.commands import check
from megatron_neobert.commands.check import Finding, folder_findings, package_findings
from megatron_neobert.runtime.environment import installed_packages

NVIDIA_SMI = "#!/usr/bin/env bash\necho 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)'\n"


@pytest.mark.parametrize(
    ("package", "version", "rule"),
    [("torch", "2.10.0", "megatron-neobert needs torch"), ("psutil", None, "megatron-neobert needs psutil>=5.9")],
)
def test_package_outside_its_range_is_reported(monkeypatch, package, version, rule):
    python = Finding(f"Python {platform.python_version()}", sys.executable)
    assert list(package_findings()) == [python], "control: the packages of the tests"
    monkeypatch.setattr(check, "installed_packages", lambda: {**installed_packages(), package: version})
    _, finding = package_findings()
    assert finding.subject == f"{package} {version or 'is not installed'}"
    assert rule in finding.detail and finding.remedy


def test_new_folder_is_checked_by_its_nearest_existing_parent(tmp_path):
    assert not next(folder_findings(tmp_path / "runs" / "first")).remedy
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to(tmp_path / "nothing")
    for folder in (file, file / "runs" / "first", link, link / "first"):
        (finding,) = folder_findings(folder)
        assert finding.remedy and "cannot save checkpoints below" in finding.detail


@pytest.mark.slow
def test_this_machine_can_train_and_other_variables_are_not_printed(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    variables = {**ENVIRONMENT, "MY_TOKEN": "do-not-tell"}
    code, output, errors = run("check environment", "--save", tmp_path / "run", env=variables)
    assert (code, errors) == (0, "") and "Training can start." in output
    assert "do-not-tell" not in output
    assert f"megatron-core {installed_packages()['megatron-core']}: megatron.core can be imported" in output
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    code, output, _ = run("check environment", env={**variables, "PATH": path})
    assert code == 69 and "problem GPU: nvidia-smi lists GPU 0: NVIDIA H100 80GB HBM3, but" in output


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        ("import os\nos.abort()\n", "the process was ended by SIGABRT"),
        ("import no_such_module\n", "cannot be used: ModuleNotFoundError: No module named 'no_such_module'"),
        ("", "cannot be used: AttributeError: module 'torch' has no attribute 'cuda'"),
    ],
)
def test_torch_that_cannot_be_used_is_a_problem_and_ends_with_69(broken, problem, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(broken)
    modules = f"{tmp_path}{os.pathsep}{REPOSITORY}"
    code, output, errors = run("check environment", cwd=tmp_path, env={**ENVIRONMENT, "PYTHONPATH": modules})
    assert (code, errors) == (69, "")
    assert f"problem torch: {problem}" in output
    assert "Training cannot start." in output


def test_environment_without_packages_names_the_script_that_prepares_one():
    words = ("-E", "-S", "-m", "megatron_neobert", "check", "environment")
    ended = run_program(sys.executable, *words, cwd=REPOSITORY)
    assert (ended.returncode, ended.stderr) == (69, "")
    assert "problem packages: megatron-neobert or its requirements are not installed" in ended.stdout
    assert "run bash tools/prepare_environment.sh" in ended.stdout
