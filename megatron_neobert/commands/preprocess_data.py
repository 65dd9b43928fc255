"""Turn raw input files into a corpus that training and Megatron read.

    neobert preprocess --input 'shards/*.parquet' --output-prefix corpus/web --tokenizer-model vocab.txt

writes corpus/web_content_document.bin, .idx and .json, byte for byte the same for any --workers, --executor and
restart (--resume).
"""

import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from types import FrameType

from megatron_neobert.data.corpus.format import token_dtype
from megatron_neobert.data.preprocessing.plan import (
    Plan,
    PreprocessSettings,
    is_complete,
    open_job_folder,
    plan_preprocessing,
)
from megatron_neobert.data.preprocessing.preview import preview
from megatron_neobert.data.preprocessing.run import PreprocessReport, Progress, preprocess, start_workers
from megatron_neobert.errors import EXIT_STOPPED_EARLY, DataError
from megatron_neobert.text import counted, duration, percent, visible, with_prefix

# English web text in bert-base-uncased has below 0.1 % of [UNK]; above this the vocabulary is of another language.
_UNKNOWN_WARNING = 0.02
_SHARDS_SHOWN = 20  # by --dry-run; more are counted


class StopRequested(KeyboardInterrupt):
    """SIGTERM or SIGUSR1, as schedulers send them before the time is up."""


def preprocess_data(options: PreprocessSettings) -> int:
    """Turn raw input files into a corpus that training and Megatron read.

    The corpus is the same byte for byte for any --workers, --executor and restart (--resume).
    """
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGUSR1, _stop)
    keys = options.read.record_keys
    if options.filter or keys:  # a filter may want the number of a record alone
        keys = tuple(dict.fromkeys(keys or ()))
    settings = replace(options, read=replace(options.read, record_keys=keys))
    try:
        run(settings)
    except StopRequested as stop:
        kept = describe_kept_chunks(settings) or "no chunk was finished"
        print(f"stopped by {signal.Signals(stop.args[0]).name}: {kept}", file=sys.stderr)
        return EXIT_STOPPED_EARLY
    except (DataError, OSError, KeyboardInterrupt) as error:
        if isinstance(error, OSError) and error.errno and not error.filename:  # a write that failed: the disk is full
            error.filename = str(settings.files.partial)
        if kept := describe_kept_chunks(settings):
            print(f"not finished: {kept}", file=sys.stderr)
        raise
    return 0


def run(settings: PreprocessSettings) -> None:
    """Preprocess, or print the plan of a dry run, and print what was written."""
    if settings.dry_run:
        print_plan(plan_preprocessing(settings))
        return
    pool = start_workers(settings)
    try:
        plan = plan_preprocessing(settings)
        if settings.resume and is_complete(plan):
            open_job_folder(plan.files).sweep()
            print(f"{plan.files.manifest} is complete; nothing to do")
            return
        with ProgressLine() as progress:
            report = preprocess(plan, on_progress=progress.show, pool=pool)
        print_report(plan, report)
    finally:
        if pool:
            pool.close()


def describe_kept_chunks(settings: PreprocessSettings) -> str:
    """Return the number and the place of finished chunks, or nothing if there is none."""
    folder = open_job_folder(settings.files)
    chunks = folder.count_finished()
    return f"{chunks:,} finished chunks are kept in {folder.path}; --resume continues from there" if chunks else ""


def _stop(number: int, frame: FrameType | None) -> None:
    for following in (signal.SIGTERM, signal.SIGUSR1):  # the second must not disturb the cleaning up after the first
        signal.signal(following, signal.SIG_IGN)
    raise StopRequested(number)


def print_plan(plan: Plan) -> None:
    shards = [(path, list(chunks)) for path, chunks in groupby(plan.chunks, key=lambda chunk: chunk.path)]
    for path, chunks in shards[:_SHARDS_SHOWN]:
        compression = f", {chunks[0].compression}" if chunks[0].compression else ""
        in_chunks = f" in {len(chunks)} chunks" if len(chunks) > 1 else ""
        size = with_prefix(plan.versions[path].bytes, "B")
        print(f"{visible(plan.input_name(path))} | {chunks[0].format}{compression} | {size}{in_chunks}")
    if len(shards) > _SHARDS_SHOWN:
        print(f"... and {len(shards) - _SHARDS_SHOWN:,} more")
    for reason in plan.damaged.values():
        print(f"left out by --quarantine: {visible(reason)}")
    total = sum(version.bytes for version in plan.versions.values())
    print(f"{len(shards):,} shards, {with_prefix(total, 'B')}; text in '{plan.settings.read.text_key}'")
    tokenizer = plan.tokenizer
    print(
        f"tokenizer {tokenizer.fingerprint[:12]}, {tokenizer.vocab_size:,} ids, {token_dtype(tokenizer.vocab_size)}, "
        f"by {plan.encoder.name}" + (f" ({plan.encoder.note})" if plan.encoder.note else "")
    )
    estimate = preview(plan)
    for text, ids in estimate.examples:
        line = " ".join(text[:400].split())
        print(f"text  {visible(line if len(line) <= 100 else f'{line[:97]}...')}")
        print(f"ids   {' '.join(map(str, ids[:16]))}{' ...' if len(ids) > 16 else ''}  ({len(ids):,} in all)")
    workers = plan.settings.workers or 1
    print(
        f"estimated from a sample: {estimate.documents:,.0f} documents, {estimate.tokens:,.0f} tokens, "
        f"{with_prefix(estimate.bin_bytes, 'B')} of .bin (twice while it is joined), "
        f"{duration(estimate.core_seconds / workers)} with {counted(workers, 'worker')}"
    )
    place = next(folder for folder in plan.files.bin.absolute().parents if folder.exists())
    print(f"free at {place}: {with_prefix(shutil.disk_usage(place).free, 'B')}")
    print(f"would write {plan.files.bin}, {plan.files.idx.name}, {plan.files.manifest.name}")


def print_report(plan: Plan, report: PreprocessReport) -> None:
    counts = report.counts
    for reason in report.damaged:
        print(f"warning: left out by --quarantine: {visible(reason)}", file=sys.stderr)
    if report.mismatch:
        print(f"warning: all chunks were done by the reference tokenizer: {visible(report.mismatch)}", file=sys.stderr)
    if plan.encoder.note:
        print(f"note: {plan.encoder.note}", file=sys.stderr)
    if counts.unknown_tokens > _UNKNOWN_WARNING * counts.tokens:
        share = counts.unknown_tokens / counts.tokens
        print(
            f"warning: {percent(share)} of the tokens are unknown; is the vocabulary of this language?", file=sys.stderr
        )
    megabytes = report.new_text_bytes / 1e6
    speed = f"{megabytes:,.1f} MB of text in {report.seconds:.1f} s, {megabytes / report.seconds:.2f} MB/s | "
    print(
        f"{counts.documents:,} documents | {counts.tokens:,} tokens | {speed if report.new_text_bytes else ''}"
        f"{', '.join(report.encoders)}"
    )
    for manifest in filter(None, (report.written.manifest, report.written.validation)):
        for name, value in manifest.describe().items():
            print(f"  {name:<18} {value}")
    volumes = report.written.manifest.volumes
    pairs = f"{volumes[0].name}.bin, .idx" + (f" to {volumes[-1].name}.bin, .idx" if len(volumes) > 1 else "")
    rejects = f", {plan.files.rejects.name}" if counts.rejected else ""
    print(f"wrote {plan.files.manifest}, {pairs}{rejects}")


class ProgressLine:
    """One line on standard error: rewritten twice a second on a terminal, a new one every minute in a log."""

    def __enter__(self) -> "ProgressLine":
        self._terminal = sys.stderr.isatty()
        self._interval_seconds = 0.5 if self._terminal else 60.0
        self._started = self._shown = time.monotonic()
        return self

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._shown < self._interval_seconds:
            return
        self._shown = now
        line = self._describe(progress, now - self._started)
        with suppress(OSError):  # nobody reads it any more; the run continues
            print(f"\r\033[K{line}" if self._terminal else line, end="" if self._terminal else "\n", file=sys.stderr)
            sys.stderr.flush()

    def _describe(self, progress: Progress, seconds: float) -> str:
        counts, done = progress.counts, progress.read_bytes
        if progress.joined_bytes:
            return f"joining the chunks: {with_prefix(progress.joined_bytes, 'B')} of token ids"
        new = done - progress.taken_over_bytes
        megabytes = new / 1e6 / seconds
        left = (progress.input_bytes - done) * seconds / new if new else 0.0
        return (
            f"{percent(progress.read_share):>7} | {counts.documents:,} documents | "
            f"{counts.tokens / 1e6:,.1f} M tokens | {megabytes:.2f} MB/s read | {duration(left)} left | "
            f"{counts.errors:,} rejected"
        )

    def __exit__(self, *_: object) -> None:
        if self._terminal:
            with suppress(OSError):
                print("\r\033[K", end="", file=sys.stderr, flush=True)
