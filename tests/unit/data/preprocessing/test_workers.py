"""Worker processes that can neither hang their parent nor outlive it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from unit.data.child_processes import children_of, has_ended, needs_proc, wait_for

from megatron_neobert.data.preprocessing.workers import Workers
from megatron_neobert.errors import DataError


def square(task, report):
    report(("seen", task))
    return task * task


def leave_at_three(task, report):
    if task == 3:
        os._exit(7)
    return task


def fail(task, report):
    errors = {
        "data": DataError("shard 3 is damaged"),
        "disk": OSError(28, "No space left on device"),
        "package": ModuleNotFoundError("No module named 'fastwarc'", name="fastwarc"),  # run_command names the extra
    }
    raise errors.get(task) or KeyError(task)


def report_for_ever(task, report):
    Path(task).write_text(str(os.getpid()))
    while True:
        report("alive")
        time.sleep(0.05)


def prepared_in_the_environment():
    os.environ["PREPARED"] = "yes"


def was_prepared(task, report):
    return os.environ.get("PREPARED")


def run_in_workers(function, tasks, *, workers, on_report, prepare=None):
    yield from Workers(function, count=workers, prepare=prepare).run(tasks, on_report=on_report)


@pytest.mark.parametrize("workers", [1, 6])  # 6: more than tasks
def test_every_task_is_done_once_and_every_report_arrives(workers):
    reports = []
    results = list(run_in_workers(square, range(5), workers=workers, on_report=reports.append))
    assert sorted(results) == [0, 1, 4, 9, 16]
    assert sorted(reports) == [("seen", task) for task in range(5)]


def test_worker_that_ends_by_itself_ends_the_run_with_its_task():
    """One that is killed, or interrupted: test_preprocess_killed.py."""
    with pytest.raises(ChildProcessError, match=r"worker process \d+ ended with exit code 7 at 3; .*fewer --workers"):
        list(run_in_workers(leave_at_three, range(6), workers=2, on_report=print))


@pytest.mark.parametrize(
    ("task", "kind", "message"),
    [
        ("data", DataError, "shard 3 is damaged"),
        ("disk", OSError, "No space left"),
        ("package", ModuleNotFoundError, "fastwarc"),
        ("bug", RuntimeError, r"in a worker process:\n.*raise .*KeyError: 'bug'"),
    ],
)
def test_error_of_a_task_arrives_as_what_it_was(task, kind, message):
    with pytest.raises(kind, match=f"(?s){message}") as caught:
        list(run_in_workers(fail, [task], workers=1, on_report=print))
    assert getattr(caught.value, "errno", None) == (28 if task == "disk" else None)
    assert getattr(caught.value, "name", None) == ("fastwarc" if task == "package" else None)


def test_every_worker_prepares_itself_before_its_first_task():
    prepared = run_in_workers(was_prepared, range(4), workers=2, on_report=print, prepare=prepared_in_the_environment)
    assert list(prepared) == ["yes"] * 4
    assert list(run_in_workers(was_prepared, range(2), workers=2, on_report=print)) == [None] * 2


@needs_proc
@pytest.mark.parametrize("end", ["run without a task", "run that is closed", "close"])
def test_workers_end_whether_they_had_a_task_or_not(end):
    before = set(children_of(os.getpid()))
    workers = Workers(square, count=3)
    started = wait_for(lambda: len(found := set(children_of(os.getpid())) - before) == 3 and found)
    if end == "run without a task":
        assert list(workers.run([], on_report=print)) == []
    elif end == "run that is closed":
        results = workers.run(range(9), on_report=print)
        assert next(results) in range(0, 81)
        results.close()
    else:
        workers.close()
    assert all(has_ended(worker) for worker in started)


@needs_proc
def test_worker_ends_when_its_parent_is_killed(tmp_path):
    script = (
        "import test_workers\n"
        f"task = {str(tmp_path / 'pid')!r}\n"
        "list(test_workers.run_in_workers(test_workers.report_for_ever, [task], workers=1, on_report=id))"
    )
    path = os.pathsep.join(str(Path(__file__).parents[level]) for level in (0, 3, 4))
    parent = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path})
    try:
        wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        worker = int((tmp_path / "pid").read_text())
        assert not has_ended(worker)
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: has_ended(worker))
