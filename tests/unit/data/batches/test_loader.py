"""The loaders: torch's with worker processes, and DALI's, which needs the package but no GPU."""

import gc
import multiprocessing
import subprocess
import time
import weakref
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from unit.data.child_processes import has_ended, wait_for
from unit.data.corpus.memory_corpus import MemoryCorpus, contents, stream_of, web_like_lengths

from megatron_neobert.data.batches.batch import BatchStream
from megatron_neobert.data.batches.loader import build_dali_loader, build_loader, named_worker_deaths
from megatron_neobert.data.batches.windows import Cursor
from megatron_neobert.errors import CheckpointError, WorkerError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def stream() -> BatchStream:
    return stream_of(MemoryCorpus(web_like_lengths(300)), seq_length=256)


@pytest.fixture(params=["torch", "dali"])
def load(request):
    if request.param == "torch":
        return build_loader
    return lambda stream, *, num_workers: build_dali_loader(stream, num_workers=num_workers, device=CPU)


def start(load, stream, *, num_workers=1):
    """Load one step, and return the iterator of steps, this step, and the worker processes."""
    before = multiprocessing.active_children()
    steps = iter(load(stream, num_workers=num_workers))
    first = next(steps)
    return steps, first, set(multiprocessing.active_children()) - set(before)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_steps_equal_those_of_the_stream_and_stay_valid_while_more_are_loaded(load, stream, num_workers):
    expected = contents(islice(stream.rank_batches(), 25))
    assert len({len(labels) for _, batches in expected for _, (_, _, labels), *_ in batches}) > 1  # shapes vary
    assert contents(list(islice(load(stream, num_workers=num_workers), 25))) == expected


def test_a_loader_resumes_at_the_last_step_that_was_taken_not_at_what_workers_prepared(load, stream):
    taken = list(islice(load(stream, num_workers=2), 4))
    resumed = replace(stream, cursor=taken[-1].cursor_after)
    actual = contents([*taken, *islice(load(resumed, num_workers=2), 5)])
    assert actual == contents(islice(stream.rank_batches(), 9))


def test_an_error_in_a_worker_keeps_its_class_and_message(load, stream):
    beyond = replace(stream, cursor=Cursor(0, 0, 9999))
    with pytest.raises(CheckpointError, match=r"^the checkpoint continues at packed sequence 9,999 of .* new run\.$"):
        next(load(beyond, num_workers=1))


def test_unused_pipeline_is_collected_before_workers_are_forked(load, stream):
    """In a worker, the end of DALI's pipeline would wait for threads that only the parent has."""

    class Cycle:
        def __init__(self) -> None:
            self.itself, self.steps = self, load(stream, num_workers=0)

    cycle = Cycle()
    next(cycle.steps)
    unused = weakref.ref(cycle)
    gc.disable()
    try:
        del cycle
        assert unused() is not None, "control: only a collection ends a cycle"
        batches = build_loader(stream, num_workers=1)
        assert unused() is None
    finally:
        gc.enable()
    assert contents([next(batches)]) == contents(islice(stream.rank_batches(), 1))


def test_batches_from_workers_hold_no_file_descriptors(stream):
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    steps = build_loader(stream, num_workers=1)
    kept = [next(steps)]
    before = open_files()
    kept += list(islice(steps, 20))  # torch's default would need 4 for each of 80 micro-batches
    assert open_files() - before < 4
    assert len(kept) == 21


@pytest.mark.parametrize("stop_signal", ["TERM", "INT", "USR1", "USR2"])
def test_a_worker_survives_the_stop_signal_of_its_job_and_ends_with_its_loader(stream, stop_signal):
    """The trainer needs its workers until it has finished its step and saved; only the trainer may end them."""
    steps, first, (worker,) = start(build_loader, stream)
    subprocess.run(["kill", f"-{stop_signal}", str(worker.pid)], check=True)
    loaded = [first, *islice(steps, 9)]
    assert worker.is_alive()
    assert contents(loaded) == contents(islice(stream.rank_batches(), 10))
    worker.terminate()  # as DataLoader ends a worker that does not answer
    worker.join(timeout=600)
    assert worker.exitcode == 0


def test_workers_of_a_loader_that_is_not_needed_any_more_end_by_themselves(load, stream, monkeypatch):
    """DataLoader terminates a worker that has not ended within five seconds."""
    terminated = []
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "terminate", terminated.append)
    steps, _, workers = start(load, stream, num_workers=2)
    del steps
    gc.collect()
    assert len(workers) == 2
    assert not terminated
    assert [worker.exitcode for worker in workers] == [0, 0]


@pytest.mark.parametrize("moment", ["waiting for a batch", "computing"])
def test_the_error_after_a_killed_worker_has_the_reason_and_a_remedy(load, stream, moment):
    steps, _, (worker,) = start(load, stream)
    message = r"was killed or crashed \(RuntimeError: DataLoader worker .*lower --num-workers"
    with pytest.raises(WorkerError, match=message), named_worker_deaths():
        worker.kill()
        if moment == "computing":
            time.sleep(600)
        for _ in steps:
            pass


def test_workers_end_when_their_trainer_is_killed(stream):
    pids, to_test = multiprocessing.Pipe(duplex=False)

    def train() -> None:
        started = start(build_loader, stream, num_workers=2)
        to_test.send([worker.pid for worker in started[2]])
        time.sleep(60)

    trainer = multiprocessing.get_context("fork").Process(target=train)
    trainer.start()
    workers = pids.recv()
    trainer.kill()
    trainer.join()
    wait_for(lambda: all(has_ended(worker) for worker in workers), seconds=600)  # workers check once a second


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_steps_of_dali_on_the_gpu_equal_those_of_the_default_loader(stream):
    device = torch.device("cuda", 0)
    loaded = list(islice(build_dali_loader(stream, num_workers=1, device=device), 25))
    expected = list(islice(build_loader(stream, num_workers=0), 25))
    moved = [replace(step, micro_batches=[batch.to(device) for batch in step.micro_batches]) for step in expected]
    assert contents(loaded) == contents(moved)
