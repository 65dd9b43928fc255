"""A preprocessing run of which some process is killed: it neither hangs nor leaves half a corpus."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from child_processes import children_of, has_ended, needs_proc, wait_for
from small_corpus import write_vocabulary

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def place(tmp_path):
    (tmp_path / "shards").mkdir()
    letters = [chr(code) for code in range(97, 123)]
    write_vocabulary(tmp_path / "vocab.txt", [*letters, *(f"##{letter}" for letter in letters)])
    return tmp_path


def start(place, *more):
    arguments = (
        "--input",
        place / "shards",
        "--output-prefix",
        place / "run",
        "--tokenizer-model",
        place / "vocab.txt",
    )
    command = [sys.executable, REPOSITORY / "tools" / "preprocess_data.py", *arguments, *more]
    return subprocess.Popen(
        list(map(str, command)),
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(place, *more):
    process = start(place, *more)
    _, errors = process.communicate(timeout=120)
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
    wait_for(lambda: list(place.glob("run_content_document.partial/*.ids")))
    os.kill(workers[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 74
    assert f"worker process {workers[0]} was killed by SIGKILL at {place / 'shards'}" in errors
    assert sorted(place.iterdir()) == before
    assert all(has_ended(worker) for worker in workers)


@needs_proc
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_run_leaves_nothing_under_final_names_and_the_next_one_is_as_if_it_had_not_been(place, workers):
    large_shards(place, shards=2, megabytes=1.2)
    process = start(place, "--workers", workers)
    wait_for(lambda: any(file.stat().st_size for file in place.glob("run_content_document.partial/0*.ids")))
    children = children_of(process.pid)
    process.kill()
    process.wait()
    process.communicate()
    assert len(children) == (workers if workers > 1 else 0)
    assert [file.name for file in place.glob("run*")] == ["run_content_document.partial"]
    wait_for(lambda: all(has_ended(child) for child in children))
    finish(place)
    finish(place, "--output-prefix", place / "fresh")
    assert not list(place.glob("*.partial"))
    for end in ("bin", "idx", "json"):
        names = [place / f"{name}_content_document.{end}" for name in ("run", "fresh")]
        assert names[0].read_bytes() == names[1].read_bytes()


@needs_proc
@pytest.mark.parametrize("moment", ["workers start", "workers work"])
def test_interrupted_run_leaves_nothing_and_ends_with_130(place, moment):
    large_shards(place, shards=2, megabytes=4)
    before = sorted(place.iterdir())
    process = start(place, "--workers", "2")
    begun = {
        "workers start": lambda: children_of(process.pid),
        "workers work": lambda: len(list(place.glob("run_content_document.partial/0*.ids"))) == 2,
    }[moment]
    wait_for(begun)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does: to the workers too
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in errors) == (130, False)
    assert sorted(place.iterdir()) == before
