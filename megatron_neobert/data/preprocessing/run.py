"""Raw input files to one corpus: chunks are tokenized, by local processes or on a Ray cluster, and then joined.

The corpus, its manifest and its rejects are the same for any number of workers, executor and restart. Finished chunks
are kept in PREFIX.partial, so what a killed run has done is not done again.
"""

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from megatron_neobert.data.corpus.format import (
    BackendRecord,
    InputRecord,
    QuarantinedInput,
    describe_reasons,
    draft_manifest,
)
from megatron_neobert.data.corpus.shard_job import ChunkFiles
from megatron_neobert.data.corpus.writer import OutputSettings, WrittenCorpus, refuse_existing, write_corpus
from megatron_neobert.data.inputs.find import input_label
from megatron_neobert.data.preprocessing.chunks import ChunkJob, ChunkResult, Counts, remember, tokenize_chunk
from megatron_neobert.data.preprocessing.plan import Plan, refuse_damaged
from megatron_neobert.errors import DataError
from megatron_neobert.runtime.jobs import Finished, JobFolder, finish_jobs
from megatron_neobert.text import counted, percent

_HOPELESS_AFTER_RECORDS = 10_000  # before that a share of errors says little
# Times as many errors as all of the input may have if the rest is faultless: it is an estimate, and must not be wrong.
_HOPELESS = 2.0


@dataclass(frozen=True)
class PreprocessReport:
    """Result of a run."""

    written: WrittenCorpus
    counts: Counts  # of all chunks, those of an earlier run included
    seconds: float
    damaged: list[str]  # why input files were left out


def preprocess(plan: Plan) -> PreprocessReport:
    """Do the chunks that are not finished, and join all of them.

    Damaged input files are reported together, when everything that can be read is finished.

    Raises:
        DataError: Too many records are in error, input files are damaged, or there is no document at all.
        ConfigError: A fast back end differs from the reference tokenizer, or chunks of other settings are finished.
        OutputError: Finished chunks of an earlier run exist, and the settings neither resume nor overwrite.
        ChildProcessError: A worker process died.
    """
    started = time.monotonic()
    settings = plan.settings
    with JobFolder(plan.files.partial) as folder:
        # Files under final names may be those of this run, killed while it put them there.
        committing = settings.resume and folder.has_begun
        refuse_existing(plan.files, overwrite=settings.overwrite or committing)
        folder.begin(plan.decisive, resume=settings.resume, overwrite=settings.overwrite)
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
            folder.remove()  # there is nothing in it that could be of use
        check_error_rate(counts, settings.max_error_rate, first_error, records=counts.records)
        if not counts.documents:
            raise DataError(
                f"no document in {counted(len(plan.versions), 'shard')} ({counts.records:,} records: "
                f"{describe_reasons(counts.rejected + counts.dropped)}); a corpus needs at least one. Check "
                "--input, --text-key and the filters"
            )
        written = _join_chunks(plan, jobs, [finished[job.name] for job in jobs], counts, damaged)
        folder.remove()
    return PreprocessReport(written, counts, time.monotonic() - started, list(damaged.values()))


def _tokenize(plan: Plan) -> tuple[dict[str, Finished[ChunkResult]], dict[str, str]]:
    """Do the chunks that are not finished.

    Returns:
        The records of all finished chunks by name, and why input files are damaged, by label; of an input file with
        several damaged chunks the first.

    Raises:
        DataError: The run would have too many errors even if everything that is left were faultless.
    """
    settings, jobs, counts, done_bytes = plan.settings, plan.jobs(), Counts(), 1.0
    chunks_of, total_bytes = Counter(job.input_name for job in jobs), sum(one.bytes for one in plan.versions.values())
    remember(plan.tokenizer, plan.encoder)
    finished: dict[str, Finished[ChunkResult]] = {}
    damaged: dict[str, str] = {}
    first_error = None
    results = finish_jobs(
        jobs,
        label="chunks",
        function=tokenize_chunk,
        workers=settings.workers,
        executor=settings.executor,
        ray_address=settings.ray_address,
    )
    with closing(results):
        for job, outcome in results:
            done_bytes += job.version.bytes / chunks_of[job.input_name]
            if isinstance(outcome, str):
                damaged[job.name] = outcome
                continue
            finished[job.name] = outcome
            counts.add(outcome.result.counts)
            first_error = first_error or outcome.result.first_error
            if counts.records >= _HOPELESS_AFTER_RECORDS or not settings.max_error_rate:
                most_records = _HOPELESS * counts.records * max(1.0, total_bytes / done_bytes)
                check_error_rate(counts, settings.max_error_rate, first_error, records=most_records)
    return finished, {job.input_name: damaged[job.name] for job in reversed(jobs) if job.name in damaged}


def check_error_rate(counts: Counts, max_error_rate: float, first_error: str | None, *, records: float) -> None:
    """Raise DataError if more of the records are in error than may be.

    Args:
        first_error: An example: the record's place and what is wrong with it.
        records: Number of records that the rate is of.
    """
    if counts.errors > max_error_rate * records:
        raise DataError(
            f"{counts.errors:,} of {counts.records:,} records have no usable text "
            f"({percent(counts.errors / counts.records, digits=2)}), more than --max-error-rate {max_error_rate} "
            f"allows ({describe_reasons(counts.rejected)}); for example: {first_error}. "
            "Fix the shards or the filter, check --text-key and --record-key, or allow more"
        )


def _join_chunks(
    plan: Plan,
    jobs: Sequence[ChunkJob],
    records: Sequence[Finished[ChunkResult]],
    counts: Counts,
    damaged: Mapping[str, str],
) -> WrittenCorpus:
    """Write the corpus of finished jobs, which are in order, by processes of this machine.

    Args:
        damaged: Why input files are left out, by label.

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
                name: QuarantinedInput(version.bytes, damaged[name])
                for name, version in zip(map(input_label, plan.versions), plan.versions.values(), strict=True)
                if name in damaged
            },
        ),
        folder=plan.files.partial,
        workers=settings.workers if settings.executor == "local" else min(settings.workers or here, here),
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
