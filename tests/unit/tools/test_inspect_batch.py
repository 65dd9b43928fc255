"""`neobert inspect batch` as a user calls it."""

import shutil
from dataclasses import asdict

import pytest
from commands import call
from unit.inspection.batch_places import settings_of, write_checkpoint, write_place

from megatron_neobert.config.cli import write_record
from megatron_neobert.inspection.found_batch import find_batch


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with a corpus, settings.yaml, and in run/ the checkpoint of iteration 4."""
    folder = write_place(tmp_path_factory.mktemp("inspect_batch"))
    settings = settings_of(folder)
    write_record(settings, folder / "settings.yaml")
    cursor = asdict(find_batch(settings, 5, place=None).cursor)
    write_checkpoint(folder / "run", settings, iteration=4, cursor=cursor)
    return folder


def inspect(*arguments):
    """Return what the command prints."""
    code, printed, errors = call("inspect batch", *arguments)
    assert (code, errors) == (0, "")
    return printed


def test_batch_is_the_same_from_a_checkpoint_and_from_the_start_for_any_layout(place):
    config = ("--config", place / "settings.yaml", "--iteration", 6, "--rows", 8)
    layout = ("--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2)
    batch = inspect("--load", place / "run", *config[2:])
    assert batch == inspect(*config) == inspect(*config, "--load", place / "run") == inspect(*config, *layout)
    assert batch != inspect("--load", place / "run", *config[2:], "--seed", 1)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--iteration", "101"], 2, "--iteration 101 is none of this run, which has 100"),
        (["--iteration", "1", "--load", "nowhere"], 66, "nowhere holds no checkpoint"),
    ],
)
def test_iteration_beyond_the_run_and_folder_without_checkpoints_are_refused(place, arguments, code, message):
    ended, _, errors = call("inspect batch", "--load", place / "run", *arguments)
    assert ended == code and message in errors


def test_control_characters_in_the_settings_of_a_checkpoint_do_not_reach_the_terminal(place, tmp_path):
    """The error quotes the setting; tests/unit/test_errors.py has the control."""
    folder = tmp_path / "run" / "iter_0000004"
    shutil.copytree(place / "run" / "iter_0000004", folder)
    (folder / "settings.yaml").write_text('model: {normalization: "\\e]0;owned\\a"}')
    code, printed, errors = call("inspect batch", "--load", tmp_path / "run", "--iteration", 6)
    assert (code, printed) == (78, "")
    assert "owned" in errors and not {"\x1b", "\x07"} & set(errors)
