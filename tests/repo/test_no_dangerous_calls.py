"""No code outside tests executes, unpickles or unpacks the content of a file.

pyproject.toml bans most such calls, and ruff reports them. The rules here are about arguments, which ruff cannot check.
tests/security opens hostile files.
"""

import ast
import sys
from collections.abc import Iterator

from commands import REPOSITORY, run_program

TOPS = ("megatron_neobert", "checkpoint_conversion", "tools", "benchmarks", "examples")
SOURCES = sorted(path for top in TOPS for path in (REPOSITORY / top).rglob("*.py"))
SOURCES += [REPOSITORY / "setup.py", REPOSITORY / "examples" / "pretrain_neobert.sh"]  # a shell and a Python program
# Function -> argument and its only allowed value.
REQUIRED = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
}


def problems_of(call: ast.Call) -> Iterator[str]:
    """Yield the forbidden arguments of a call."""
    name = ast.unparse(call.func)
    function = name.rpartition(".")[2]
    keywords = {item.arg: item.value.value if isinstance(item.value, ast.Constant) else ... for item in call.keywords}
    if name in REQUIRED and keywords.get(REQUIRED[name][0]) is not REQUIRED[name][1]:
        yield f"{name} without {REQUIRED[name][0]}={REQUIRED[name][1]}"
    if keywords.get("trust_remote_code", function == "from_pretrained") is not False:
        yield "trust_remote_code is not False"
    if keywords.get("allow_pickle", False) is not False or keywords.get("shell", False) is not False:
        yield "allow_pickle or shell is not False"
    if function in ("extractall", "extract") and "filter" not in keywords:
        yield f"{function} without a filter"
    if name == "sys.exit" and not call.args:
        yield "sys.exit() without a code"


def find_problems(source: str) -> list[str]:
    """Return "line: problem" for each forbidden call, and for imports that would hide one."""
    problems = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            problems += [f"{node.lineno}: {problem}" for problem in problems_of(node)]
        if isinstance(node, ast.ImportFrom) and node.module in ("torch", "numpy"):
            problems += [f"{node.lineno}: imports load" for alias in node.names if alias.name == "load"]
        if isinstance(node, ast.Constant) and node.value == "_target_":
            problems.append(f"{node.lineno}: _target_ names a class to instantiate")
    return problems


def test_no_source_has_a_dangerous_call():
    found = {str(path.relative_to(REPOSITORY)): find_problems(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert len(found) > 100 and {path: problems for path, problems in found.items() if problems} == {}


BANNED = """
import pickle as p
from pickle import loads as x
import dill
import hydra.utils
import megatron.core.datasets.gpt_dataset
from megatron.training import get_args
import torch.jit as j
from yaml import unsafe_load
import os, yaml, subprocess, shutil
p.loads(b)
read = p.Unpickler
j.load(f)
yaml.load(f)
yaml.load(f, yaml.FullLoader)
eval(text)
exec(text)
os.system(c)
subprocess.run(c, shell=True, check=True)
shutil.unpack_archive(p)
quit(1)
"""


def test_lint_reports_every_banned_import_and_call():
    ruff = (sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise")
    ended = run_program(*ruff, "--stdin-filename", "megatron_neobert/planted.py", "-", cwd=REPOSITORY, input=BANNED)
    codes = ("TID251", "S102", "S301", "S307", "S506", "S602", "S605", "PLR1722")
    reported = {line.split(":")[1] for line in ended.stdout.splitlines() if any(f": {code} " in line for code in codes)}
    harmless = {"2", "8", "10"}  # imports of modules that have harmless functions too
    assert reported == {str(number) for number in range(2, BANNED.count("\n") + 1)} - harmless
