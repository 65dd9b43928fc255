"""The command `neobert preprocess`: tokenize raw input files into a corpus that this project and Megatron-LM read.

    neobert preprocess --input 'texts/*.parquet' --output-prefix corpus/web --tokenizer-model vocab.txt

writes corpus/web_content_document.bin, .idx and .json. This file has the dry run, the report and the stop signals; the
work is in `data/preprocessing`.
"""

import itertools
import shutil
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from itertools import groupby
from types import FrameType

import numpy as np

from megatron_neobert.data.corpus.attribute_columns import plain_value
from megatron_neobert.data.corpus.attributes import attribute_types
from megatron_neobert.data.corpus.format import Counts, token_dtype
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.inputs.find import input_label
from megatron_neobert.data.inputs.recognise import read_chunk
from megatron_neobert.data.inputs.records import RecordBatch
from megatron_neobert.data.preprocessing import run
from megatron_neobert.data.preprocessing.filters import apply_filters
from megatron_neobert.data.preprocessing.run import Plan, PreprocessSettings, is_complete, plan_preprocessing
from megatron_neobert.errors import EXIT_STOPPED_EARLY, DataError
from megatron_neobert.runtime.jobs import JobFolder
from megatron_neobert.text import counted, duration, percent, visible, with_prefix

# Share of [UNK], and of the text in them, that a vocabulary of another language exceeds. English web text has less than
# 0.1 % of [UNK] with bert-base-uncased.
_UNKNOWN_WARNING = 0.02
# --dry-run: text to tokenize, chunks to search for a document, and input files to list.
_SAMPLE_BYTES = 1 << 20
_SAMPLE_CHUNKS = 100
# Chunks, evenly spread over the input, whose first records are searched for the fields of --record-key.
_FIELD_CHUNKS = 16
_FILES_SHOWN = 20
_IN_FIRST_LINE = {"records", "documents", "tokens", "tokenized by"}  # rows of a manifest


class StopRequested(KeyboardInterrupt):
    """SIGTERM or SIGUSR1, which schedulers send before the time limit of a job."""


def preprocess(options: PreprocessSettings) -> int:
    """Tokenize raw input files into a corpus that training and Megatron-LM read.

    The corpus is byte for byte the same for any --workers and --executor, and after any restart with --resume.
    Return 0, or 75 if SIGTERM or SIGUSR1 ended the command; finished chunks are kept for --resume. With --dry-run, only
    print the plan.
    """
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGUSR1, _stop)
    try:
        plan = plan_preprocessing(options)
        if options.dry_run:
            print_plan(plan)
        elif options.jobs.resume and is_complete(plan):
            JobFolder(plan.settings.files.partial).sweep()  # left by a run that was killed at its very end
            advice = "; to change --shard-size, add --overwrite" if options.shard_size else ""
            print(f"{plan.settings.files.manifest} is complete; nothing to do{advice}")
        else:
            if plan.encoder.note:
                print(f"note: {plan.encoder.note}", file=sys.stderr)
            warn_of_absent_fields(plan)
            started = time.monotonic()
            counts = run.preprocess(plan)
            print_report(plan, counts, seconds=time.monotonic() - started)
    except (DataError, OSError, KeyboardInterrupt) as error:
        folder = JobFolder(options.files.partial)
        chunks = folder.count_finished()
        kept = f"{counted(chunks, 'finished chunk')} in {folder.path}; --resume continues from there"
        if isinstance(error, StopRequested):
            name = signal.Signals(error.args[0]).name
            print(f"stopped by {name}: {kept if chunks else 'no chunk was finished'}", file=sys.stderr)
            return EXIT_STOPPED_EARLY
        if chunks:
            print(f"not finished: {kept}", file=sys.stderr)
        raise
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    for stop_signal in (signal.SIGTERM, signal.SIGUSR1):  # a second signal must not interrupt the clean-up
        signal.signal(stop_signal, signal.SIG_IGN)
    raise StopRequested(number)


def print_plan(plan: Plan) -> None:
    """Print what a run would read and write, and call `print_sample`, which can raise DataError or ConfigError."""
    files = [(path, list(chunks)) for path, chunks in groupby(plan.chunks, key=lambda chunk: chunk.path)]
    for path, chunks in files[:_FILES_SHOWN]:
        compression = f", {chunks[0].compression}" if chunks[0].compression else ""
        in_chunks = f" in {len(chunks)} chunks" if len(chunks) > 1 else ""
        size = with_prefix(plan.versions[path].bytes, "B")
        print(f"{visible(input_label(path))} | {chunks[0].format}{compression} | {size}{in_chunks}")
    if len(files) > _FILES_SHOWN:
        print(f"... and {len(files) - _FILES_SHOWN:,} more")
    for reason in plan.damaged.values():
        print(f"left out by --quarantine: {visible(reason)}")
    total = sum(version.bytes for version in plan.versions.values())
    print(f"{counted(len(files), 'input file')}, {with_prefix(total, 'B')}; text in '{plan.settings.read.text_key}'")
    tokenizer = plan.encoder.tokenizer
    print(
        f"tokenizer {tokenizer.fingerprint[:12]}, {tokenizer.vocab_size:,} ids, {token_dtype(tokenizer.vocab_size)}, "
        f"by {plan.encoder.name}" + (f" ({plan.encoder.note})" if plan.encoder.note else "")
    )
    print_sample(plan)
    warn_of_absent_fields(plan)
    folder = next(folder for folder in plan.settings.files.bin.absolute().parents if folder.exists())
    print(f"{with_prefix(shutil.disk_usage(folder).free, 'B')} free at {folder}")
    print(f"would write {plan.settings.files.bin}, {plan.settings.files.idx.name}, {plan.settings.files.manifest.name}")


def print_sample(plan: Plan) -> None:
    """Print up to two documents with their token ids, and estimates of size and time of the whole run.

    The estimates extrapolate from about 1 MB of text of the first chunk that has documents.
    """
    started, chunks_of = time.perf_counter(), Counter(chunk.path for chunk in plan.chunks)
    input_bytes, counts = 0.0, Counts()
    plan.encoder.start_chunk()
    for chunk in itertools.islice(plan.chunks, _SAMPLE_CHUNKS):
        progress = 0.0
        for unfiltered in read_chunk(chunk, plan.settings.read):
            batch = apply_filters(unfiltered, plan.filter_sources, input_label(chunk.path))
            encoded = plan.encoder.encode_batch(batch.texts)
            for number in range(min(2 - counts.documents, len(batch.texts))):
                line = " ".join(batch.texts[number][:400].split())
                print(f"text  {visible(line if len(line) <= 100 else f'{line[:97]}...')}")
                start, length = encoded.lengths[:number].sum(), encoded.lengths[number]
                shown = " ".join(map(str, encoded.ids[start : start + min(length, 16)].tolist()))
                print(f"ids   {shown}{' ...' if length > 16 else ''}  ({length:,} ids)")
                if keys := plan.settings.read.record_keys:
                    values = ((key, plain_value(batch.fields[number].get(key))) for key in keys)
                    print(f"keys  {visible(', '.join(f'{key}={value!r}' for key, value in values))}")
            counts.documents += len(batch.texts)
            counts.tokens += encoded.ids.size
            counts.unknown_tokens += int(np.count_nonzero(encoded.ids == plan.encoder.tokenizer.unk_id))
            counts.utf8_bytes += batch.utf8_bytes
            progress = batch.progress
            if counts.utf8_bytes >= _SAMPLE_BYTES:
                break
        input_bytes += progress * plan.versions[chunk.path].bytes / chunks_of[chunk.path]
        if counts.documents:
            break
    if not counts.documents or not input_bytes:
        raise DataError(f"no document in the first {_SAMPLE_CHUNKS} chunks; check --input, --text-key and the filters.")
    factor = sum(version.bytes for version in plan.versions.values()) / input_bytes
    workers = plan.settings.jobs.workers or 1
    bin_bytes = counts.tokens * factor * token_dtype(plan.encoder.tokenizer.vocab_size).itemsize
    print(
        f"estimated from a sample: {counts.documents * factor:,.0f} documents, {counts.tokens * factor:,.0f} tokens, "
        f"{with_prefix(bin_bytes, 'B')} of .bin (twice that while chunks are joined), "
        f"{duration((time.perf_counter() - started) * factor / workers)} with {counted(workers, 'worker')}"
    )
    counts.sampled_characters = plan.encoder.sampled_characters
    counts.unknown_characters = plan.encoder.unknown_characters
    warn_of_unknown_text(counts)


def warn_of_absent_fields(plan: Plan) -> None:
    """Warn of each --record-key without a value in the first records of up to 16 chunks, spread over the input.

    Filters are applied, because they may set fields. Damaged chunks are skipped, because the run reports them.
    """
    absent, names, documents = set(plan.settings.read.record_keys), dict[str, None](), 0
    chunks = plan.chunks[:: -(-len(plan.chunks) // _FIELD_CHUNKS)]
    for chunk in chunks if absent else ():
        with suppress(DataError):
            unfiltered = next(read_chunk(chunk, plan.settings.read), RecordBatch())
            names |= dict.fromkeys(unfiltered.field_names)
            batch = apply_filters(unfiltered, plan.filter_sources, input_label(chunk.path))
            documents += len(batch.texts)
            for fields in batch.fields:
                absent -= {key for key in absent if plain_value(fields.get(key)) is not None}
        if not absent:
            return
    if absent and documents:
        print(
            f"warning: no value of --record-key {', '.join(sorted(absent))} in {counted(documents, 'document')} from "
            f"{counted(len(chunks), 'chunk')}; an absent field is a missing value. "
            f"The records have {visible(', '.join(names)) or 'no fields'}",
            file=sys.stderr,
        )


def warn_of_unknown_text(counts: Counts) -> None:
    """Warn if more than 2 % of the tokens are unknown, or unknown tokens replace more than 2 % of the sampled text."""
    tokens = counts.unknown_tokens / max(1, counts.tokens)
    text = counts.unknown_characters / max(1, counts.sampled_characters)
    if max(tokens, text) > _UNKNOWN_WARNING:
        print(
            f"warning: {percent(tokens)} of the tokens are unknown, with {percent(text)} of the text of a sample; "
            "check that the vocabulary is of this language. WordPiece loses long words as a whole: for a script "
            "without spaces, use a vocabulary of neobert train-tokenizer or a SentencePiece model",
            file=sys.stderr,
        )


def print_report(plan: Plan, counts: Counts, *, seconds: float) -> None:
    """Print counts and files of a finished run; warnings go to stderr."""
    corpus = Corpus(plan.settings.files.manifest.with_suffix(""))
    manifest = corpus.manifest
    for left_out in manifest.quarantined.values():
        print(f"warning: left out by --quarantine: {visible(left_out.reason)}", file=sys.stderr)
    warn_of_unknown_text(counts)
    print(
        f"{counts.documents:,} documents | {counts.tokens:,} tokens | {counts.utf8_bytes / 1e6:,.1f} MB of text in "
        f"{seconds:.1f} s | {', '.join(manifest.tokenizer_backends)}"
    )
    for name, value in corpus.describe().items():
        if name not in _IN_FIRST_LINE and not value.startswith(("none", "0 ", "0.0 %")):
            print(f"  {name:<18} {value}")
    columns = attribute_types(corpus) if manifest.attributes else {}
    if without_value := [name for name, kind in columns.items() if kind == "null"]:
        print(f"warning: no document has a value of {', '.join(without_value)} (--record-key)", file=sys.stderr)
    shards = len(manifest.shards)
    files = ".bin, .idx, .json" if shards == 1 else f"{shards:,} pairs of .bin and .idx, .json"
    rejects = f" and {plan.settings.files.rejects}" if counts.rejected else ""
    print(f"wrote {corpus.prefix} ({files}){rejects}; train with --data-path {corpus.prefix}")
