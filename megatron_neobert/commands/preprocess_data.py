"""Turns raw shards into a corpus that training and Megatron read.

    neobert preprocess --input 'shards/*.parquet' --output-prefix corpus/web --tokenizer-model vocab.txt

writes corpus/web_content_document.bin, .idx and .json, byte for byte the same for any --workers, --executor and
restart (--resume).
"""

import argparse
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import MISSING, fields
from itertools import groupby
from types import FrameType
from typing import TYPE_CHECKING, Any, get_args

from megatron_neobert.config.schema import TOKENIZER_TYPES
from megatron_neobert.errors import EXIT_STOPPED_EARLY, CommandParser, ConfigError, DataError
from megatron_neobert.text import counted, duration, percent, visible, with_prefix

if TYPE_CHECKING:  # Ctrl-C during imports, and a missing package, are answered for by run_command
    from megatron_neobert.data.preprocessing.plan import Plan, PreprocessSettings
    from megatron_neobert.data.preprocessing.run import PreprocessReport, Progress

# English web text in bert-base-uncased has below 0.1 % of [UNK]; above this the vocabulary is of another language.
_UNKNOWN_WARNING = 0.02
_SHARDS_SHOWN = 20  # by --dry-run; more are counted


class StopRequested(KeyboardInterrupt):
    """SIGTERM or SIGUSR1, as schedulers send them before the time is up."""


def main() -> int:
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGUSR1, _stop)
    arguments = parse_arguments()
    settings = read_settings(arguments)
    try:
        run(settings, dry_run=arguments.dry_run)
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


def run(settings: "PreprocessSettings", *, dry_run: bool) -> None:
    from megatron_neobert.data.preprocessing.plan import is_complete, open_job_folder, plan_preprocessing
    from megatron_neobert.data.preprocessing.run import preprocess, start_workers

    if dry_run:
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


def describe_kept_chunks(settings: "PreprocessSettings") -> str:
    """Return the number and the place of finished chunks, or nothing if there is none."""
    from megatron_neobert.data.preprocessing.plan import open_job_folder

    folder = open_job_folder(settings.files)
    chunks = folder.count_finished()
    return f"{chunks:,} finished chunks are kept in {folder.path}; --resume continues from there" if chunks else ""


def _stop(number: int, frame: FrameType | None) -> None:
    for following in (signal.SIGTERM, signal.SIGUSR1):  # the second must not disturb the cleaning up after the first
        signal.signal(following, signal.SIG_IGN)
    raise StopRequested(number)


def read_settings(arguments: argparse.Namespace) -> "PreprocessSettings":
    from megatron_neobert.data.inputs.records import ReadSettings
    from megatron_neobert.data.preprocessing.plan import STANDARD_INPUT, PreprocessSettings

    given: dict[str, Any] = {**vars(arguments), "inputs": tuple(arguments.inputs)}
    if given.pop("dry_run") and STANDARD_INPUT in given["inputs"]:
        raise ConfigError("--dry-run cannot look at standard input and leave it there; write some of it to a file")
    given["filter"] = tuple(given["filter"] or ())
    if given["filter"] or given["record_keys"]:
        given["record_keys"] = tuple(dict.fromkeys(given["record_keys"] or ()))
    read = ReadSettings(**{setting.name: given.pop(setting.name) for setting in fields(ReadSettings)})
    return PreprocessSettings(read=read, **given)


def parse_arguments() -> argparse.Namespace:
    from megatron_neobert.data.inputs.records import ReadSettings
    from megatron_neobert.data.inputs.stream import Format
    from megatron_neobert.data.preprocessing.plan import PreprocessSettings

    parser = CommandParser(__doc__)
    # A flag has the default of the setting that is called like it.
    settings = (*fields(ReadSettings), *fields(PreprocessSettings))
    parser.set_defaults(**{setting.name: setting.default for setting in settings if setting.default is not MISSING})

    add = parser.add_argument_group("what is read").add_argument
    add(
        "--input",
        dest="inputs",
        nargs="+",
        required=True,
        metavar="PATH",
        help="shards: files, globs ('**' descends), folders, URLs (s3://, gs://, hf://), @FILE with one per line, or - "
        "for standard input. Recognised by content: parquet, Arrow and save_to_disk folders, JSON lines, plain "
        "text, WARC and WET, compressed by gzip, zstd, bzip2 or xz or not",
    )
    add("--text-key", help="column or JSON key of the text; a.b is b inside a (%(default)s)")
    add(
        "--input-format",
        choices=("auto", *get_args(Format)),
        help="where the content is not to be asked (%(default)s)",
    )
    add(
        "--text-separator",
        type=_separator,
        metavar="STRING",
        help=r"between the documents of a plain text file: '\n' for one a line, '\n\n' for empty lines; without it a "
        "file is one document",
    )
    add(
        "--max-document-bytes",
        type=_bytes,
        metavar="SIZE",
        help=f"longer documents are rejected; bounds the memory ({ReadSettings.max_document_bytes >> 20}MiB)",
    )

    add(
        "--record-key",
        dest="record_keys",
        action="append",
        metavar="KEY",
        help="a field of the records (column, JSON key, WARC header) that is kept as an attribute of each document, "
        "by which training can choose (--data-path PREFIX:where=EXPRESSION), and that filters see; repeatable",
    )

    add = parser.add_argument_group("how it is tokenized").add_argument
    add(
        "--tokenizer-model",
        required=True,
        metavar="PATH",
        help="vocab.txt, tokenizer.json, SentencePiece's tokenizer.model, or a folder with one of them",
    )
    add(
        "--tokenizer-type",
        choices=TOKENIZER_TYPES,
        help="Megatron's names (%(default)s: what the file is)",
    )
    add(
        "--tokenizer-backend",
        choices=("auto", "fast", "reference"),
        help="fast: nanotoken or gigatoken, checked against the reference all along, which takes over where they "
        "differ; auto: fast where installed (%(default)s)",
    )

    add = parser.add_argument_group("which documents are kept").add_argument
    add(
        "--filter",
        action="append",
        default=None,
        metavar="FILE.py:FUNCTION",
        help="called with each record, keeps, drops or rewrites it; or MODULE:FUNCTION. Repeatable, in this order",
    )
    add("--min-tokens", type=int, metavar="N", help="drop shorter documents (%(default)s)")
    add("--max-tokens", type=int, metavar="N", help="drop longer documents")
    add("--deduplicate", choices=("exact",), help="drop documents whose text has occurred before")
    add(
        "--split-validation",
        type=float,
        metavar="FRACTION",
        help="of the documents, chosen by their text, go to PREFIX_KEY_document_validation (%(default)s)",
    )
    add(
        "--on-error",
        choices=("skip", "fail"),
        help="a record without usable text is left out, counted, and listed in PREFIX_KEY_document.rejects.jsonl; "
        "or it ends the run (%(default)s). Empty texts are dropped and counted",
    )
    add(
        "--max-error-rate",
        type=float,
        metavar="FRACTION",
        help="end the run if more than this fraction of the records is in error (%(default)s)",
    )
    add(
        "--quarantine",
        action="store_true",
        help="leave damaged shards out, whole, and list them in the manifest; without it a run finishes all other "
        "shards, names every damaged one, and ends with exit code 65",
    )

    add = parser.add_argument_group("what is written").add_argument
    add("--output-prefix", required=True, metavar="PREFIX", help="_KEY_document is appended, by --text-key")
    add("--keep-shards", action="store_true", help="one .bin and .idx for each input shard, under one manifest")
    add("--shard-size", type=_bytes, metavar="SIZE", help="a new .bin and .idx after so many bytes, under one manifest")
    add("--overwrite", action="store_true", help="replace an existing corpus, and chunks of another run")
    add("--resume", action="store_true", help="keep what an earlier run of the same command has finished")
    add("--dry-run", action="store_true", help="print what would be read and written, and write nothing")

    add = parser.add_argument_group("where it runs").add_argument
    add("--workers", type=int, metavar="N", help="processes, one core each (1; with Ray as many as it has CPUs)")
    add("--executor", choices=("local", "ray"), help="(%(default)s)")
    add("--ray-address", metavar="ADDRESS", help="host:port of a cluster (RAY_ADDRESS; at first: a new one)")
    return parser.parse_args()


def print_plan(plan: "Plan") -> None:
    from megatron_neobert.data.corpus.format import token_dtype
    from megatron_neobert.data.preprocessing.preview import preview

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


def print_report(plan: "Plan", report: "PreprocessReport") -> None:
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

    def show(self, progress: "Progress") -> None:
        now = time.monotonic()
        if now - self._shown < self._interval_seconds:
            return
        self._shown = now
        line = self._describe(progress, now - self._started)
        with suppress(OSError):  # nobody reads it any more; the run continues
            print(f"\r\033[K{line}" if self._terminal else line, end="" if self._terminal else "\n", file=sys.stderr)
            sys.stderr.flush()

    def _describe(self, progress: "Progress", seconds: float) -> str:
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


def _bytes(text: str) -> int:
    number = text.rstrip("BKMGTi")
    unit = text[len(number) :]
    scales = {"": 1, "B": 1}
    scales |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)}
    scales |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)}
    try:
        size = int(float(number) * scales[unit])
    except (KeyError, ValueError, OverflowError):
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a size; use a number of bytes, or one like 10GB or 64MiB")
    return size


def _separator(text: str) -> str:
    try:
        separator = text.encode("latin-1", "backslashreplace").decode("unicode_escape")
        separator.encode()
    except UnicodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no text with escapes like \\n ({error})") from error
    return separator
