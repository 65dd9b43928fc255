"""Preprocess input files to one corpus: settings, the plan of its chunks, and the run, which tokenizes and joins them.

The plan is built before any text is read. The corpus, its manifest and its rejects are the same for any number of
workers, any executor, and after any restart: documents are in the order of the planned chunks, which depends only on
the input files. Finished chunks are kept in PREFIX.partial, so that a resumed run does not repeat them.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from megatron_neobert import __version__
from megatron_neobert.cli import option
from megatron_neobert.data.corpus.attribute_columns import check_record_keys
from megatron_neobert.data.corpus.format import (
    CorpusFiles,
    Counts,
    QuarantinedInput,
    corpus_files,
    describe_reasons,
)
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.corpus.writer import TokenizedChunk, refuse_existing, write_corpus
from megatron_neobert.data.inputs.find import InputVersion, find_inputs, input_label, input_version
from megatron_neobert.data.inputs.input_reader import Chunk, is_url
from megatron_neobert.data.inputs.recognise import split_into_chunks
from megatron_neobert.data.inputs.records import ReadSettings, read_size
from megatron_neobert.data.preprocessing.chunks import TokenizeJob, loaded_encoders, tokenize_chunk
from megatron_neobert.data.preprocessing.filters import FilterSource, find_filters
from megatron_neobert.data.tokenizer.fast_backends import Backend, Encoder, open_encoder
from megatron_neobert.data.tokenizer.files import find_tokenizer_file
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.errors import ConfigError, DataError, MissingInputError
from megatron_neobert.runtime.jobs import Finished, JobFolder, JobOptions, JobRunner, finish_jobs
from megatron_neobert.text import counted, percent

_PLANNING_THREADS = 16  # opening remote input files is mostly waiting for the network
# A run ends early if most of at least this many records are errors, as with a wrong --text-key.
_EARLY_END_RECORDS = 10_000


@dataclass(frozen=True)
class PreprocessSettings:
    """Options of `neobert preprocess`."""

    inputs: tuple[str, ...] = option(
        help="input files: paths, globs ('**' descends), folders, URLs (s3://, gs://, hf://), or @FILE with one of "
        "these per line. Formats, recognised by content: parquet, Arrow and save_to_disk folders, JSON lines, plain "
        "text, WARC and WET; uncompressed or compressed by gzip, zstd, bzip2 or xz",
        flag="--input",
        metavar="PATH",
    )
    output_prefix: str = option(help="path of the corpus; _KEY_document is appended (--text-key KEY)", metavar="PREFIX")
    tokenizer_model: str = option(
        help="vocab.txt, tokenizer.json, SentencePiece's tokenizer.model, a folder with one of them, or a model of the "
        "Hugging Face Hub: [OWNER/]NAME[@REVISION]",
        metavar="PATH",
    )
    read: ReadSettings = field(default_factory=ReadSettings, metadata={"help": "what is read"})
    tokenizer_backend: Backend = option(
        "auto",
        "fast is nanotoken (WordPiece only), compared with the reference throughout the run: a difference ends the "
        "run; auto is fast if installed",
        group="how it is tokenized",
    )
    filter: tuple[str, ...] = option(
        (),
        "function that keeps, drops or rewrites each record; repeatable, applied in this order",
        metavar="FILE.py:FUNCTION",
        repeat=True,
        group="which documents are kept",
    )
    max_error_rate: float = option(
        0.001,
        "end the run if more than this fraction of the records has no usable text. Rejected records are counted, and "
        "listed in PREFIX_KEY_document.rejects.jsonl. Empty texts are dropped and counted",
        metavar="FRACTION",
    )
    quarantine: bool = option(
        False,
        "leave out damaged input files as a whole, and list them in the manifest; without it, the run finishes all "
        "other files, names every damaged file, and ends with exit code 65",
    )
    shard_size: int | None = option(
        None,
        "start a new .bin and .idx after this size; one manifest lists all",
        metavar="SIZE",
        read=read_size,
        group="what is written",
    )
    overwrite: bool = option(False, "replace an existing corpus, and chunks of another run")
    dry_run: bool = option(False, "print what would be read and written, and write nothing")
    jobs: JobOptions = field(default_factory=JobOptions, metadata={"help": "how it runs"})

    def __post_init__(self) -> None:
        problems = list(check_record_keys(self.read.record_keys))
        if not 0.0 <= self.max_error_rate <= 1.0:
            problems.append(f"--max-error-rate {self.max_error_rate} is not a fraction of the records; use 0 to 1")
        if self.read.text_separator == "":
            problems.append("--text-separator is empty; leave it out if each file is one document")
        if problems:
            raise ConfigError(problems)

    @property
    def files(self) -> CorpusFiles:
        return corpus_files(f"{self.output_prefix}_{self.read.text_key}_document")


@dataclass(frozen=True)
class Plan:
    """Inputs and outputs of a run."""

    settings: PreprocessSettings
    encoder: Encoder
    filter_sources: tuple[FilterSource, ...]
    versions: dict[str, InputVersion]  # by path or URL, in reading order
    chunks: list[Chunk]
    damaged: dict[str, str]  # reason for each damaged input file, by label; empty without --quarantine

    def jobs(self) -> list[TokenizeJob]:
        """Return one job per chunk, in the order of `chunks`. The paths in a job are absolute."""
        settings, jobs = self.settings, list[TokenizeJob]()
        chunks_of = Counter(chunk.path for chunk in self.chunks)
        for chunk in self.chunks:
            # Paths are absolute, because workers on other machines have another current folder.
            absolute = chunk if is_url(chunk.path) else replace(chunk, path=str(Path(chunk.path).absolute()))
            # The name depends only on the chunk, so the chunk is found again after input files are added or removed.
            name = hashlib.blake2b(json.dumps(asdict(absolute)).encode(), digest_size=12).hexdigest()
            jobs.append(
                TokenizeJob(
                    folder=settings.files.partial.absolute(),
                    name=name,
                    chunk=absolute,
                    chunk_bytes=self.versions[chunk.path].bytes // chunks_of[chunk.path],
                    version=self.versions[chunk.path],
                    input_name=input_label(chunk.path),
                    read=settings.read,
                    tokenizer_model=settings.tokenizer_model,
                    fingerprint=self.encoder.tokenizer.fingerprint,
                    backend="reference" if self.encoder.is_reference else settings.tokenizer_backend,
                    filters=self.filter_sources,
                )
            )
        return jobs

    @property
    def filters(self) -> dict[str, int | float | str | None]:
        """Settings and filters that decide the corpus's documents: {setting: value, filter label: "sha256 HEX"}."""
        read = self.settings.read
        return {
            **{source.label: f"sha256 {source.sha256}" for source in self.filter_sources},
            "input_format": read.input_format,
            "max_document_bytes": read.max_document_bytes,
            "text_separator": read.text_separator,
            **({"record_keys": ", ".join(read.record_keys)} if read.record_keys else {}),
        }


def plan_preprocessing(settings: PreprocessSettings) -> Plan:
    """Find the input files, cut them into chunks, load the tokenizer and the filters, and check the output.

    Nothing is written. Raise ConfigError if two URLs have the same label.
    """
    if not settings.jobs.resume:
        refuse_existing(settings.files, overwrite=settings.overwrite)
    settings = replace(settings, tokenizer_model=str(find_tokenizer_file(Path(settings.tokenizer_model)).absolute()))
    encoder = open_encoder(load_tokenizer(settings.tokenizer_model), settings.tokenizer_backend)
    paths = find_inputs(settings.inputs)

    def split(path: str) -> list[Chunk] | DataError:
        try:
            return split_into_chunks(path, settings.read)
        except DataError as error:
            return error

    with ThreadPoolExecutor(_PLANNING_THREADS) as threads:
        versions = dict(zip(paths, threads.map(input_version, paths), strict=True))
        results = dict(zip(paths, threads.map(split, paths), strict=True))
    plan = Plan(
        settings=settings,
        encoder=encoder,
        filter_sources=find_filters(settings.filter),
        versions=versions,
        chunks=[chunk for chunks in results.values() if isinstance(chunks, list) for chunk in chunks],
        damaged={input_label(path): str(error) for path, error in results.items() if isinstance(error, DataError)},
    )
    labels = Counter(map(input_label, paths))
    if repeated := [label for label, count in labels.items() if count > 1]:
        raise ConfigError(
            f"--input has {labels[repeated[0]]} URLs that differ only in their query ({repeated[0]}), which the "
            "manifest does not keep; copy them to files with different names"
        )
    refuse_damaged(plan, plan.damaged)
    return plan


def refuse_damaged(plan: Plan, damaged: Mapping[str, str]) -> None:
    """Raise DataError if `damaged` is not empty. With --quarantine, raise only if all input files are damaged.

    `damaged` maps the label of each damaged input file to the reason.
    """
    if not damaged or (plan.settings.quarantine and len(damaged) < len(plan.versions)):
        return
    reasons = list(damaged.values())
    if len(reasons) > 1:
        reasons = [f"{len(reasons):,} of {len(plan.versions):,} input files cannot be used:", *reasons]
    remedy = "" if plan.settings.quarantine else ". With --quarantine, the corpus is written without these files"
    raise DataError("\n  - ".join(reasons) + remedy)


def is_complete(plan: Plan) -> bool:
    """Return True if the corpus is finished and matches settings and input files (size and time, not hash).

    The value of --shard-size is not compared, but a corpus with several shards requires that the flag is set.
    """
    settings, files = plan.settings, plan.settings.files
    if JobFolder(files.partial).has_begun:
        return False
    try:
        manifest = Corpus(files.manifest.with_suffix("")).manifest
    except (MissingInputError, DataError):
        return False
    sizes = {input_label(path): version.bytes for path, version in plan.versions.items()}
    written = files.manifest.stat().st_mtime_ns
    return (
        manifest.tokenizer_fingerprint == plan.encoder.tokenizer.fingerprint
        and manifest.text_key == settings.read.text_key
        and manifest.filters == plan.filters
        and (settings.quarantine or not manifest.quarantined)
        and list(manifest.inputs) == [name for name in sizes if name not in manifest.quarantined]
        and {name: record.bytes for name, record in (manifest.inputs | manifest.quarantined).items()} == sizes
        and (len(manifest.shards) == 1 or settings.shard_size is not None)
        and all(is_url(path) or int(version.version) < written for path, version in plan.versions.items())
    )


def preprocess(plan: Plan) -> Counts:
    """Tokenize the unfinished chunks, write the corpus of all chunks, and remove PREFIX.partial.

    Return the counts of all chunks, including the chunks of an earlier run.
    After an error, finished chunks stay in PREFIX.partial for --resume, unless no chunk has a document. Raise DataError
    if too many records cannot be read, there is no document, or input files are damaged. Damaged files are reported
    together after all other files are finished.
    """
    settings, files, tokenizer = plan.settings, plan.settings.files, plan.encoder.tokenizer
    # A resumed run must have the same, because they decide the content of finished chunks.
    chunk_settings = {
        "tokenizer": tokenizer.fingerprint,
        "tokenizer backend": plan.encoder.name,
        **asdict(settings.read),
        "filters": plan.filter_sources,
        "version": __version__,
    }
    with JobFolder(files.partial) as folder, JobRunner(settings.jobs) as runner:
        # A killed run may have given some of its files their final names already.
        was_renaming = settings.jobs.resume and folder.has_begun
        refuse_existing(files, overwrite=settings.overwrite or was_renaming)
        folder.begin(chunk_settings, resume=settings.jobs.resume, overwrite=settings.overwrite)
        # For jobs of this process.
        loaded_encoders[tokenizer.fingerprint, plan.encoder.is_reference] = plan.encoder
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
        write_corpus(
            chunks,
            files,
            tokenizer,
            shard_bytes=settings.shard_size,
            runner=runner,
            text_key=settings.read.text_key,
            filters=plan.filters,
            quarantined={name: QuarantinedInput(versions[name].bytes, reason) for name, reason in damaged.items()},
        )
        folder.remove()
    return counts


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
