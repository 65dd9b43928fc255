"""Checkpoints can be exchanged between the two releases of megatron-core that pyproject.toml names.

OTHER_PYTHON is the interpreter of an environment with the other release. `make test-current` sets it.
"""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import REPOSITORY, environment, flags_of, load_and_save, read_metrics, train_on_ranks
from reliability.states import assert_same_state

from megatron_neobert.checkpoint.folder import iteration_folder
from megatron_neobert.config.cli import parse_command_line
from megatron_neobert.config.schema import Settings

OTHER_PYTHON = os.environ.get("OTHER_PYTHON", "")
ITERATIONS, STOP = 20, 10
LENGTH = {"train_iters": ITERATIONS, "eval_interval": ITERATIONS}


def run_elsewhere(*command: str, settings: Settings) -> None:
    """Run a command of this checkout in the other environment."""
    folders = [REPOSITORY, *(REPOSITORY / "tests" / name for name in ("", "distributed", "parity"))]
    variables = {**environment(1), "PYTHONPATH": os.pathsep.join(map(str, folders))}
    ended = subprocess.run(
        [OTHER_PYTHON, *command, *flags_of(settings)], env=variables, capture_output=True, text=True, check=False
    )
    assert ended.returncode in (0, 75), ended.stdout + ended.stderr


@pytest.fixture(scope="module", autouse=True)
def other_line() -> None:
    if not OTHER_PYTHON:
        pytest.skip("OTHER_PYTHON is not set to a Python with the other release of megatron-core")
    command = [OTHER_PYTHON, "-c", "import importlib.metadata as m; print(m.version('megatron-core'))"]
    version = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if version == importlib.metadata.version("megatron-core"):
        pytest.skip(f"OTHER_PYTHON also has megatron-core {version}")


def test_a_checkpoint_that_the_other_line_loads_and_saves_keeps_every_bit(settings):
    run, copy = (settings(name, training=LENGTH) for name in ("run", "copy"))
    train_on_ranks(run.with_section("training", exit_interval=STOP))
    run_elsewhere(__file__, settings=copy.with_section("checkpoint", load=run.checkpoint.save))
    folders = [iteration_folder(Path(str(part.checkpoint.save)), STOP) for part in (copy, run)]
    assert_same_state(*folders)
    uninterrupted = settings("uninterrupted", training=LENGTH)
    train_on_ranks(uninterrupted)
    train_on_ranks(copy)
    losses = read_metrics(uninterrupted.checkpoint.save)
    assert read_metrics(copy.checkpoint.save) == {k: v for k, v in losses.items() if k > STOP}


if __name__ == "__main__":
    load_and_save(parse_command_line(sys.argv[1:], world_size=1).settings)
