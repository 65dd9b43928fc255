"""Resumable jobs: finished jobs are recognised, a folder has one run, and workers serve all of its jobs."""

import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from unittest.mock import Mock

import pytest
from json_files import edit_json

from megatron_neobert.errors import ConfigError, DataError, OutputError
from megatron_neobert.runtime.jobs import Job, JobFolder, JobOptions, JobRunner, finish_jobs, read_finished, run_job

SETTINGS = {"tokenizer": "abc", "min_tokens": 0}


@dataclass(frozen=True)
class Square(Job[int]):
    """Write a number and its square, and return the square."""

    result_type = int
    kinds = ("number", "square")
    number: int
    version: str = "1"

    @property
    def key(self):
        return self.version

    def work(self, files):
        files["number"].write(str(self.number).encode())
        if self.number < 0:
            raise DataError(f"{self.number} is below 0")
        files["square"].write(str(self.number**2).encode())
        return self.number**2


def squares(folder, numbers):
    return [Square(folder, str(number), number) for number in numbers]


# --- finished jobs


@pytest.mark.parametrize(
    "damage",
    {
        "file changed": lambda folder: (folder / "3.square").write_text("8"),
        "file missing": lambda folder: (folder / "3.square").unlink(),
        "record truncated": lambda folder: (folder / "3.done").write_text("{"),
        "record nested": lambda folder: (folder / "3.done").write_text("[" * 100_000),
        "wrong result type": lambda folder: edit_json(folder / "3.done", result="nine"),
        "no hash": lambda folder: edit_json(folder / "3.done", files={}),
        "another key": lambda folder: edit_json(folder / "3.done", key="0"),
    }.items(),
    ids=lambda item: item[0],
)
def test_job_with_damaged_files_or_a_damaged_or_stale_record_is_not_finished(tmp_path, damage):
    (job,) = squares(tmp_path, [3])
    run_job(job)
    assert read_finished(job) is not None, "control"
    damage[1](tmp_path)
    assert read_finished(job) is None


def test_failed_job_leaves_no_files_and_no_earlier_record(tmp_path):
    (job,) = squares(tmp_path, [-3])
    (tmp_path / "-3.done").write_text("{}")
    with pytest.raises(DataError, match="-3 is below 0"):
        run_job(job)
    assert list(tmp_path.iterdir()) == []


# --- the folder of a run


def begin(folder, settings=SETTINGS, *, resume=False, overwrite=False, finish=()):
    """Begin a run, finish the jobs in `finish`, and leave the folder. Return the jobs that were finished before."""
    with JobFolder(folder) as job_folder:
        job_folder.begin(settings, resume=resume, overwrite=overwrite)
        finished_before = {file.stem for file in folder.glob("*.done")}
        for name in finish:
            (folder / f"{name}.done").write_text("{}")
        return finished_before


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "below" / "run.partial"


def test_finished_jobs_are_used_with_resume_and_removed_with_overwrite_only(folder):
    begin(folder, finish=["a"])
    with pytest.raises(OutputError, match=r"holds 1 finished jobs of an earlier run; continue with --resume, or"):
        begin(folder)
    assert begin(folder, resume=True) == {"a"}
    assert begin(folder, overwrite=True) == set()


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize(
    ("now", "difference"),
    [
        ({**SETTINGS, "min_tokens": 5}, "min_tokens 0, and this run has 5"),
        ({**SETTINGS, "new": None}, "new unknown, and this run has None"),  # a setting of a later version
        ({"tokenizer": "abc"}, "min_tokens 0, and this run has unknown"),
    ],
)
def test_finished_jobs_with_other_settings_are_refused_with_both_values(folder, resume, now, difference):
    begin(folder, finish=["a"])
    with pytest.raises(ConfigError, match=f"a run with {difference}; .*--overwrite"):
        begin(folder, now, resume=resume)
    assert begin(folder, now, resume=resume, overwrite=True) == set()


@pytest.mark.parametrize("content", ["", "[1]", "[" * 100_000])
def test_folder_with_damaged_settings_is_refused_unless_overwritten(folder, content):
    begin(folder, finish=["a"])
    (folder / "job.json").write_text(content)
    with pytest.raises(ConfigError, match="tokenizer unknown, and this run has abc"):
        begin(folder, resume=True)
    assert begin(folder, overwrite=True) == set()


def test_folder_has_one_run_at_a_time(folder):
    with JobFolder(folder), pytest.raises(OutputError, match=r"run\.partial belongs to a run that is still going"):
        begin(folder)


def test_error_of_a_full_disk_names_the_folder(folder):
    with pytest.raises(OSError, match=r"No space left on device: '.*/run\.partial'"), JobFolder(folder):
        raise OSError(28, "No space left on device")


# --- workers


def pid_of_worker(job):
    return os.getpid()


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), ValueError("I/O operation on closed file")])
def test_terminal_closed_under_the_progress_bar_does_not_end_a_run(tmp_path, monkeypatch, error):
    terminal = Mock(write=Mock(side_effect=error))
    monkeypatch.setattr(sys, "stderr", terminal)

    def work_for_a_while(job):
        time.sleep(0.6)  # the bar is drawn every half second
        return run_job(job)

    jobs = squares(tmp_path, range(2))
    assert [
        job for job, _ in finish_jobs(jobs, JobRunner(JobOptions()), label="jobs", function=work_for_a_while)
    ] == jobs
    terminal.write.assert_called()


def test_progress_bar_is_drawn_at_once_and_counts_the_sizes_of_the_jobs(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Mock())
    monkeypatch.setattr(Square, "size", property(lambda job: 10**6 * (job.number + 1)))
    monkeypatch.setattr(Square, "unit", "B")
    jobs = squares(tmp_path, range(2))
    assert run_job(jobs[0])
    with JobRunner(JobOptions()) as runner:
        assert len(list(finish_jobs(jobs, runner, label="inputs"))) == 2
    first = terminal.write.call_args_list[0].args[0]
    assert first.startswith("\rinputs:  33%") and "1.00M/3.00M" in first


def test_workers_serve_all_jobs_of_a_command(tmp_path):
    with JobRunner(JobOptions(workers=2)) as runner:
        pids = {pid for _ in range(3) for _, pid in runner.run(pid_of_worker, squares(tmp_path, range(4)))}
    assert len(pids) <= 2, "workers of each call would be three at least"
    assert os.getpid() not in pids


def fail(error, job):
    raise error


@pytest.mark.parametrize(
    "error",
    [
        ConfigError(["a", "b"]),
        OSError(28, "No space left on device"),
        ModuleNotFoundError("No module named 'fastwarc'", name="fastwarc"),
    ],
)
def test_exception_of_a_job_keeps_its_class_and_attributes(tmp_path, error):
    with pytest.raises(type(error)) as caught, JobRunner(JobOptions(workers=2)) as runner:
        list(runner.run(partial(fail, error), squares(tmp_path, range(2))))
    assert caught.value.__reduce__() == error.__reduce__()
