"""Fine-tunings one after the other, or in several processes, each with one GPU where there are any.

transformers' Trainer would spread one run over every GPU it sees and multiply its batch; a process therefore sees one.
"""

import multiprocessing
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent import futures
from concurrent.futures import Executor, ProcessPoolExecutor
from itertools import islice
from multiprocessing.connection import wait
from multiprocessing.queues import Queue

import torch

from megatron_neobert.errors import EXIT_UNAVAILABLE, print_warnings_as_sentences, short_reason
from megatron_neobert.evaluation.glue.training import Outcome, Run, fine_tune


def run_all(runs: Sequence[Run], *, jobs: int) -> Iterator[tuple[Run, Outcome]]:
    """Every run with its outcome, as they finish.

    Where one fails, a warning says so and nothing new is started; what is going on is finished and given before the
    error is raised.
    """
    devices = visible_gpus()
    if jobs == 1:
        _prepare_process(devices[:1])
        for run in runs:
            yield run, fine_tune(run)
        return
    context = multiprocessing.get_context("spawn")  # CUDA and tokenizers do not survive a fork
    shares = context.Queue()
    for number in range(jobs):
        shares.put(devices[number % len(devices) :][:1] if devices else [])
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_worker, initargs=(shares,))
    try:
        yield from share_out(runs, pool, jobs)
    except BaseException:  # Ctrl-C: what is going on is not waited for
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def share_out(runs: Sequence[Run], pool: Executor, jobs: int) -> Iterator[tuple[Run, Outcome]]:
    """Of runs in a pool of `jobs` workers, as `run_all`."""
    waiting = iter(runs)
    going = {pool.submit(fine_tune, run): run for run in islice(waiting, jobs)}  # no queue: it could not be taken back
    failure: BaseException | None = None
    while going:
        for future in futures.wait(going, return_when=futures.FIRST_COMPLETED).done:
            run = going.pop(future)
            error = future.exception()
            if error is not None:
                warnings.warn(_describe_failure(run, error, still_going=len(going)), stacklevel=2)
            failure = failure or error
            if failure is None:
                going |= {pool.submit(fine_tune, following): following for following in islice(waiting, 1)}
            if error is None:
                yield run, future.result()
    if failure is not None:
        raise failure


def _describe_failure(run: Run, error: BaseException, *, still_going: int) -> str:
    reason = short_reason(error)
    wait_for = f", and the {still_going} going on are waited for" if still_going else ""
    return f"{run.task} {run.point.name} failed ({reason}); no other run is started{wait_for}."


def visible_gpus() -> list[str]:
    """The names of this process's GPUs, as CUDA_VISIBLE_DEVICES takes them; does not start CUDA."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ([str(number) for number in range(count)] if named is None else named.split(","))[:count]


def _start_worker(shares: "Queue[list[str]]") -> None:
    print_warnings_as_sentences()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _prepare_process(shares.get())


def _end_with_parent() -> None:
    """Otherwise the workers of a command that was killed would go on beside those of the one that follows it."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only workers call this"
    wait([parent.sentinel])
    os._exit(EXIT_UNAVAILABLE)


def _prepare_process(devices: list[str]) -> None:
    """Before CUDA is used: which GPU."""
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[0]
