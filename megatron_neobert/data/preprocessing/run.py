"""Preprocess input files to one corpus: tokenize the chunks in local processes or on a Ray cluster, then join them.

The corpus, its manifest and its rejects are the same for any number of workers, any executor, and after any restart.
Finished chunks are kept in PREFIX.partial, so that a resumed run does not repeat them.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from megatron_neobert.data.corpus.format import (
    BackendRecord,
    InputRecord,
    Manifest,
    QuarantinedInput,
    describe_reasons,
    draft_manifest,
)
from megatron_neobert.data.corpus.writer import ChunkFiles, refuse_existing, write_corpus
from megatron_neobert.data.inputs.find import input_label
from megatron_neobert.data.preprocessing.chunks import ChunkJob, ChunkResult, Counts, cache_tokenizer, tokenize_chunk
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
        finished, reasons = _tokenize(plan)
        reasons |= plan.damaged
        damaged = {name: reasons[name] for name in map(input_label, plan.versions) if name in reasons}
        refuse_damaged(plan, damaged)
        jobs = [job for job in plan.jobs() if job.input_name not in damaged]
        counts, first_error = Counts(), None
        for job in jobs:
            counts.add(finished[job.name].result.counts)
            first_error = first_error or finished[job.name].result.first_error
        if not counts.documents:
            folder.remove()  # no chunk has a document
        check_error_rate(counts, settings.max_error_rate, first_error)
        if not counts.documents:
            raise DataError(
                f"no document in {counted(len(plan.versions), 'input file')} ({counts.records:,} records: "
                f"{describe_reasons(counts.rejected + counts.dropped)}); a corpus needs at least one document. Check "
                "--input, --text-key and the filters"
            )
        manifest = _join_chunks(plan, jobs, [finished[job.name] for job in jobs], counts, damaged)
        folder.remove()
    return PreprocessReport(manifest, counts, time.monotonic() - started, list(damaged.values()))


def _tokenize(plan: Plan) -> tuple[dict[str, Finished[ChunkResult]], dict[str, str]]:
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
    settings, jobs, counts = plan.settings, plan.jobs(), Counts()
    cache_tokenizer(plan.tokenizer, plan.encoder)
    finished: dict[str, Finished[ChunkResult]] = {}
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


def _join_chunks(
    plan: Plan,
    jobs: Sequence[ChunkJob],
    records: Sequence[Finished[ChunkResult]],
    counts: Counts,
    damaged: Mapping[str, str],
) -> Manifest:
    """Write the corpus of the finished `jobs`, in their order, replacing an older corpus.

    Args:
        records: One record per job, in the order of `jobs`. `counts` is the sum of their counts.
        damaged: Reason for each input file that is left out, by label.

    Raises:
        OutputError: A new file would replace a file of another corpus.
    """
    settings = plan.settings
    inputs: dict[str, InputRecord] = {}
    backends: dict[str, BackendRecord] = {}
    for job, record in zip(jobs, records, strict=True):
        result = record.result
        if job.starts_input:
            inputs[job.input_name] = InputRecord(job.version.bytes, result.input_sha256)
        total = backends.get(result.encoder, BackendRecord(0, 0))
        backends[result.encoder] = BackendRecord(
            total.documents + result.counts.documents, total.compared + result.compared
        )
    chunks = [
        ChunkFiles(
            input=job.input_name,
            name=job.name,
            documents=record.result.counts.documents,
            tokens=record.result.counts.tokens,
            unknown_tokens=record.result.counts.unknown_tokens,
            ids_sha256=record.files["ids"].sha256,
            has_attributes="attributes" in record.files,
        )
        for job, record in zip(jobs, records, strict=True)
    ]
    return write_corpus(
        chunks,
        plan.files,
        draft_manifest(
            plan.tokenizer,
            inputs=inputs,
            text_key=settings.read.text_key,
            filters=plan.filters,
            records=counts.records,
            rejected=dict(sorted(counts.rejected.items())),
            dropped=dict(sorted(counts.dropped.items())),
            bytes_per_token=counts.utf8_bytes / counts.tokens if counts.tokens else None,
            tokenizer_backends=dict(sorted(backends.items())),
            quarantined={
                name: QuarantinedInput(version.bytes, damaged[name])
                for name, version in zip(map(input_label, plan.versions), plan.versions.values(), strict=True)
                if name in damaged
            },
        ),
        folder=plan.files.partial,
        shard_bytes=settings.shard_size,
    )
