"""What a launcher should have set: refused in one sentence on the rank that finds it, whichever rank that is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bad_inputs.refusals import assert_refused

from megatron_neobert.runtime.environment import is_rank_zero, local_rank, world_size

REPOSITORY = Path(__file__).resolve().parents[2]
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}

CASES = [
    ({"WORLD_SIZE": "abc"}, ["WORLD_SIZE is 'abc'", "whole number from 1 on"]),
    ({"WORLD_SIZE": ""}, ["WORLD_SIZE is ''"]),
    ({"WORLD_SIZE": "0"}, ["WORLD_SIZE is '0'"]),
    ({"WORLD_SIZE": "-2"}, ["WORLD_SIZE is '-2'"]),
    ({"WORLD_SIZE": "2.0"}, ["WORLD_SIZE is '2.0'"]),
    ({"WORLD_SIZE": "²"}, ["WORLD_SIZE is '²'"]),
    ({"WORLD_SIZE": "9" * 5000}, ["WORLD_SIZE is '999"]),
    ({"WORLD_SIZE": None}, ["RANK is '1', but WORLD_SIZE is not set"]),
    ({"RANK": None}, ["WORLD_SIZE is '2', but RANK is not set"]),
    ({"RANK": "abc"}, ["RANK is 'abc'", "whole number from 0 on"]),
    ({"RANK": "-1"}, ["RANK is '-1'"]),
    ({"RANK": "2"}, ["RANK is 2, but WORLD_SIZE is 2", "numbered 0 to 1"]),
    ({"RANK": "1000"}, ["RANK is 1000"]),
    ({"LOCAL_RANK": "gpu0"}, ["LOCAL_RANK is 'gpu0'"]),
    ({"LOCAL_RANK": ""}, ["LOCAL_RANK is ''"]),
    ({"LOCAL_RANK": "-1"}, ["LOCAL_RANK is '-1'"]),
    ({"MASTER_ADDR": None}, ["RANK is 1 of WORLD_SIZE 2, but MASTER_ADDR is not set"]),
    ({"MASTER_PORT": None, "MASTER_ADDR": ""}, ["MASTER_ADDR and MASTER_PORT are not set"]),
    ({"MASTER_PORT": "http"}, ["MASTER_PORT is 'http'"]),
    ({"MASTER_PORT": "65536"}, ["MASTER_PORT is 65536; ports end at 65535"]),
]


def set_all(monkeypatch, **changes):
    for name, value in {**dict.fromkeys(NAMES), **LAUNCHED, **changes}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)


def test_a_launched_rank_knows_its_place(monkeypatch):
    set_all(monkeypatch)
    assert (world_size(), local_rank(), is_rank_zero()) == (2, 1, False)


def test_without_a_launcher_there_is_one_rank(monkeypatch):
    set_all(monkeypatch, **dict.fromkeys(NAMES))
    assert (world_size(), local_rank(), is_rank_zero()) == (1, 0, True)


@pytest.mark.parametrize(
    ("changes", "words"),
    CASES,
    ids=[f"{name}={str(value)[:9]}" for case, _ in CASES for name, value in [next(iter(case.items()))]],
)
def test_environment_that_no_launcher_sets_is_refused(monkeypatch, changes, words):
    set_all(monkeypatch, **changes)
    assert_refused(world_size, 2, *words)


@pytest.mark.parametrize("changes", [{"WORLD_SIZE": "abc"}, {"RANK": "7"}, {"MASTER_ADDR": ""}])
def test_training_command_says_it_on_every_rank_and_ends_with_2(changes):
    clean = {name: value for name, value in os.environ.items() if name not in NAMES}
    command = [sys.executable, "-m", "megatron_neobert.pretrain", "--dry-run"]
    environment = {**clean, **LAUNCHED, **changes, "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"error on rank {environment['RANK']}: ") and ended.stderr.count("\n") == 1
