"""The folder of an unfinished run: what is taken over, what is refused, and who may work there at a time."""

import pytest

from megatron_neobert.data.preprocessing.job import JobFolder
from megatron_neobert.errors import ConfigError, OutputError

SETTINGS = {"tokenizer": "abc", "min_tokens": 0}


def begin(folder, settings=SETTINGS, *, resume=False, overwrite=False, task=None, finish=()):
    """One run that finishes some parts and is then killed, or refused; returns the finished parts it began with."""
    with JobFolder(folder, task=task) as job:
        job.begin(settings, resume=resume, overwrite=overwrite)
        taken_over = {file.stem for file in folder.glob("*.done")}
        for name in finish:
            (folder / f"{name}.ids").write_text("ids")
            (folder / f"{name}.done").write_text("{}")
        return taken_over


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "below" / "run.partial"


def test_finished_parts_are_neither_used_nor_lost_unasked(folder):
    begin(folder, finish=["a"])
    with pytest.raises(
        OutputError, match=r"holds 1 finished parts of an earlier run; continue with --resume, or .*--overwr"
    ):
        begin(folder)
    assert (folder / "a.ids").exists()


@pytest.mark.parametrize("resume", [True, False])
def test_parts_of_other_settings_are_refused_with_both_values(folder, resume):
    begin(folder, finish=["a"])
    with pytest.raises(ConfigError, match=r"a run with min_tokens 0 where this one has 5; .*--overwrite"):
        begin(folder, {**SETTINGS, "min_tokens": 5}, resume=resume)
    assert begin(folder, {**SETTINGS, "min_tokens": 5}, resume=resume, overwrite=True) == set()


def test_folder_without_a_finished_part_does_not_outlive_its_run(folder):
    begin(folder)
    assert not folder.exists()


def test_copy_of_standard_input_survives_a_run_that_finishes_nothing(folder):
    folder.mkdir(parents=True)
    (folder / "standard_input").write_text("text")
    begin(folder)
    assert (folder / "standard_input").read_text() == "text"


def test_folder_has_one_run_at_a_time(folder):
    with JobFolder(folder):
        with pytest.raises(OutputError, match=r"run\.partial belongs to a run that is still going"):
            begin(folder)
        with pytest.raises(OutputError, match="belongs to a run that is still going"):
            begin(folder, task=0)


def test_tasks_of_an_array_share_the_folder_but_not_their_number(folder):
    with JobFolder(folder, task=0) as first:
        first.begin(SETTINGS, resume=False, overwrite=False)
        assert begin(folder, task=1, finish=["b"]) == set()
        with pytest.raises(OutputError, match="belongs to a run with --shard-index 0 that is still going"):
            begin(folder, task=0)
        with pytest.raises(OutputError, match="belongs to a run that is still going"):
            begin(folder)
    assert begin(folder, resume=True) == {"b"}


def test_task_of_an_array_never_clears_what_others_have_done(folder):
    begin(folder, task=1, finish=["b"])
    assert begin(folder, task=0) == {"b"}
    assert begin(folder, task=0, overwrite=True) == {"b"}
    with pytest.raises(ConfigError, match=r"min_tokens 0 where this one has 5; .* delete run\.partial"):
        begin(folder, {**SETTINGS, "min_tokens": 5}, task=0, overwrite=True)


@pytest.mark.parametrize(("earlier", "now"), [({}, {"new": None}), ({"old": None}, {})])
def test_folder_of_a_version_with_other_settings_is_refused(folder, earlier, now):
    begin(folder, {**SETTINGS, **earlier}, finish=["b"])
    with pytest.raises(ConfigError, match=r"a run with (new unknown where this one has None|old None .* has unknown);"):
        begin(folder, {**SETTINGS, **now}, resume=True)


def test_folder_that_cannot_be_made_is_an_output_error(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(OutputError, match=r"run\.partial: cannot be created \(Not a directory\)"),
        JobFolder(tmp_path / "file" / "run.partial"),
    ):
        pass
