"""Run a script with another version of transformers, as a user without this project does.

A version needs an environment `transformers-VERSION` in the folder that the variable TRANSFORMERS_ENVIRONMENTS names.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from commands import succeed

OTHER_VERSIONS = ("4.57.6",)  # the last of 4
INSTALLED = transformers.__version__


def run_script(version: str, script: str, cache: Path, *arguments: str | Path) -> Any:
    """Run a script of this folder, and return the JSON in the last line that it prints.

    Args:
        cache: Folder for the code that transformers copies. Each version has another one.
    """
    environments = os.environ.get("TRANSFORMERS_ENVIRONMENTS", "")
    python = Path(sys.executable if version == INSTALLED else f"{environments}/transformers-{version}/bin/python")
    if not python.exists():
        pytest.skip(f"TRANSFORMERS_ENVIRONMENTS has no transformers-{version}")
    changes = {"HF_HOME": str(cache / f"cache-{version}"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | changes
    options = {"stdin": subprocess.DEVNULL, "timeout": 3600}
    printed = succeed(python, Path(__file__).with_name(script), *arguments, env=environment, **options)
    assert "custom code" not in printed, "transformers asks whether code of the folder may run"
    return json.loads(printed.splitlines()[-1])
