"""Raw input files to one corpus: chunks are tokenized, by local processes or on a Ray cluster, and then joined.

The corpus, its manifest and its rejects are the same for any number of workers, executor and restart. Finished chunks
are kept in PREFIX.partial, so what a killed run has done is not done again.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from megatron_neobert.data.corpus.format import (
    BackendRecord,
    InputRecord,
    QuarantinedShard,
    describe_reasons,
    draft_manifest,
)
from megatron_neobert.data.corpus.shard_job import ChunkFiles
from megatron_neobert.data.corpus.writer import OutputSettings, WrittenCorpus, refuse_existing, write_corpus
from megatron_neobert.data.preprocessing.chunks import (
    ChunkJob,
    ChunkProgress,
    ChunkResult,
    load_early,
    remember,
    tokenize_chunk,
)
from megatron_neobert.data.preprocessing.counts import Counts, check_error_rate, error_record
from megatron_neobert.data.preprocessing.plan import Plan, PreprocessSettings, open_job_folder, refuse_damaged
from megatron_neobert.data.tokenizer.fast_backends import BackendMismatch
from megatron_neobert.errors import DataError
from megatron_neobert.runtime.atomic_files import replace_file
from megatron_neobert.runtime.executors import WorkerPool
from megatron_neobert.runtime.jobs import Finished, read_all_finished, run_jobs
from megatron_neobert.text import counted

_SHOW_SECONDS = 0.2  # between two looks at the progress of all chunks, which cost up to 0.2 ms
_HOPELESS_AFTER_RECORDS = 10_000  # before that a share of errors says little
# Times as many errors as all of the input may have if the rest is faultless: it is an estimate, and must not be wrong.
_HOPELESS = 2.0


@dataclass
class Progress:
    """Progress of a run; chunks in work count as far as they have reported."""

    plan: Plan
    input_bytes: float
    on_progress: Callable[["Progress"], None]
    finished: Counts = field(default_factory=Counts)
    finished_bytes: float = 0.0  # of inputs
    taken_over_bytes: float = 0.0  # of inputs, in chunks that an earlier run has finished
    joined_bytes: int = 0  # of token ids, after all chunks are finished
    in_work: dict[int, ChunkProgress] = field(default_factory=dict)
    first_error: str | None = None
    _shown: float = 0.0

    @property
    def counts(self) -> Counts:
        total = Counts()
        for counts in (self.finished, *(chunk.counts for chunk in self.in_work.values())):
            total.add(counts)
        return total

    @property
    def read_bytes(self) -> float:
        """Bytes of the inputs that have been read, in this run and in the one that it continues."""
        chunks = ((self.plan.chunks[number], news.fraction) for number, news in self.in_work.items())
        return self.finished_bytes + sum(fraction * self.plan.input_bytes(chunk) for chunk, fraction in chunks)

    @property
    def read_share(self) -> float:
        """Share of the input bytes that has been read; 1 if the inputs are empty."""
        return self.read_bytes / self.input_bytes if self.input_bytes else 1.0

    def report(self, news: ChunkProgress) -> None:
        """Take note of a chunk in work.

        Raises:
            DataError: The run would have too many errors even if everything that is left were faultless.
        """
        self.in_work[news.number] = news
        self.first_error = self.first_error or news.first_error
        self._show()

    def finish(self, number: int, result: ChunkResult) -> None:
        """Count a finished chunk."""
        self._count(number, result)
        self._show()

    def begin_again(self, results: Mapping[int, ChunkResult]) -> None:
        """Count these chunks and no others; a count that is half done is not reported."""
        self.in_work.clear()
        self.finished, self.finished_bytes, self.first_error = Counts(), 0.0, None
        for number, result in results.items():
            self._count(number, result)

    def join(self, written_bytes: int) -> None:
        """Take note of the size of the corpus that is written so far."""
        self.joined_bytes = written_bytes
        self._show()

    def _count(self, number: int, result: ChunkResult) -> None:
        self.in_work.pop(number, None)
        self.finished_bytes += self.plan.input_bytes(self.plan.chunks[number])
        self.finished.add(result.counts)
        self.first_error = self.first_error or result.first_error

    def _show(self) -> None:
        if time.monotonic() - self._shown < _SHOW_SECONDS:
            return
        self._shown = time.monotonic()
        self.on_progress(self)
        counts, read = self.counts, self.read_share
        if counts.records >= _HOPELESS_AFTER_RECORDS and read > 0:
            expected_records = counts.records / min(read, 1.0)
            check_error_rate(
                counts, self.plan.settings.max_error_rate, self.first_error, records=_HOPELESS * expected_records
            )


@dataclass(frozen=True)
class PreprocessReport:
    """Result of a run."""

    written: WrittenCorpus
    counts: Counts  # of all chunks, those of an earlier run included
    new_text_bytes: int  # UTF-8, without those
    seconds: float
    encoders: Counter[str]  # chunks by name of the back end
    mismatch: str | None  # why a fast back end was given up
    damaged: list[str]  # why input files were left out


def preprocess(
    plan: Plan, *, on_progress: Callable[[Progress], None], pool: WorkerPool | None = None
) -> PreprocessReport:
    """Do the chunks that are not finished, and join all of them.

    Damaged input files are reported together, when everything that can be read is finished.

    Args:
        pool: From `start_workers`, before the plan was made; None: started here, if the settings want processes.

    Raises:
        DataError: Too many records are in error, input files are damaged, or there is no document at all.
        OutputError: Finished chunks of an earlier run exist, and the settings neither resume nor overwrite.
        ChildProcessError: A worker process died.
    """
    started = time.monotonic()
    settings = plan.settings
    with open_job_folder(plan.files) as folder:
        # Files under final names may be those of this run, killed while it put them there.
        committing = settings.resume and folder.has_begun
        refuse_existing(plan.files, overwrite=settings.overwrite or committing)
        folder.begin(plan.decisive, resume=settings.resume, overwrite=settings.overwrite)
        jobs = plan.jobs()
        progress = Progress(plan, sum(map(plan.input_bytes, plan.chunks)), on_progress)
        chunks = _Chunks(jobs, progress, folder.path / "mismatch")
        chunks.take_over()
        taken_over = set(chunks.finished)
        chunks.do_missing(pool)
        on_progress(progress)
        # Of an input file with several damaged chunks the first, and all in the order of the inputs.
        by_path = {plan.chunks[number].path: chunks.damaged[number] for number in sorted(chunks.damaged, reverse=True)}
        reasons = plan.damaged | by_path
        damaged = {path: reasons[path] for path in plan.versions if path in reasons}
        refuse_damaged(plan, damaged)
        jobs = [job for job in jobs if plan.chunks[job.number].path not in damaged]
        finished = {job.number: chunks.finished[job.number] for job in jobs}
        progress.begin_again({number: record.result for number, record in finished.items()})
        counts = progress.finished
        if not counts.documents:
            folder.remove()  # there is nothing in it that could be of use
        check_error_rate(counts, settings.max_error_rate, progress.first_error)
        if not counts.documents:
            raise DataError(
                f"no document in {counted(len(plan.versions), 'shard')} ({counts.records:,} records: "
                f"{describe_reasons(counts.rejected + counts.dropped)}); a corpus needs at least one. Check "
                "--input, --text-key and the filters"
            )
        written = _join_chunks(plan, jobs, list(finished.values()), counts, damaged, on_progress=progress.join)
        mismatch = chunks.mismatch
        folder.remove()
    new = (record.result.counts for number, record in finished.items() if number not in taken_over)
    return PreprocessReport(
        written=written,
        counts=counts,
        new_text_bytes=sum(each.utf8_bytes for each in new),
        seconds=time.monotonic() - started,
        encoders=Counter(record.result.encoder for record in finished.values()),
        mismatch=mismatch,
        damaged=list(damaged.values()),
    )


class _Chunks:
    """Outcome of each chunk, by its number.

    Args:
        mismatch_file: Where it is kept that a fast back end was found wrong, in this run or before a restart. From then
            on the whole corpus is the reference tokenizer's.
    """

    def __init__(self, jobs: Sequence[ChunkJob], progress: Progress, mismatch_file: Path) -> None:
        self.finished: dict[int, Finished[ChunkResult]] = {}
        self.damaged: dict[int, str] = {}
        self._jobs, self._progress, self._mismatch_file = jobs, progress, mismatch_file

    @property
    def mismatch(self) -> str | None:
        """Place at which a fast back end was found wrong, if it was."""
        return self._mismatch_file.read_text(encoding="utf-8") if self._mismatch_file.exists() else None

    def take_over(self) -> None:
        """Take over what an earlier run has finished. Raise DataError if a record is in error under --on-error fail."""
        settings = self._progress.plan.settings
        records = zip(self._jobs, read_all_finished(self._jobs), strict=True)
        self.finished = {job.number: record for job, record in records if record is not None}
        if self.mismatch is not None or settings.tokenizer_backend == "reference":
            self._leave_to_reference()
        for record in self.finished.values():
            if record.result.first_error and settings.on_error == "fail":
                raise error_record(record.result.first_error)
        self._begin_again()
        self._progress.taken_over_bytes = self._progress.finished_bytes

    def do_missing(self, pool: WorkerPool | None) -> None:
        """Do the other chunks; all anew by the reference as soon as a fast back end is found wrong in one."""
        try:
            with closing(self._run(pool)) as results:
                for job, outcome in results:
                    if isinstance(outcome, str):
                        self.damaged[job.number] = outcome
                        self._progress.in_work.pop(job.number, None)
                    else:
                        self.finished[job.number] = outcome
                        self._progress.finish(job.number, outcome.result)
        except BackendMismatch as mismatch:
            replace_file(self._mismatch_file, str(mismatch))
            self.damaged.clear()
            self._leave_to_reference()
            self._begin_again()
            self.do_missing(None)

    def _run(self, pool: WorkerPool | None) -> Generator[tuple[ChunkJob, Finished[ChunkResult] | str], None, None]:
        plan, settings = self._progress.plan, self._progress.plan.settings
        pool = pool or start_workers(settings)
        if pool is None:
            remember(plan.tokenizer, plan.encoder)
        return run_jobs(
            tokenize_chunk,
            [job for job in self._jobs if job.number not in self.finished],
            workers=settings.workers,
            executor=settings.executor,
            ray_address=settings.ray_address,
            on_report=self._progress.report,
            pool=pool,
        )

    def _begin_again(self) -> None:
        self._progress.begin_again({number: record.result for number, record in self.finished.items()})

    def _leave_to_reference(self) -> None:
        """Discard chunks by a fast back end, and leave what is to be done to the reference tokenizer."""
        for job in self._jobs:
            record = self.finished.get(job.number)
            if record and not record.result.is_reference:
                job.file("done").unlink()
                del self.finished[job.number]
        self._jobs = [replace(job, settings=replace(job.settings, backend="reference")) for job in self._jobs]


def start_workers(settings: PreprocessSettings) -> WorkerPool | None:
    """Start the processes that a run will need, if any; they load the tokenizer while the run is planned."""
    if settings.executor != "local" or (settings.workers or 1) == 1:
        return None
    load = partial(load_early, settings.tokenizer_model, settings.tokenizer_type, settings.tokenizer_backend)
    return WorkerPool(settings.workers or 1, load)


def _join_chunks(
    plan: Plan,
    jobs: Sequence[ChunkJob],
    records: Sequence[Finished[ChunkResult]],
    counts: Counts,
    damaged: Mapping[str, str],
    *,
    on_progress: Callable[[int], None],
) -> WrittenCorpus:
    """Write the corpus of finished jobs, which are in order, by processes of this machine.

    Args:
        damaged: Why input files are left out, by path or URL.
        on_progress: Called with the bytes of token ids that are written.

    Raises:
        DataError: No document is left for the corpus, or none is held out for validation.
        ChildProcessError: A worker process died.
    """
    settings = plan.settings
    here = len(os.sched_getaffinity(0))  # of this machine, while the workers of a Ray cluster are elsewhere
    inputs: dict[str, InputRecord] = {}
    backends: dict[str, BackendRecord] = {}
    for job, record in zip(jobs, records, strict=True):
        result = record.result
        if job.starts_input:
            inputs[job.input_name] = InputRecord(job.version.bytes, result.input_sha256)
        before = backends.get(result.encoder, BackendRecord(0, 0))
        documents, compared = before.documents + result.counts.documents, before.compared + result.compared
        backends[result.encoder] = BackendRecord(documents, compared)
    return write_corpus(
        _chunk_files(jobs, records),
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
            filters=plan.filters,
            records=counts.records,
            repaired_documents=counts.repaired_documents,
            rejected=dict(sorted(counts.rejected.items())),
            dropped=dict(sorted(counts.dropped.items())),
            tokenizer_backends=dict(sorted(backends.items())),
            quarantined={
                plan.input_name(path): QuarantinedShard(version.bytes, damaged[path])
                for path, version in plan.versions.items()
                if path in damaged
            },
        ),
        folder=plan.files.partial,
        workers=settings.workers if settings.executor == "local" else min(settings.workers or here, here),
        on_progress=on_progress,
    )


def _chunk_files(jobs: Sequence[ChunkJob], records: Sequence[Finished[ChunkResult]]) -> list[ChunkFiles]:
    """Describe the files of all chunks, in order."""
    files, before = [], 0
    for job, record in zip(jobs, records, strict=True):
        result = record.result
        before = 0 if job.starts_input else before
        files.append(
            ChunkFiles(
                input=job.input_name,
                name=job.name,
                documents=result.counts.documents,
                tokens=result.counts.tokens,
                unknown_tokens=result.counts.unknown_tokens,
                sha256={kind: file.sha256 for kind, file in record.files.items() if kind != "rejects"},
                records_before=(job.chunk.unit, before) if job.chunk.numbers_are_relative else None,
            )
        )
        before += result.numbers
    return files
