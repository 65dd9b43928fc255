"""Raw shards to one corpus: parts of shards are tokenised, by worker processes if asked, and joined in shard order.

The corpus, its manifest and its rejects are the same for any number of workers. Results travel through files in
PREFIX.partial, so the parent only concatenates. A worker that dies ends the run, and nothing is left of a failed run.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_neobert.data.corpus_format import CorpusFiles, FileRecord, Manifest, corpus_files
from megatron_neobert.data.corpus_writer import CorpusWriter, refuse_existing
from megatron_neobert.data.part_tasks import Counts, PartResult, PartTask, tokenize_part
from megatron_neobert.data.text_shards import ShardPart, check_text_key, find_shards, split_into_parts
from megatron_neobert.data.tokenizer import Tokenizer, load_tokenizer
from megatron_neobert.data.workers import run_in_workers
from megatron_neobert.errors import ConfigError, DataError

_RATE_AFTER_RECORDS = 10_000  # the error rate of fewer records is not judged before the end


@dataclass(frozen=True)
class PreprocessSettings:
    """What the command line of tools/preprocess_data.py says."""

    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer_model: str
    text_key: str = "content"
    workers: int = 1
    on_error: Literal["skip", "fail"] = "skip"
    max_error_rate: float = 0.001
    overwrite: bool = False


@dataclass(frozen=True)
class Plan:
    """What a run will read and write."""

    settings: PreprocessSettings
    tokenizer: Tokenizer
    shards: list[Path]
    parts: list[ShardPart]
    files: CorpusFiles


@dataclass(frozen=True)
class PreprocessReport:
    """What a run has written."""

    manifest: Manifest
    files: CorpusFiles
    counts: Counts
    seconds: float


def plan_preprocessing(settings: PreprocessSettings) -> Plan:
    """Finds shards and tokenizer, and whatever would make the run fail early, without writing anything.

    Raises:
        MissingInputError: An input or the tokenizer does not exist.
        OutputError: The corpus exists and may not be overwritten.
        DataError: The tokenizer or a shard's format is unusable, or the first shard has no such column.
        ConfigError: The output of an earlier run is among the inputs.
    """
    files = corpus_files(f"{settings.output_prefix}_{settings.text_key}_document")
    refuse_existing(files, overwrite=settings.overwrite)
    tokenizer = load_tokenizer(settings.tokenizer_model)
    shards = find_shards(settings.inputs)
    own = {file.resolve() for file in files} & {shard.resolve() for shard in shards}
    if own:
        raise ConfigError(f"--input matches {min(own)}, which belongs to --output-prefix; write to another folder")
    parts = [part for shard in shards for part in split_into_parts(shard)]
    check_text_key(parts[0], text_key=settings.text_key)
    return Plan(settings, tokenizer, shards, parts, files)


def preprocess(plan: Plan, *, on_progress: Callable[[Counts], None]) -> PreprocessReport:
    """Writes the corpus; `on_progress` gets the counts so far after every batch.

    Raises:
        DataError: Too many records are in error, a shard is damaged, or there is no document at all.
        ChildProcessError: A worker process died.
    """
    started = time.monotonic()
    settings = plan.settings
    seen = Counts()

    def report(more: Counts) -> None:
        seen.add(more)
        on_progress(seen)

    counts, inputs, first_error = Counts(), dict[str, FileRecord](), None
    with CorpusWriter(plan.files, plan.tokenizer, overwrite=settings.overwrite) as writer:
        tasks = [_task(plan, number, writer.folder) for number in range(len(plan.parts))]
        with closing(run_tasks(tasks, workers=settings.workers, report=report)) as results:
            for result in _in_order(results):
                task = tasks[result.number]
                writer.append_part(task.file("ids"), task.file("lengths"), task.file("rejects"))
                counts.add(result.counts)
                if result.shard:
                    inputs[str(task.part.path)] = result.shard
                first_error = first_error or result.first_error
                if counts.records >= _RATE_AFTER_RECORDS:
                    _check_error_rate(counts, first_error, settings.max_error_rate)
        _check_error_rate(counts, first_error, settings.max_error_rate)
        if not counts.documents:
            raise DataError(
                f"no document in {len(inputs)} shards ({describe_rejects(counts) or 'no records'}); a corpus needs at "
                "least one. Check --input and --text-key"
            )
        manifest = writer.commit(
            inputs=inputs,
            text_key=settings.text_key,
            unknown_tokens=counts.unknown_tokens,
            repaired_documents=counts.repaired_documents,
            rejected=dict(sorted(counts.rejected.items())),
        )
    return PreprocessReport(manifest, plan.files, counts, time.monotonic() - started)


def run_tasks(
    tasks: Sequence[PartTask], *, workers: int, report: Callable[[Counts], None]
) -> Generator[PartResult, None, None]:
    """Results in the order in which they finish. One worker is this process: nothing to start, nothing to send."""
    if workers == 1:
        for task in tasks:
            yield tokenize_part(task, report)
    else:
        yield from run_in_workers(tokenize_part, tasks, workers=workers, on_report=report)


def describe_rejects(counts: Counts) -> str:
    """ "12 malformed JSON, 3 empty text", the most frequent reason first."""
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.rejected.most_common())


def _task(plan: Plan, number: int, folder: Path) -> PartTask:
    return PartTask(
        number=number,
        part=plan.parts[number],
        tokenizer_model=plan.settings.tokenizer_model,
        fingerprint=plan.tokenizer.fingerprint,
        text_key=plan.settings.text_key,
        on_error=plan.settings.on_error,
        folder=folder,
    )


def _in_order(results: Iterator[PartResult]) -> Iterator[PartResult]:
    early: dict[int, PartResult] = {}
    following = 0
    for result in results:
        early[result.number] = result
        while following in early:
            yield early.pop(following)
            following += 1


def _check_error_rate(counts: Counts, first_error: str | None, max_error_rate: float) -> None:
    if counts.errors > max_error_rate * counts.records:
        raise DataError(
            f"{counts.errors:,} of {counts.records:,} records have no usable text "
            f"({counts.errors / counts.records:.2%}), more than --max-error-rate {max_error_rate} allows "
            f"({describe_rejects(counts)}); the first: {first_error}. Mend the shards, check --text-key, or allow more"
        )
