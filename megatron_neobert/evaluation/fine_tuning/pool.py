"""Fine-tunings one after the other, or several at a time in processes of their own, each on one GPU."""

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

from megatron_neobert.errors import EXIT_UNAVAILABLE, print_warnings_as_sentences, short_reason
from megatron_neobert.evaluation.fine_tuning.settings import visible_gpus
from megatron_neobert.evaluation.fine_tuning.trainer import Outcome, Run, fine_tune


def run_all(runs: Sequence[Run], *, jobs: int) -> Iterator[tuple[Run, Outcome]]:
    """Every run with its outcome, as they finish.

    Where one fails, a warning names it and nothing new is started; what is running is finished and given before the
    error is raised. transformers' Trainer would spread one run over every GPU it sees and multiply its batch; a process
    therefore sees one.
    """
    devices = visible_gpus()
    if jobs == 1:
        _choose_gpu(devices[:1])
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
    except BaseException:  # Ctrl-C: what is running is not waited for
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
                others = f", and the {len(going)} that are running are waited for" if going else ""
                words = f"{run.task} {run.point.name} failed ({short_reason(error)}); no other run is started{others}."
                warnings.warn(words, stacklevel=2)
            failure = failure or error
            if failure is None:
                going |= {pool.submit(fine_tune, following): following for following in islice(waiting, 1)}
            if error is None:
                yield run, future.result()
    if failure is not None:
        raise failure


def _choose_gpu(devices: list[str]) -> None:
    """Before CUDA is used: which GPU."""
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[0]


def _start_worker(shares: "Queue[list[str]]") -> None:
    """Its GPU, and its end with the command: the workers of one that was killed would run beside those of the next."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only workers call this"

    def end_with_parent() -> None:
        wait([parent.sentinel])
        os._exit(EXIT_UNAVAILABLE)

    print_warnings_as_sentences()
    threading.Thread(target=end_with_parent, daemon=True).start()
    _choose_gpu(shares.get())
