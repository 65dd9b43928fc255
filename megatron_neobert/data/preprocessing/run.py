"""Raw shards to one corpus: parts of shards are tokenised, by local processes or on a Ray cluster, and then joined.

The corpus, its manifest and its rejects are the same for any number of workers, executor, array of tasks and restart.
Finished parts wait in PREFIX.partial, so what a killed run has done is not done again.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial

from megatron_neobert.data.corpus.format import (
    BackendRecord,
    InputRecord,
    QuarantinedShard,
    describe_reasons,
    draft_manifest,
)
from megatron_neobert.data.corpus.joining import OutputSettings, PartFiles, write_volume_of
from megatron_neobert.data.corpus.sources import check_sources
from megatron_neobert.data.corpus.writer import WrittenCorpus, refuse_existing, write_corpus
from megatron_neobert.data.preprocessing.job import (
    Counts,
    JobFolder,
    PartProgress,
    PartResult,
    PartTask,
    check_error_rate,
    error_record,
    read_result,
)
from megatron_neobert.data.preprocessing.part_tasks import load_early, remember, tokenize_part
from megatron_neobert.data.preprocessing.plan import Plan, PreprocessSettings, part_tasks, refuse_damaged
from megatron_neobert.data.preprocessing.workers import Workers, run_tasks
from megatron_neobert.data.tokenizer.fast_backends import BackendMismatch
from megatron_neobert.errors import DataError, MissingInputError
from megatron_neobert.text import counted

_SHOW_SECONDS = 0.2  # between two looks at the progress of all parts, which cost up to 0.2 ms
_HOPELESS_AFTER_RECORDS = 10_000  # before that a share of errors says little
# Times as many errors as all of the input may have if the rest is faultless: it is an estimate, and must not be wrong.
_HOPELESS = 2.0


@dataclass
class Progress:
    """How far a run is; parts in work count as far as they have reported."""

    plan: Plan
    input_bytes: float
    on_progress: Callable[["Progress"], None]
    finished: Counts = field(default_factory=Counts)
    finished_bytes: float = 0.0  # of inputs
    taken_over_bytes: float = 0.0  # of inputs, in parts that an earlier run has finished
    joined_bytes: int = 0  # of token ids, after all parts are finished
    in_work: dict[int, PartProgress] = field(default_factory=dict)
    first_error: str | None = None
    sources: set[str] = field(default_factory=set)  # of finished parts
    _shown: float = 0.0

    @property
    def counts(self) -> Counts:
        total = Counts()
        for counts in (self.finished, *(part.counts for part in self.in_work.values())):
            total.add(counts)
        return total

    @property
    def read_bytes(self) -> float:
        """Of the inputs, in this run and in the one that it continues."""
        parts = ((self.plan.parts[number], part.fraction) for number, part in self.in_work.items())
        return self.finished_bytes + sum(fraction * self.plan.input_bytes(part) for part, fraction in parts)

    @property
    def read_share(self) -> float:
        """Share of the input bytes that has been read; 1 if the inputs are empty."""
        return self.read_bytes / self.input_bytes if self.input_bytes else 1.0

    def report(self, news: PartProgress) -> None:
        """Takes note of a part in work.

        Raises:
            DataError: The run would have too many errors even if all that is left were faultless.
        """
        self.in_work[news.number] = news
        self.first_error = self.first_error or news.first_error
        self._show()

    def finish(self, result: PartResult) -> None:
        """Raises DataError where all finished parts together have too many sources."""
        self._count(result)
        self._show()

    def begin_again(self, results: Iterable[PartResult]) -> None:
        """Counts these parts and no others; a count that is half done is not reported."""
        self.in_work.clear()
        self.finished, self.finished_bytes, self.first_error = Counts(), 0.0, None
        for result in results:
            self._count(result)

    def _count(self, result: PartResult) -> None:
        self.in_work.pop(result.number, None)
        self.finished_bytes += self.plan.input_bytes(self.plan.parts[result.number])
        self.finished.add(result.counts)
        self.sources.update(result.sources)
        check_sources(self.sources, self.plan.settings.read.source_key)
        self.first_error = self.first_error or result.first_error

    def join(self, new_bytes: int) -> None:
        self.joined_bytes += new_bytes
        self._show()

    def _show(self) -> None:
        if time.monotonic() - self._shown < _SHOW_SECONDS:
            return
        self._shown = time.monotonic()
        self.on_progress(self)
        if self.plan.settings.shard_index is not None:
            return  # the other tasks' parts may be better; the merge sees them all
        counts, read = self.counts, self.read_share
        if counts.records >= _HOPELESS_AFTER_RECORDS and read > 0:
            expected_records = counts.records / min(read, 1.0)
            check_error_rate(
                counts, self.plan.settings.max_error_rate, self.first_error, records=_HOPELESS * expected_records
            )


@dataclass(frozen=True)
class PreprocessReport:
    """What a run has done."""

    written: WrittenCorpus | None  # None: one task of an array, whose parts wait for the merge
    counts: Counts  # of its own parts, taken over ones included
    new_text_bytes: int  # UTF-8, without those
    parts: int
    finished_parts: int  # of the whole array
    seconds: float
    encoders: Counter[str]  # parts by name of the back end
    mismatch: str | None  # why a fast back end was given up
    damaged: list[str]  # why shards were left out


def preprocess(
    plan: Plan, *, on_progress: Callable[[Progress], None], workers: Workers | None = None
) -> PreprocessReport:
    """Does the parts that are not finished and joins all of them, as far as the settings ask for either.

    Damaged shards are reported together, when all that can be read is finished.

    Args:
        workers: From `start_workers`, before the plan was made; None: started here, where the settings want them.

    Raises:
        DataError: Too many records are in error, shards are damaged, or there is no document at all.
        OutputError: Finished parts of an earlier run are there, and the settings neither resume nor overwrite.
        MissingInputError: Parts to be merged are not finished.
        ChildProcessError: A worker process died.
    """
    started = time.monotonic()
    settings = plan.settings
    with JobFolder(plan.files.partial, task=settings.shard_index) as job:
        # Files under final names may be those of this run, killed while it put them there.
        committing = (settings.resume or settings.merge) and job.has_begun
        refuse_existing(plan.files, overwrite=settings.overwrite or committing)
        job.begin(
            plan.task_settings.decisive, resume=settings.resume, overwrite=settings.overwrite, merge=settings.merge
        )
        plan.known.write(job.path, plan.parts, plan.versions)
        all_tasks = part_tasks(plan)
        tasks = all_tasks[settings.shard_index or 0 :: settings.num_shards or 1]
        progress = Progress(plan, sum(plan.input_bytes(plan.parts[task.number]) for task in tasks), on_progress)
        parts = _Parts(tasks, progress, job)
        parts.take_over()
        taken_over = set(parts.results)
        parts.do_missing(workers)
        mismatch = job.mismatch
        on_progress(progress)
        finished_parts = sum(task.record("done").exists() for task in all_tasks)
        # Of a shard with several damaged parts the first, and all in the order of the inputs, not of their failing.
        in_order = [(plan.parts[number].path, parts.results[number].damage) for number in sorted(parts.results)]
        reasons = plan.damaged | {path: damage for path, damage in reversed(in_order) if damage}
        damaged = {path: reasons[path] for path in plan.versions if path in reasons}
        refuse_damaged(plan, damaged)
        tasks = [task for task in tasks if plan.parts[task.number].path not in damaged]
        results = {task.number: parts.results[task.number] for task in tasks}
        progress.begin_again(results.values())
        written = None
        if settings.shard_index is None:  # whether too much is in error is known when all parts are there
            if not progress.finished.documents:
                job.remove()  # there is nothing in it that could be of use
            counts = progress.finished
            check_error_rate(counts, settings.max_error_rate, progress.first_error)
            if not counts.documents:
                raise DataError(
                    f"no document in {counted(len(plan.versions), 'shard')} ({counts.records:,} records: "
                    f"{describe_reasons(counts.rejected + counts.dropped)}); a corpus needs at least one. Check "
                    "--input, --text-key and the filters"
                )
            written = _join_parts(plan, tasks, list(results.values()), counts, damaged, on_bytes=progress.join)
            job.remove()
    return PreprocessReport(
        written=written,
        counts=progress.finished,
        new_text_bytes=sum(each.counts.utf8_bytes for number, each in results.items() if number not in taken_over),
        parts=len(all_tasks),
        finished_parts=finished_parts,
        seconds=time.monotonic() - started,
        encoders=Counter(result.encoder for result in results.values()),
        mismatch=mismatch,
        damaged=list(damaged.values()),
    )


class _Parts:
    """What has become of each part, by its number."""

    def __init__(self, tasks: Sequence[PartTask], progress: Progress, job: JobFolder) -> None:
        self.results: dict[int, PartResult] = {}
        self._tasks, self._progress, self._job = tasks, progress, job

    def take_over(self) -> None:
        """What earlier runs, or the tasks of the array, have finished.

        Raises:
            MissingInputError: This is a merge, and there is more to do.
            DataError: A record is in error, and --on-error is fail.
        """
        settings = self._progress.plan.settings
        with ThreadPoolExecutor() as threads:  # checksums of all that is there; taken in here, a stop cancels the rest
            self.results = {result.number: result for result in threads.map(read_result, self._tasks) if result}
        if self._job.mismatch is not None or settings.tokenizer_backend == "reference":
            self._leave_to_reference()
        if settings.merge:
            lacking = self._missing()
            self.results |= {task.number: damage for task in lacking if (damage := read_result(task, "damaged"))}
            if lacking := self._missing():
                raise MissingInputError(
                    f"{len(lacking):,} of {len(self._tasks):,} parts are not finished, the first is number "
                    f"{lacking[0].number} in {lacking[0]}: run the tasks of the array that are missing, then merge"
                    + (f". Parts by a fast tokenizer count no more: {self._job.mismatch}" if self._job.mismatch else "")
                )
        for result in self.results.values():
            if result.first_error and settings.on_error == "fail":
                raise error_record(result.first_error)
        self._progress.begin_again(self.results.values())
        self._progress.taken_over_bytes = self._progress.finished_bytes

    def do_missing(self, workers: Workers | None) -> None:
        """Does the other parts; all anew by the reference as soon as a fast back end is found wrong in one."""
        try:
            with closing(self._run(self._missing(), workers)) as results:
                for result in results:
                    self.results[result.number] = result
                    self._progress.finish(result)
        except BackendMismatch as mismatch:
            self._job.note_mismatch(str(mismatch))
            self._leave_to_reference()
            self._progress.begin_again(self.results.values())
            self.do_missing(None)

    def _run(self, tasks: Sequence[PartTask], workers: Workers | None) -> Generator[PartResult, None, None]:
        plan, settings = self._progress.plan, self._progress.plan.settings
        started = workers or start_workers(settings)
        if started is None:
            remember(plan.tokenizer, plan.encoder)
        yield from run_tasks(
            tokenize_part,
            tasks,
            workers=settings.workers,
            executor=settings.executor,
            ray_address=settings.ray_address,
            on_report=self._progress.report,
            started=started,
        )

    def _missing(self) -> list[PartTask]:
        return [task for task in self._tasks if task.number not in self.results]

    def _leave_to_reference(self) -> None:
        """Parts by a fast back end count no more, and what is to be done is the reference tokenizer's."""
        for task in self._tasks:
            result = self.results.get(task.number)
            if result and not result.damage and not result.is_reference:
                task.record("done").unlink()
                del self.results[task.number]
        self._tasks = [replace(task, settings=replace(task.settings, backend="reference")) for task in self._tasks]


def start_workers(settings: PreprocessSettings) -> Workers | None:
    """The processes that a run will need, if any; they load the tokenizer while the run is planned.

    They end with the run, or when they are closed.
    """
    if settings.executor != "local" or (settings.workers or 1) == 1 or settings.merge:
        return None
    load = partial(load_early, settings.tokenizer_model, settings.tokenizer_type, settings.tokenizer_backend)
    return Workers(tokenize_part, count=settings.workers or 1, prepare=load)


# --- finished parts become the corpus, its volumes written by the workers of this machine


def _join_parts(
    plan: Plan,
    tasks: Sequence[PartTask],
    results: Sequence[PartResult],
    counts: Counts,
    damaged: Mapping[str, str],
    *,
    on_bytes: Callable[[int], None],
) -> WrittenCorpus:
    """Writes the corpus of these tasks, all that are in it, in order.

    Args:
        damaged: Why shards are left out, by path or URL.
        on_bytes: Called with the bytes of token ids dealt with since the last call.

    Raises:
        DataError: No document is left for the corpus, or none is held out for validation.
        ChildProcessError: A worker process died.
    """
    settings = plan.settings
    here = len(os.sched_getaffinity(0))  # of this machine, where the workers of a Ray cluster are not
    processes = settings.workers if settings.executor == "local" else min(settings.workers or here, here)
    inputs = {
        task.shard_name: InputRecord(task.shard.bytes, result.input_sha256)
        for task, result in zip(tasks, results, strict=True)
        if task.starts_shard
    }
    backends: dict[str, BackendRecord] = {}
    for result in results:
        before = backends.get(result.encoder, BackendRecord(0, 0))
        documents, compared = before.documents + result.counts.documents, before.compared + result.compared
        backends[result.encoder] = BackendRecord(documents, compared)
    return write_corpus(
        _part_files(tasks, results),
        OutputSettings(
            files=plan.files,
            keep_shards=settings.keep_shards,
            shard_bytes=settings.shard_size,
            validation_fraction=settings.split_validation,
            deduplicate=settings.deduplicate is not None,
        ),
        draft_manifest(
            plan.tokenizer,
            inputs=inputs,
            text_key=settings.read.text_key,
            source_key=settings.read.source_key,
            filters=plan.filters,
            records=counts.records,
            repaired_documents=counts.repaired_documents,
            rejected=dict(sorted(counts.rejected.items())),
            dropped=dict(sorted(counts.dropped.items())),
            tokenizer_backends=dict(sorted(backends.items())),
            quarantined={
                plan.shard_name(path): QuarantinedShard(version.bytes, damaged[path])
                for path, version in plan.versions.items()
                if path in damaged
            },
        ),
        folder=plan.files.partial,
        write_volumes=lambda tasks, on_report: run_tasks(
            write_volume_of, tasks, workers=processes, on_report=on_report
        ),
        on_progress=on_bytes,
    )


def _part_files(tasks: Sequence[PartTask], results: Sequence[PartResult]) -> list[PartFiles]:
    """The parts' files in order."""
    files, before = [], 0
    for task, result in zip(tasks, results, strict=True):
        if task.starts_shard:
            before = 0
        files.append(
            PartFiles(
                shard=task.shard_name,
                ids=task.file("ids"),
                lengths=task.file("lengths"),
                hashes=task.file("hashes"),
                rejects=task.file("rejects"),
                records_before=(task.part.unit, before) if task.part.numbers_are_relative else None,
                documents=result.counts.documents,
                tokens=result.counts.tokens,
                unknown_tokens=result.counts.unknown_tokens,
                sources=(task.file("sources"), result.sources) if task.settings.read.source_key is not None else None,
                sha256={kind: sha256 for kind, sha256 in result.sha256.items() if kind != "rejects"},
            )
        )
        before += result.numbers
    return files
