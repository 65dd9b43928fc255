"""Raw shards to one corpus: parts of shards are tokenised, by local processes or on a Ray cluster, and then joined.

The corpus, its manifest and its rejects are the same for any number of workers, executor, array of tasks and restart.
Finished parts wait in PREFIX.partial, so what a killed run has done is not done again.
"""

import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

from megatron_neobert.data.corpus_format import InputRecord, describe_reasons
from megatron_neobert.data.corpus_writer import (
    CorpusFacts,
    OutputSettings,
    PartFiles,
    WrittenCorpus,
    refuse_existing,
    write_corpus,
)
from megatron_neobert.data.preprocessing.job import JobFolder
from megatron_neobert.data.preprocessing.part_tasks import (
    Counts,
    PartProgress,
    PartResult,
    PartTask,
    Report,
    absolute_rejects,
    load_early,
    read_result,
    remember,
    tokenize_part,
)
from megatron_neobert.data.preprocessing.plan import Plan, PreprocessSettings, decisive_settings, part_tasks
from megatron_neobert.data.preprocessing.workers import Workers
from megatron_neobert.errors import DataError, MissingInputError

LocalWorkers = Workers[PartTask, PartResult]

_RATE_AFTER_RECORDS = 10_000  # the error rate of fewer records is not judged before the end


@dataclass
class Progress:
    """How far a run is; parts in work count as far as they have reported."""

    input_bytes: float
    finished: Counts = field(default_factory=Counts)
    finished_bytes: float = 0.0
    taken_over_bytes: float = 0.0  # of parts that an earlier run has finished
    in_work: dict[int, PartProgress] = field(default_factory=dict)
    first_error: str | None = None

    @property
    def counts(self) -> Counts:
        total = Counts()
        for counts in (self.finished, *(part.counts for part in self.in_work.values())):
            total.add(counts)
        return total

    def read_bytes(self, plan: Plan) -> float:
        """Of the inputs, in this run and in the one that it continues."""
        parts = ((plan.parts[number], part.fraction) for number, part in self.in_work.items())
        return self.finished_bytes + sum(fraction * plan.input_bytes(part) for part, fraction in parts)


@dataclass(frozen=True)
class PreprocessReport:
    """What a run has done."""

    written: WrittenCorpus | None  # None: one task of an array, whose parts wait for the merge
    counts: Counts  # of its own parts, taken over ones included
    parts: int
    finished_parts: int  # of the whole array
    seconds: float
    encoders: Counter[str]  # parts by name of the back end
    mismatches: list[str]


def preprocess(
    plan: Plan, *, on_progress: Callable[[Progress], None], workers: LocalWorkers | None = None
) -> PreprocessReport:
    """Does the parts that are not finished and joins all of them, as far as the settings ask for either.

    Args:
        workers: From `start_workers`, before the plan was made; None: started here, where the settings want them.

    Raises:
        DataError: Too many records are in error, a shard is damaged, or there is no document at all.
        OutputError: Finished parts of an earlier run are there, and the settings do not say what to do with them.
        MissingInputError: Parts to be merged are not finished.
        ChildProcessError: A worker process died.
    """
    started = time.monotonic()
    settings = plan.settings
    if settings.resume:
        refuse_existing(plan.files, overwrite=settings.overwrite or (plan.files.partial / "job.json").exists())
    with JobFolder(plan.files.partial, task=settings.shard_index) as job:
        job.begin(decisive_settings(plan), resume=settings.resume or settings.merge, overwrite=settings.overwrite)
        tasks = part_tasks(plan)[settings.shard_index or 0 :: settings.num_shards or 1]
        results = {task.number: result for task in tasks if (result := read_result(task))}
        missing = [task for task in tasks if task.number not in results]
        if settings.merge and missing:
            raise MissingInputError(
                f"{len(missing):,} of {len(tasks):,} parts are not finished, the first is number {missing[0].number} "
                f"in {missing[0]}: run the tasks of the array that are missing, then merge"
            )
        progress = Progress(input_bytes=sum(plan.input_bytes(task.part) for task in tasks))
        for result in results.values():
            _count(plan, progress, result)
        progress.taken_over_bytes = progress.finished_bytes

        def report(news: PartProgress) -> None:
            progress.in_work[news.number] = news
            progress.first_error = progress.first_error or news.first_error
            on_progress(progress)
            _check_error_rate(progress, settings, at_end=False)

        with closing(_run_tasks(missing, plan, workers, report)) as new_results:
            for result in new_results:
                results[result.number] = result
                _count(plan, progress, result)
                on_progress(progress)
        finished_parts = job.finished_parts()
        if settings.shard_index is None and not progress.finished.documents:
            job.remove()  # there is nothing in it that could be of use
        _check_error_rate(progress, settings, at_end=True)
        written = None
        if settings.shard_index is None:
            if not progress.finished.documents:
                raise _nothing_found(plan, progress.finished)
            written = _join(plan, tasks, [results[task.number] for task in tasks], progress.finished)
            job.remove()
    return PreprocessReport(
        written=written,
        counts=progress.finished,
        parts=len(plan.parts),
        finished_parts=finished_parts,
        seconds=time.monotonic() - started,
        encoders=Counter(result.encoder for result in results.values()),
        mismatches=[f"{task}: {mismatch}" for task in tasks if (mismatch := results[task.number].mismatch)],
    )


def start_workers(settings: PreprocessSettings) -> LocalWorkers | None:
    """The processes that a run will need, if any; they load the tokenizer while the run is planned.

    They end with the run, or when they are closed.
    """
    if settings.executor != "local" or (settings.workers or 1) == 1 or settings.merge:
        return None
    load = partial(load_early, settings.tokenizer_model, settings.tokenizer_type, settings.tokenizer_backend)
    return Workers(tokenize_part, count=settings.workers or 1, prepare=load)


def _run_tasks(
    tasks: Sequence[PartTask], plan: Plan, workers: LocalWorkers | None, report: Report
) -> Generator[PartResult, None, None]:
    """Results in the order in which they finish."""
    settings = plan.settings
    if settings.executor == "ray":
        from megatron_neobert.data.preprocessing.ray_executor import run_on_ray

        yield from run_on_ray(tasks, workers=settings.workers, address=settings.ray_address)
    elif workers := workers or start_workers(settings):
        yield from workers.run(tasks, on_report=report)
    else:  # one worker is this process: nothing to start, nothing to send
        remember(plan.tokenizer, plan.encoder)
        for task in tasks:
            yield tokenize_part(task, report)


def _count(plan: Plan, progress: Progress, result: PartResult) -> None:
    progress.in_work.pop(result.number, None)
    progress.finished.add(result.counts)
    progress.finished_bytes += plan.input_bytes(plan.parts[result.number])
    progress.first_error = progress.first_error or result.first_error


def _check_error_rate(progress: Progress, settings: PreprocessSettings, *, at_end: bool) -> None:
    counts = progress.counts
    if (at_end or counts.records >= _RATE_AFTER_RECORDS) and counts.errors > settings.max_error_rate * counts.records:
        raise DataError(
            f"{counts.errors:,} of {counts.records:,} records have no usable text "
            f"({counts.errors / counts.records:.2%}), more than --max-error-rate {settings.max_error_rate} allows "
            f"({describe_reasons(counts.rejected)}); for example: {progress.first_error}. Mend the shards, check "
            "--text-key, or allow more"
        )


def _join(plan: Plan, tasks: Sequence[PartTask], results: Sequence[PartResult], counts: Counts) -> WrittenCorpus:
    settings = plan.settings
    inputs = {
        task.shard_name: InputRecord(task.shard.bytes, result.shard_sha256)
        for task, result in zip(tasks, results, strict=True)
        if task.starts_shard
    }
    return write_corpus(
        _part_files(tasks, results),
        OutputSettings(
            files=plan.files,
            keep_shards=settings.keep_shards,
            shard_bytes=settings.shard_size,
            validation_fraction=settings.split_validation,
            deduplicate=settings.deduplicate is not None,
        ),
        CorpusFacts(
            inputs=inputs,
            text_key=settings.read.text_key,
            filters=plan.filters,
            records=counts.records,
            repaired_documents=counts.repaired_documents,
            rejected=dict(sorted(counts.rejected.items())),
            dropped=dict(sorted(counts.dropped.items())),
        ),
        plan.tokenizer,
        folder=plan.files.partial,
    )


def _nothing_found(plan: Plan, counts: Counts) -> DataError:
    reasons = describe_reasons(counts.rejected + counts.dropped)
    return DataError(
        f"no document in {len(plan.versions)} shards ({counts.records:,} records: {reasons}); a corpus needs at least "
        "one. Check --input, --text-key and the filters"
    )


def _part_files(tasks: Sequence[PartTask], results: Sequence[PartResult]) -> list[PartFiles]:
    """The parts' files in order, rejects with record numbers that count from the beginning of their shard."""
    files, before = [], 0
    for task, result in zip(tasks, results, strict=True):
        if task.starts_shard:
            before = 0
        rejects = task.file("rejects")
        if task.part.numbers_are_relative and result.counts.errors:
            rejects = rejects.with_suffix(".rejects-absolute")
            absolute_rejects(task.file("rejects"), rejects, unit=task.part.unit, before=before)
        before += result.numbers
        files.append(
            PartFiles(
                shard=task.part.path,
                ids=task.file("ids"),
                lengths=task.file("lengths"),
                hashes=task.file("hashes") if task.settings.with_hashes else None,
                rejects=rejects,
                documents=result.counts.documents,
                tokens=result.counts.tokens,
                unknown_tokens=result.counts.unknown_tokens,
                ids_sha256=result.ids_sha256,
            )
        )
    return files
