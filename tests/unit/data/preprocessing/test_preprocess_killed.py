"""A preprocessing run of which some process is killed: it neither hangs nor leaves half a corpus."""

import json
import os
import random
import re
import resource
import signal
import subprocess
import time
from functools import partial

import numpy as np
import pytest
from commands import ENVIRONMENT, command_line
from unit.data.child_processes import children_of, has_ended, needs_proc, wait_for
from unit.data.command_place import LETTERS, arguments_of, corpus_bytes, make_place


@pytest.fixture
def place(tmp_path):
    return make_place(tmp_path, LETTERS)


def start(place, *more, **options):
    slow_enough = ("--tokenizer-backend", "reference")  # to be caught in the act
    return subprocess.Popen(
        command_line("preprocess", *arguments_of(place, *slow_enough, *more)),
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


def finish(place, *more):
    process = start(place, *more)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors


def large_shards(place, *, shards, megabytes):
    """Shards that take some seconds to tokenize: 4 MB per second and core."""
    generator = np.random.default_rng(0)
    for number in range(shards):
        text = generator.integers(97, 123, (int(megabytes * 1e6) // 5000, 5000), dtype=np.uint8)
        text[:, ::6] = ord(" ")
        with (place / "shards" / f"large{number}.jsonl").open("w") as stream:
            stream.writelines(json.dumps({"content": bytes(row).decode()}) + "\n" for row in text)


@needs_proc
def test_killed_worker_ends_the_run_with_74_and_leaves_nothing(place):
    large_shards(place, shards=3, megabytes=8)
    before = sorted(place.iterdir())
    process = start(place, "--workers", "2")
    workers = wait_for(lambda: len(found := children_of(process.pid)) == 2 and found)
    wait_for(lambda: list(place.glob("run_content_document.partial/*.ids*")))
    os.kill(workers[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 74
    assert f"worker process {workers[0]} was killed by SIGKILL at {place / 'shards'}" in errors
    assert sorted(place.iterdir()) == before
    assert all(has_ended(worker) for worker in workers)


@needs_proc
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_killed_run_leaves_nothing_under_final_names_and_is_resumed_to_the_same_bytes(place, workers):
    large_shards(place, shards=2, megabytes=1.2)
    process = start(place, "--workers", workers)
    wait_for(lambda: any(file.stat().st_size for file in place.glob("run_content_document.partial/*.ids*")))
    children = children_of(process.pid)
    process.kill()
    process.wait()
    process.communicate()
    assert len(children) == (workers if workers > 1 else 0)
    assert [file.name for file in place.glob("run*")] == ["run_content_document.partial"]
    wait_for(lambda: all(has_ended(child) for child in children))
    finish(place, "--resume")
    finish(place, "--output-prefix", place / "fresh")
    assert not list(place.glob("*.partial"))
    assert corpus_bytes(place) == corpus_bytes(place, "fresh")


@needs_proc
@pytest.mark.parametrize("moment", ["workers start", "workers work"])
def test_interrupted_run_leaves_nothing_and_ends_with_130(place, moment):
    large_shards(place, shards=2, megabytes=4)
    before = sorted(place.iterdir())
    process = start(place, "--workers", "2")
    begun = {
        "workers start": lambda: children_of(process.pid),
        "workers work": lambda: len(list(place.glob("run_content_document.partial/*.ids*"))) == 2,
    }[moment]
    wait_for(begun)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does: to the workers too
    _, errors = process.communicate(timeout=600)
    assert (process.returncode, "Traceback" in errors) == (130, False)
    assert sorted(place.iterdir()) == before


def all_bytes(place, name):
    """Of all files of a corpus, by what follows its name."""
    return {file.name.removeprefix(name): file.read_bytes() for file in place.glob(f"{name}_*")}


JOIN = ("--workers", 2, "--shard-size", 1, "--split-validation", "0.05")


@needs_proc
@pytest.mark.parametrize("moment", ["output-*", "output-*/*.done"])  # the join begins; one is finished
def test_run_killed_while_it_joins_is_resumed_to_the_same_bytes(place, moment):
    large_shards(place, shards=40, megabytes=0.05)
    process = start(place, *JOIN)
    wait_for(lambda: list(place.glob(f"run_content_document.partial/{moment}")))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not list(place.glob("run_content_document*.json")), "it is over"
    assert len(list(place.glob("run_content_document.partial/*.done"))) == 40
    finish(place, "--resume", *JOIN)
    finish(place, "--output-prefix", place / "fresh", *JOIN)
    assert not list(place.glob("*.partial"))
    assert all_bytes(place, "run") == all_bytes(place, "fresh")
    assert len(all_bytes(place, "run")) == 40 * 2 + 1 + 3


@needs_proc
def test_worker_killed_while_it_joins_ends_the_run_with_74_and_chunks_are_kept(place):
    large_shards(place, shards=40, megabytes=0.05)
    process = start(place, *JOIN)
    wait_for(lambda: list(place.glob("run_content_document.partial/output-*")))
    workers = wait_for(lambda: children_of(process.pid))
    os.kill(workers[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 74, errors
    assert f"worker process {workers[0]} was killed by SIGKILL at corpus shard " in errors
    assert "40 finished chunks are kept" in errors


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("number", range(int(os.environ.get("KILLS", "3"))))
def test_run_killed_at_any_moment_and_resumed_ends_with_the_same_bytes(place, number):
    """More moments: KILLS=20 python -m pytest tests/unit/data/preprocessing/test_preprocess_killed.py -k any_moment."""
    large_shards(place, shards=8, megabytes=0.5)
    more = ("--workers", 2, "--deduplicate", "exact", "--split-validation", "0.05", "--shard-size", 1)
    started = time.monotonic()
    finish(place, "--output-prefix", place / "whole", *more)
    whole_run = time.monotonic() - started
    moment = random.Random(number)
    for _ in range(2):
        process = start(place, "--resume", *more)
        time.sleep(moment.uniform(0.1, 1.05) * whole_run)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    finish(place, "--resume", *more)
    assert all_bytes(place, "run") == all_bytes(place, "whole")
    assert len(all_bytes(place, "run")) == 8 * 2 + 1 + 3


@needs_proc
@pytest.mark.parametrize(
    ("workers", "number"),
    [
        pytest.param(1, signal.SIGUSR1, marks=pytest.mark.slow),
        (2, signal.SIGTERM),
        pytest.param(2, signal.SIGUSR1, marks=pytest.mark.slow),
    ],
)
def test_run_told_to_stop_ends_with_75_keeps_finished_chunks_and_is_resumed(place, workers, number):
    large_shards(place, shards=3, megabytes=1.5)
    process = start(place, "--workers", workers)
    wait_for(lambda: list(place.glob("run_content_document.partial/*.done")))
    os.killpg(process.pid, number)  # as a scheduler does: to the workers too
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 75, errors
    assert re.match(f"stopped by {number.name}: [12] finished chunks are kept in ", errors)
    finish(place, "--resume")
    finish(place, "--output-prefix", place / "fresh")
    assert corpus_bytes(place) == corpus_bytes(place, "fresh")


def test_full_disk_ends_the_run_with_74_and_the_rest_is_done_when_there_is_room(place):
    """A bound on the size of files fails like a full disk, at a write in the middle of a part."""
    large_shards(place, shards=2, megabytes=1.2)
    shard = place / "shards" / "large1.jsonl"
    shard.write_text(shard.read_text() * 2)
    file_bytes = 3000 << 10  # more than the first part's ids, less than the second's
    process = start(place, preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (file_bytes, file_bytes)))
    _, errors = process.communicate(timeout=600)
    assert (process.returncode, "Traceback" in errors) == (74, False)
    assert "File too large" in errors
    assert "1 finished chunks are kept" in errors
    assert not list(place.glob("run_content_document.*[!l]"))
    finish(place, "--resume")
