"""Preprocess input files to one corpus: tokenize the chunks in local processes or on a Ray cluster, then join them.

The corpus, its manifest and its rejects are the same for any number of workers, any executor, and after any restart.
Finished chunks are kept in PREFIX.partial, so that a resumed run does not repeat them.
"""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from megatron_neobert.data.corpus.format import Counts, Manifest, QuarantinedInput, describe_reasons
from megatron_neobert.data.corpus.writer import TokenizedChunk, refuse_existing, write_corpus
from megatron_neobert.data.inputs.find import input_label
from megatron_neobert.data.preprocessing.chunks import TokenizeJob, cache_tokenizer, tokenize_chunk
from megatron_neobert.data.preprocessing.plan import Plan, refuse_damaged
from megatron_neobert.errors import DataError
from megatron_neobert.runtime.jobs import Finished, JobFolder, finish_jobs
from megatron_neobert.text import counted, percent

# A run ends early if most of at least this many records are errors, as with a wrong --text-key.
_EARLY_END_RECORDS = 10_000


@dataclass(frozen=True)
class PreprocessReport:
    """Result of a run."""

    manifest: Manifest
    counts: Counts  # of all chunks, including the chunks of an earlier run
    seconds: float
    damaged: list[str]  # reasons why input files were left out


def preprocess(plan: Plan) -> PreprocessReport:
    """Tokenize the unfinished chunks, write the corpus of all chunks, and remove PREFIX.partial.

    After an error, finished chunks stay in PREFIX.partial for --resume, unless no chunk has a document.

    Raises:
        DataError: Too many records are in error, there is no document, or input files are damaged. Damaged files are
            reported together after all other files are finished.
        ConfigError: A fast back end differs from the reference tokenizer, finished chunks have other settings, or Ray
            cannot be used.
        OutputError: The corpus or finished chunks exist, and the settings neither resume nor overwrite; or
            PREFIX.partial is used by another process, or cannot be created.
        ChildProcessError: A worker process died.
        OSError: An input file cannot be read, or an output cannot be written.
    """
    started = time.monotonic()
    settings = plan.settings
    with JobFolder(plan.files.partial) as folder:
        # A killed run may have given some of its files their final names already.
        was_renaming = settings.jobs.resume and folder.has_begun
        refuse_existing(plan.files, overwrite=settings.overwrite or was_renaming)
        folder.begin(plan.chunk_settings, resume=settings.jobs.resume, overwrite=settings.overwrite)
        jobs = plan.jobs()
        finished, reasons = _tokenize(plan, jobs)
        reasons |= plan.damaged
        versions = {input_label(path): version for path, version in plan.versions.items()}
        damaged = {name: reasons[name] for name in versions if name in reasons}
        refuse_damaged(plan, damaged)
        chunks = [finished[job.name] for job in jobs if job.input_name not in damaged]
        counts, first_error = Counts(), None
        for chunk in chunks:
            counts.add(chunk.result.counts)
            first_error = first_error or chunk.result.first_error
        if not counts.documents:
            folder.remove()  # no chunk has a document
        check_error_rate(counts, settings.max_error_rate, first_error)
        if not counts.documents:
            raise DataError(
                f"no document in {counted(len(plan.versions), 'input file')} ({counts.records:,} records: "
                f"{describe_reasons(counts.rejected + counts.dropped)}); a corpus needs at least one document. Check "
                "--input, --text-key and the filters"
            )
        manifest = write_corpus(
            chunks,
            plan.files,
            plan.tokenizer,
            shard_bytes=settings.shard_size,
            options=settings.jobs,
            text_key=settings.read.text_key,
            filters=plan.filters,
            quarantined={name: QuarantinedInput(versions[name].bytes, reason) for name, reason in damaged.items()},
        )
        folder.remove()
    return PreprocessReport(manifest, counts, time.monotonic() - started, list(damaged.values()))


def _tokenize(plan: Plan, jobs: Sequence[TokenizeJob]) -> tuple[dict[str, Finished[TokenizedChunk]], dict[str, str]]:
    """Tokenize the unfinished chunks.

    Returns:
        `Finished` of each finished chunk, by name of its job; and a reason for each damaged input file, by label, which
        is that of its first damaged chunk.

    Raises:
        DataError: Most records are errors and more than the limit allows, or the tokenizer or a filter has changed. The
            caller must check the final error rate.
        ConfigError: A fast back end differs from the reference tokenizer, or Ray cannot be used.
        ChildProcessError: A worker process died.
    """
    settings, counts = plan.settings, Counts()
    cache_tokenizer(plan.tokenizer, plan.encoder)
    finished: dict[str, Finished[TokenizedChunk]] = {}
    damaged: dict[str, str] = {}  # by name of the job
    first_error = None
    results = finish_jobs(jobs, settings.jobs, label="chunks", function=tokenize_chunk)
    with closing(results):
        for job, outcome in results:
            if isinstance(outcome, str):
                damaged[job.name] = outcome
                continue
            finished[job.name] = outcome
            counts.add(outcome.result.counts)
            first_error = first_error or outcome.result.first_error
            if 2 * counts.errors > counts.records >= _EARLY_END_RECORDS or not settings.max_error_rate:
                check_error_rate(counts, settings.max_error_rate, first_error)
    return finished, {job.input_name: damaged[job.name] for job in reversed(jobs) if job.name in damaged}


def check_error_rate(counts: Counts, max_error_rate: float, first_error: str | None) -> None:
    """Raise DataError if more than `max_error_rate` (a fraction, 0 to 1) of the records are errors.

    `first_error` is an example for the message, from `Rejected.describe`.
    """
    if counts.errors > max_error_rate * counts.records:
        raise DataError(
            f"{counts.errors:,} of {counts.records:,} records have no usable text "
            f"({percent(counts.errors / counts.records, digits=2)}), more than --max-error-rate {max_error_rate} "
            f"allows ({describe_reasons(counts.rejected)}); for example: {first_error}. "
            "Fix the input files or the filter, check --text-key and --record-key, or raise --max-error-rate"
        )
