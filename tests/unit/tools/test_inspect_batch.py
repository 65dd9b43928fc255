"""`neobert inspect batch`, as a user starts it."""

from dataclasses import asdict

import pytest
from commands import call
from unit.inspection.small_runs import settings_of, write_checkpoint, write_corpora

from megatron_neobert.config.cli import write_record
from megatron_neobert.inspection.global_batch import rebuild_batch


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with corpora, settings.yaml, and the checkpoint of iteration 4 in run/."""
    folder = write_corpora(tmp_path_factory.mktemp("inspect_batch"))
    settings = settings_of(folder)
    write_record(settings, folder / "settings.yaml")
    cursor = asdict(rebuild_batch(settings, 5, checkpoint=None).cursor)
    write_checkpoint(folder / "run", settings, iteration=4, cursor=cursor)
    return folder


def inspect(*arguments):
    """Run the command and return its output."""
    code, printed, errors = call("inspect batch", *arguments)
    assert (code, errors) == (0, "")
    return printed


def test_a_batch_is_the_same_from_a_checkpoint_and_from_the_start_for_any_layout(place):
    config = ("--config", place / "settings.yaml", "--iteration", 6, "--rows", 8)
    layout = ("--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2)
    printed = inspect("--load", place / "run", *config[2:])
    assert printed == inspect(*config) == inspect(*config, "--load", place / "run") == inspect(*config, *layout)
    assert printed != inspect("--load", place / "run", *config[2:], "--seed", 1)


def test_an_iteration_after_the_end_of_the_run_is_refused(place):
    ended, _, errors = call("inspect batch", "--load", place / "run", "--iteration", "101")
    assert ended == 2 and "--iteration 101 is after the last iteration of this run, 100" in errors
