"""Run a test that is written for a GPU on CPU, over the emulated extension."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import run_on_ranks

from megatron_neobert.config.schema import Settings
from megatron_neobert.runtime import distributed


def run_emulated(test: pytest.Function) -> None:
    """Call a test function in a new process with a process group of one rank. Skip the test if the function does."""
    arguments = {name: test.funcargs[name] for name in test._fixtureinfo.argnames}
    with tempfile.TemporaryDirectory() as folder:
        reason = Path(folder) / "reason"
        run_on_ranks(_call, test.obj, arguments, reason, world_size=1, preload="emulated_engine.preloaded")
        if reason.exists():
            pytest.skip(reason.read_text())


def _call(function: Callable[..., None], arguments: dict[str, Any], reason: Path) -> None:
    distributed.initialize(Settings())
    try:
        function(**arguments)
    except pytest.skip.Exception as skipped:
        reason.write_text(str(skipped))
    finally:
        distributed.shut_down()
