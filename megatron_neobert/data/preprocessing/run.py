"""Raw input files to one corpus: chunks are tokenized, by local processes or on a Ray cluster, and then joined.

The corpus, its manifest and its rejects are the same for any number of workers, executor and restart. Finished chunks
are kept in PREFIX.partial, so what a killed run has done is not done again.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from megatron_neobert.data.corpus.format import (
    BackendRecord,
    InputRecord,
    QuarantinedShard,
    describe_reasons,
    draft_manifest,
)
from megatron_neobert.data.corpus.shard_job import ChunkFiles
from megatron_neobert.data.corpus.writer import OutputSettings, WrittenCorpus, refuse_existing, write_corpus
from megatron_neobert.data.inputs.find import input_label
from megatron_neobert.data.preprocessing.chunks import ChunkJob, ChunkResult, remember, tokenize_chunk
from megatron_neobert.data.preprocessing.counts import Counts, check_error_rate
from megatron_neobert.data.preprocessing.plan import Plan, refuse_damaged
from megatron_neobert.errors import DataError
from megatron_neobert.runtime.jobs import Finished, JobFolder, progress_bar, read_all_finished, run_jobs
from megatron_neobert.text import counted

_HOPELESS_AFTER_RECORDS = 10_000  # before that a share of errors says little
# Times as many errors as all of the input may have if the rest is faultless: it is an estimate, and must not be wrong.
_HOPELESS = 2.0


@dataclass(frozen=True)
class PreprocessReport:
    """Result of a run."""

    written: WrittenCorpus
    counts: Counts  # of all chunks, those of an earlier run included
    new_text_bytes: int  # UTF-8, without those
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
        jobs = plan.jobs()
        finished = {job.name: record for job, record in zip(jobs, read_all_finished(jobs), strict=True) if record}
        taken_over = set(finished)
        reasons = plan.damaged | _tokenize_missing(plan, jobs, finished)
        damaged = {name: reasons[name] for name in map(input_label, plan.versions) if name in reasons}
        refuse_damaged(plan, damaged)
        jobs = [job for job in jobs if job.input_name not in damaged]
        results = [finished[job.name].result for job in jobs]
        counts, first_error = _count(results)
        if not counts.documents:
            folder.remove()  # there is nothing in it that could be of use
        check_error_rate(counts, settings.max_error_rate, first_error)
        if not counts.documents:
            raise DataError(
                f"no document in {counted(len(plan.versions), 'shard')} ({counts.records:,} records: "
                f"{describe_reasons(counts.rejected + counts.dropped)}); a corpus needs at least one. Check "
                "--input, --text-key and the filters"
            )
        written = _join_chunks(plan, jobs, [finished[job.name] for job in jobs], counts, damaged)
        folder.remove()
    new = (result.counts for job, result in zip(jobs, results, strict=True) if job.name not in taken_over)
    return PreprocessReport(
        written=written,
        counts=counts,
        new_text_bytes=sum(each.utf8_bytes for each in new),
        seconds=time.monotonic() - started,
        damaged=list(damaged.values()),
    )


def _tokenize_missing(
    plan: Plan, jobs: Sequence[ChunkJob], finished: dict[str, Finished[ChunkResult]]
) -> dict[str, str]:
    """Do the chunks that are not finished, and add their records.

    Returns:
        Why input files are damaged, by label; of an input file with several damaged chunks the first.

    Raises:
        DataError: The run would have too many errors even if everything that is left were faultless.
    """
    settings = plan.settings
    remember(plan.tokenizer, plan.encoder)
    input_bytes = {job.name: plan.input_bytes(chunk) for job, chunk in zip(jobs, plan.chunks, strict=True)}
    counts, first_error = _count([record.result for record in finished.values()])
    damaged: dict[str, str] = {}
    results = run_jobs(
        tokenize_chunk,
        [job for job in jobs if job.name not in finished],
        workers=settings.workers,
        executor=settings.executor,
        ray_address=settings.ray_address,
    )
    total, before = sum(input_bytes.values()), sum(input_bytes[name] for name in finished)
    done = before
    with closing(results), progress_bar(total=total, initial=before, unit="B", unit_scale=True) as bar:
        for job, outcome in results:
            done += input_bytes[job.name]
            bar.update(input_bytes[job.name])
            if isinstance(outcome, str):
                damaged[job.name] = outcome
                continue
            finished[job.name] = outcome
            counts.add(outcome.result.counts)
            first_error = first_error or outcome.result.first_error
            bar.set_postfix_str(f"{counts.documents:,} documents, {counts.errors:,} rejected", refresh=False)
            if counts.records >= _HOPELESS_AFTER_RECORDS or not settings.max_error_rate:
                most_records = _HOPELESS * counts.records * max(1.0, total / max(done, 1))
                check_error_rate(counts, settings.max_error_rate, first_error, records=most_records)
    return {job.input_name: damaged[job.name] for job in reversed(jobs) if job.name in damaged}


def _count(results: Sequence[ChunkResult]) -> tuple[Counts, str | None]:
    """Return the sum of the counts, and the first error among the results."""
    counts = Counts()
    for result in results:
        counts.add(result.counts)
    return counts, next((result.first_error for result in results if result.first_error), None)


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
                name: QuarantinedShard(version.bytes, damaged[name])
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
