"""Finished parts become the corpus, its volumes written by the workers of this machine."""

import os
from collections.abc import Callable, Mapping, Sequence

from megatron_neobert.data.corpus.format import BackendRecord, InputRecord, QuarantinedShard, draft_manifest
from megatron_neobert.data.corpus.joining import OutputSettings, PartFiles, write_volume_of
from megatron_neobert.data.corpus.writer import WrittenCorpus, write_corpus
from megatron_neobert.data.preprocessing.job import Counts, PartResult, PartTask
from megatron_neobert.data.preprocessing.plan import Plan, PreprocessSettings
from megatron_neobert.data.preprocessing.workers import run_tasks


def join_parts(
    plan: Plan,
    tasks: Sequence[PartTask],
    results: Sequence[PartResult],
    counts: Counts,
    damaged: Mapping[str, str],
    *,
    on_bytes: Callable[[int], None],
) -> WrittenCorpus:
    """Writes the corpus.

    Args:
        tasks: All parts that are in it, in order.
        results: What became of each.
        counts: Of all of them.
        damaged: Why shards are left out, by path or URL.
        on_bytes: Called with the bytes of token ids dealt with since the last call.

    Raises:
        DataError: No document is left for the corpus, or none is held out for validation.
        ChildProcessError: A worker process died.
    """
    settings = plan.settings
    inputs = {
        task.shard_name: InputRecord(task.shard.bytes, result.shard_sha256)
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
            write_volume_of, tasks, workers=_processes(settings), on_report=on_report
        ),
        on_progress=on_bytes,
    )


def _processes(settings: PreprocessSettings) -> int:
    """Those of this machine, where the workers of a Ray cluster are not."""
    here = len(os.sched_getaffinity(0))
    return settings.workers or 1 if settings.executor == "local" else min(settings.workers or here, here)


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
