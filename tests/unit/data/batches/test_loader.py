import multiprocessing
import subprocess
import time
from itertools import islice
from pathlib import Path

import pytest
import torch
from unit.data.corpus.memory_corpus import MemoryCorpus, batch_settings, web_like_lengths

from megatron_neobert.data.batches.loader import build_loader
from megatron_neobert.data.batches.stream import BatchStream, Cursor, Source, StepBatches
from megatron_neobert.data.corpus.reader import KeptDocuments
from megatron_neobert.errors import CheckpointError


@pytest.fixture(scope="module")
def stream() -> BatchStream:
    return BatchStream((Source(MemoryCorpus(web_like_lengths(300)), range(300)),), batch_settings(seq_length=256))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def contents(steps: list[StepBatches]) -> list:
    return [
        [step.cursor_after]
        + [
            value.tolist() if isinstance(value, torch.Tensor) else value
            for batch in step.micro_batches
            for value in vars(batch).values()
        ]
        for step in steps
    ]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_read_a_blend_in_blocks_like_the_trainer_itself(num_workers):
    corpora = [MemoryCorpus(web_like_lengths(200 + 50 * n, seed=n), seed=n) for n in range(2)]
    kept = KeptDocuments(corpora[1], range(250), minimum=300, maximum=None)
    sources = (Source(corpora[0], range(200), 1), Source(corpora[1], range(250), 2), Source(corpora[1], kept, 2))
    blend = BatchStream(sources, batch_settings(seq_length=256, document_block_size=16, fixed_shapes=True))
    loaded = list(islice(build_loader(blend, num_workers=num_workers), 9))
    assert contents(loaded) == contents(list(islice(blend.steps(), 9)))
    resumed = BatchStream(blend.sources, blend.settings, cursor=loaded[3].cursor_after)
    assert contents(list(islice(build_loader(resumed, num_workers=num_workers), 5))) == contents(loaded[4:])


def test_the_cursor_of_the_last_step_taken_continues_a_loader_whose_workers_ran_ahead(stream):
    taken = list(islice(build_loader(stream, num_workers=2), 3))
    resumed = BatchStream(stream.sources, stream.settings, cursor=taken[-1].cursor_after)
    assert contents(list(islice(build_loader(resumed, num_workers=2), 3))) == contents(
        list(islice(stream.steps(), 3, 6))
    )


def test_workers_run_beside_torch_distributed_on_gloo(stream, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        total = torch.zeros(1)
        for step in islice(build_loader(stream, num_workers=2), 4):
            real_tokens = torch.tensor([float(step.real_tokens)])
            torch.distributed.all_reduce(real_tokens)  # collective: the only rank
            total += real_tokens
    finally:
        torch.distributed.destroy_process_group()
    assert total.item() == sum(step.real_tokens for step in islice(stream.steps(), 4))


def test_batches_from_workers_hold_no_file_descriptors(stream):
    steps = iter(build_loader(stream, num_workers=1))
    kept = [next(steps)]
    before = open_files()
    kept += list(islice(steps, 20))  # torch's way would hold 4 for each of 20 steps of 4 micro-batches
    assert open_files() - before < 4
    assert len(kept) == 21


@pytest.mark.parametrize("stop_signal", ["TERM", "INT", "USR1", "USR2"])
def test_a_worker_survives_the_stop_signal_of_its_job_and_ends_with_its_loader(stream, stop_signal):
    """The trainer still has to finish its step and save; only it may end the worker."""
    before = multiprocessing.active_children()
    steps = iter(build_loader(stream, num_workers=1))
    loaded = [next(steps)]
    (worker,) = set(multiprocessing.active_children()) - set(before)
    subprocess.run(["kill", f"-{stop_signal}", str(worker.pid)], check=True)
    loaded += list(islice(steps, 9))
    assert worker.is_alive()
    assert contents(loaded) == contents(list(islice(stream.steps(), 10)))
    worker.terminate()  # what DataLoader does to a worker that does not answer
    worker.join(timeout=600)
    assert worker.exitcode == 0


def test_workers_end_when_their_trainer_is_killed(stream):
    pids, to_test = multiprocessing.Pipe(duplex=False)

    def train() -> None:
        steps = iter(build_loader(stream, num_workers=2))
        next(steps)
        to_test.send([worker.pid for worker in multiprocessing.active_children()])
        time.sleep(60)

    trainer = multiprocessing.get_context("fork").Process(target=train)
    trainer.start()
    workers = pids.recv()
    trainer.kill()
    trainer.join()
    deadline = time.monotonic() + 600  # they look once a second
    while any(is_running(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [worker for worker in workers if is_running(worker)] == []


def is_running(pid: int) -> bool:
    """Whether the process exists and is more than an exit code that nobody has asked for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_an_error_in_a_worker_keeps_its_class_and_its_sentence(stream):
    other = BatchStream(stream.sources, stream.settings, cursor=Cursor(0, 0, 9999))
    with pytest.raises(CheckpointError, match=r"^the checkpoint continues at row 9,999 of window 0, .* new run\.$"):
        next(iter(build_loader(other, num_workers=1)))
