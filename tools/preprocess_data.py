"""Turns raw shards (parquet, JSON lines, plain or gzip) into a corpus that training and Megatron read.

    python tools/preprocess_data.py --input 'shards/*.parquet' --output-prefix corpus/web --tokenizer-model vocab.txt

writes corpus/web_content_document.bin, .idx and .json, byte for byte the same for any --workers.
"""

import argparse
import sys
import time
from itertools import groupby

from megatron_neobert.data.corpus_format import token_dtype
from megatron_neobert.data.part_tasks import Counts
from megatron_neobert.data.preprocess import (
    Plan,
    PreprocessReport,
    PreprocessSettings,
    describe_rejects,
    plan_preprocessing,
    preprocess,
)
from megatron_neobert.errors import run_command

# English web text in bert-base-uncased has below 0.1 % of [UNK]; above this the vocabulary is of another language.
_UNKNOWN_WARNING = 0.02


def main() -> None:
    arguments = parse_arguments()
    settings = PreprocessSettings(
        inputs=tuple(arguments.input),
        output_prefix=arguments.output_prefix,
        tokenizer_model=arguments.tokenizer_model,
        text_key=arguments.text_key,
        workers=arguments.workers,
        on_error=arguments.on_error,
        max_error_rate=arguments.max_error_rate,
        overwrite=arguments.overwrite,
    )
    plan = plan_preprocessing(settings)
    if arguments.dry_run:
        print_plan(plan)
        return
    with ProgressLine() as progress:
        report = preprocess(plan, on_progress=progress.show)
    print_report(report)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Tokenize raw shards into PREFIX_KEY_document.bin, .idx and .json.", allow_abbrev=False
    )
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="PATH", help="shards: files, globs ('**' descends), folders"
    )
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="_KEY_document is appended, by --text-key"
    )
    parser.add_argument(
        "--tokenizer-model", required=True, metavar="PATH", help="vocab.txt, tokenizer.json, or a folder with either"
    )
    parser.add_argument("--text-key", default="content", help="column or JSON key of the text (%(default)s)")
    parser.add_argument("--workers", type=_positive, default=1, metavar="N", help="processes, one core each (1)")
    parser.add_argument(
        "--on-error",
        choices=("skip", "fail"),
        default="skip",
        help="a record without usable text is left out, counted, and listed in PREFIX_KEY_document.rejects.jsonl; "
        "or it ends the run (%(default)s). Empty texts are always left out",
    )
    parser.add_argument(
        "--max-error-rate",
        type=_fraction,
        default=0.001,
        metavar="RATE",
        help="end the run if more than this fraction of the records is left out, empty texts aside (%(default)s)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing corpus")
    parser.add_argument("--dry-run", action="store_true", help="say what would be read and written, and write nothing")
    return parser.parse_args()


def print_plan(plan: Plan) -> None:
    for shard, parts in groupby(plan.parts, key=lambda part: part.path):
        formats = [part.format for part in parts]
        in_parts = f" in {len(formats)} parts" if len(formats) > 1 else ""
        print(f"{shard} | {formats[0]} | {shard.stat().st_size / 1e6:,.1f} MB{in_parts}")
    tokenizer = plan.tokenizer
    size = sum(shard.stat().st_size for shard in plan.shards)
    print(f"{len(plan.shards):,} shards, {size / 1e6:,.1f} MB; text in '{plan.settings.text_key}'")
    print(f"tokenizer {tokenizer.fingerprint[:12]}, {tokenizer.vocab_size:,} ids, {token_dtype(tokenizer.vocab_size)}")
    print(f"would write {plan.files.bin}, {plan.files.idx.name}, {plan.files.manifest.name}")


def print_report(report: PreprocessReport) -> None:
    counts, files = report.counts, report.files
    if counts.unknown_tokens > _UNKNOWN_WARNING * counts.tokens:
        share = counts.unknown_tokens / counts.tokens
        print(f"warning: {share:.1%} of the tokens are unknown; is the vocabulary of this language?", file=sys.stderr)
    repaired = f" | {counts.repaired_documents:,} repaired (U+FFFD)" if counts.repaired_documents else ""
    megabytes = counts.utf8_bytes / 1e6
    print(
        f"{counts.documents:,} documents | {counts.tokens:,} tokens | "
        f"{megabytes:,.1f} MB of text in {report.seconds:.1f} s, {megabytes / report.seconds:.2f} MB/s | "
        f"rejected: {describe_rejects(counts) or 'none'}{repaired}"
    )
    rejects = f", {files.rejects.name}" if counts.rejected else ""
    print(f"wrote {files.bin}, {files.idx.name}, {files.manifest.name}{rejects}")


class ProgressLine:
    """One line on standard error: rewritten twice a second on a terminal, a new one every minute in a log."""

    def __enter__(self) -> "ProgressLine":
        self._terminal = sys.stderr.isatty()
        self._interval_seconds = 0.5 if self._terminal else 60.0
        self._started = self._shown = time.monotonic()
        return self

    def show(self, counts: Counts) -> None:
        now = time.monotonic()
        if now - self._shown < self._interval_seconds:
            return
        self._shown = now
        megabytes = counts.utf8_bytes / 1e6
        line = (
            f"{counts.documents:,} documents | {counts.tokens / 1e6:,.1f} M tokens | {megabytes:,.1f} MB | "
            f"{megabytes / (now - self._started):.2f} MB/s | {counts.rejected.total():,} rejected"
        )
        print(f"\r\033[K{line}" if self._terminal else line, end="" if self._terminal else "\n", file=sys.stderr)
        sys.stderr.flush()

    def __exit__(self, *_: object) -> None:
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a number of processes; use 1 or more")
    return number


def _fraction(text: str) -> float:
    number = float(text)
    if not 0.0 <= number <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not a fraction of the records; use 0 to 1")
    return number


if __name__ == "__main__":
    run_command(main)
