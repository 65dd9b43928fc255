"""A preprocessing run whose processes are killed or interrupted does not hang and leaves no incomplete corpus."""

import json
import os
import re
import resource
import signal
import subprocess
from functools import partial

import numpy as np
import pytest
from commands import ENVIRONMENT, command_line
from unit.data.child_processes import children_of, has_ended, wait_for
from unit.data.preprocess_workspace import LETTERS, Workspace, arguments_of


@pytest.fixture
def folder(tmp_path):
    return Workspace(tmp_path, LETTERS).folder


def start(folder, *more, **options):
    slow_backend = ("--tokenizer-backend", "reference")  # leaves time for the signal
    return subprocess.Popen(
        command_line("preprocess", *arguments_of(folder, *slow_backend, *more)),
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


def finish(folder, *more):
    process = start(folder, *more)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors


def large_inputs(folder, *, files, megabytes):
    """Add input files that take seconds to tokenize, at 4 MB per second and core."""
    generator = np.random.default_rng(0)
    for number in range(files):
        text = generator.integers(97, 123, (int(megabytes * 1e6) // 5000, 5000), dtype=np.uint8)
        text[:, ::6] = ord(" ")
        with (folder / "inputs" / f"large{number}.jsonl").open("w") as stream:
            stream.writelines(json.dumps({"content": bytes(row).decode()}) + "\n" for row in text)


def kill_a_worker(process, workers):
    os.kill(workers[0], signal.SIGKILL)


def interrupt(process, workers):
    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C also interrupts the workers


@pytest.mark.parametrize(
    ("moment", "action", "exit_code", "message"),
    [
        ("workers work", kill_a_worker, 74, "a worker process died at {folder}/inputs"),
        ("workers start", interrupt, 130, ""),
        ("workers work", interrupt, 130, ""),
    ],
)
def test_run_ends_without_files_or_workers_when_a_worker_is_killed_or_it_is_interrupted(
    folder, moment, action, exit_code, message
):
    large_inputs(folder, files=3, megabytes=8)
    before = sorted(folder.iterdir())
    process = start(folder, "--workers", "2")
    if moment == "workers work":
        wait_for(lambda: len(list(folder.glob("run_content_document.partial/*.ids*"))) == 2)
    workers = wait_for(lambda: children_of(process.pid))
    action(process, workers)
    _, errors = process.communicate(timeout=600)
    assert (process.returncode, "Traceback" in errors) == (exit_code, False), errors
    assert message.format(folder=folder) in errors
    assert sorted(folder.iterdir()) == before
    assert all(has_ended(worker) for worker in workers)


def all_bytes(folder, name):
    """Return the content of all files of a corpus, by the end of the file name."""
    return {file.name.removeprefix(name): file.read_bytes() for file in folder.glob(f"{name}_*")}


MANY_SHARDS = ("--workers", 2, "--shard-size", 1)


def test_run_that_is_killed_again_and_again_leaves_no_corpus_and_no_worker_and_is_resumed_to_the_same_bytes(folder):
    large_inputs(folder, files=40, megabytes=0.05)
    for moment in ("*.ids*", "output", "output/*.idx"):
        process = start(folder, "--resume", *MANY_SHARDS)
        wait_for(lambda moment=moment: list(folder.glob(f"run_content_document.partial/{moment}")))
        workers = children_of(process.pid)
        process.kill()
        process.communicate()
        assert not list(folder.glob("run_content_document*.json")), "the run had ended"
        assert len(workers) == 2 or moment != "*.ids*"
        wait_for(lambda workers=workers: all(has_ended(worker) for worker in workers))
    finish(folder, "--resume", *MANY_SHARDS)
    finish(folder, "--output-prefix", folder / "fresh", *MANY_SHARDS)
    assert not list(folder.glob("*.partial"))
    assert all_bytes(folder, "run") == all_bytes(folder, "fresh")
    assert len(all_bytes(folder, "run")) == 40 * 2 + 1


@pytest.mark.parametrize(
    ("workers", "number"), [(2, signal.SIGTERM), pytest.param(1, signal.SIGUSR1, marks=pytest.mark.slow)]
)
def test_stop_signal_ends_the_run_with_75_and_finished_chunks_are_resumed(folder, workers, number):
    large_inputs(folder, files=3, megabytes=1.5)
    process = start(folder, "--workers", workers)
    wait_for(lambda: list(folder.glob("run_content_document.partial/*.done")))
    os.killpg(process.pid, number)  # schedulers also signal the workers
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 75, errors
    assert re.match(f"stopped by {number.name}: [12] finished chunks? in ", errors)
    finish(folder, "--resume")
    finish(folder, "--output-prefix", folder / "fresh")
    assert all_bytes(folder, "run") == all_bytes(folder, "fresh")


def test_full_disk_ends_the_run_with_74_and_the_run_is_resumed_when_there_is_room(folder):
    """A limit on the size of files fails like a full disk, in the middle of a chunk."""
    large_inputs(folder, files=2, megabytes=1.2)
    shard = folder / "inputs" / "large1.jsonl"
    shard.write_text(shard.read_text() * 2)
    file_bytes = 3000 << 10  # more than the ids of the first chunk, less than those of the second
    process = start(folder, preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (file_bytes, file_bytes)))
    _, errors = process.communicate(timeout=600)
    assert (process.returncode, "Traceback" in errors) == (74, False)
    assert "File too large" in errors
    assert "1 finished chunk in " in errors
    assert not list(folder.glob("run_content_document.*[!l]"))
    finish(folder, "--resume")
