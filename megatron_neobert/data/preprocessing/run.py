"""Preprocess input files to one corpus: tokenize the chunks in local processes or on a Ray cluster, then join them.

The corpus, its manifest and its rejects are the same for any number of workers, any executor, and after any restart.
Finished chunks are kept in PREFIX.partial, so that a resumed run does not repeat them.
"""

import time
from dataclasses import dataclass

from megatron_neobert.data.corpus.format import Counts, Manifest, QuarantinedInput, describe_reasons
from megatron_neobert.data.corpus.writer import TokenizedChunk, refuse_existing, write_corpus
from megatron_neobert.data.inputs.find import input_label
from megatron_neobert.data.preprocessing.chunks import cache_encoder, tokenize_chunk
from megatron_neobert.data.preprocessing.plan import Plan, refuse_damaged
from megatron_neobert.errors import DataError
from megatron_neobert.runtime.jobs import Finished, JobFolder, JobRunner, finish_jobs
from megatron_neobert.text import counted, percent

# A run ends early if most of at least this many records are errors, as with a wrong --text-key.
_EARLY_END_RECORDS = 10_000


@dataclass(frozen=True)
class PreprocessReport:
    """Result of a run."""

    manifest: Manifest
    counts: Counts  # of all chunks, including the chunks of an earlier run
    seconds: float


def preprocess(plan: Plan) -> PreprocessReport:
    """Tokenize the unfinished chunks, write the corpus of all chunks, and remove PREFIX.partial.

    After an error, finished chunks stay in PREFIX.partial for --resume, unless no chunk has a document. Raise DataError
    if too many records are in error, there is no document, or input files are damaged. Damaged files are reported
    together after all other files are finished.
    """
    started, settings = time.monotonic(), plan.settings
    with JobFolder(plan.files.partial) as folder, JobRunner(settings.jobs) as runner:
        # A killed run may have given some of its files their final names already.
        was_renaming = settings.jobs.resume and folder.has_begun
        refuse_existing(plan.files, overwrite=settings.overwrite or was_renaming)
        folder.begin(plan.chunk_settings, resume=settings.jobs.resume, overwrite=settings.overwrite)
        cache_encoder(plan.encoder)
        jobs, counts, first_error = plan.jobs(), Counts(), None
        # By name of the job: the record of a finished chunk, or the reason why its input file is damaged.
        outcomes: dict[str, Finished[TokenizedChunk] | str] = {}
        for job, outcome in finish_jobs(jobs, runner, label="input files", function=tokenize_chunk):
            outcomes[job.name] = outcome
            if isinstance(outcome, str):
                continue
            counts.add(outcome.result.counts)
            first_error = first_error or outcome.result.first_error
            if 2 * counts.errors > counts.records >= _EARLY_END_RECORDS or not settings.max_error_rate:
                check_error_rate(counts, settings.max_error_rate, first_error)
        reasons = dict(plan.damaged)
        for job in jobs:
            if isinstance(reason := outcomes[job.name], str):
                reasons.setdefault(job.input_name, reason)
        versions = {input_label(path): version for path, version in plan.versions.items()}
        damaged = {name: reasons[name] for name in versions if name in reasons}
        refuse_damaged(plan, damaged)
        # In the order of the plan, and without the sound chunks of damaged files.
        in_order = (outcomes[job.name] for job in jobs if job.input_name not in damaged)
        chunks = [chunk for chunk in in_order if not isinstance(chunk, str)]
        counts = Counts()
        for chunk in chunks:
            counts.add(chunk.result.counts)
        if not counts.documents:
            folder.remove()  # no chunk has a document
        first_error = next((chunk.result.first_error for chunk in chunks if chunk.result.first_error), None)
        check_error_rate(counts, settings.max_error_rate, first_error)
        if not counts.documents:
            raise DataError(
                f"no document in {counted(len(plan.versions), 'input file')} ({counts.records:,} records: "
                f"{describe_reasons(counts.rejected | counts.dropped)}); a corpus needs at least one document. Check "
                "--input, --text-key and the filters"
            )
        manifest = write_corpus(
            chunks,
            plan.files,
            plan.encoder.tokenizer,
            shard_bytes=settings.shard_size,
            runner=runner,
            text_key=settings.read.text_key,
            filters=plan.filters,
            quarantined={name: QuarantinedInput(versions[name].bytes, reason) for name, reason in damaged.items()},
        )
        folder.remove()
    return PreprocessReport(manifest, counts, time.monotonic() - started)


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
