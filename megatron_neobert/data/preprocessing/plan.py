"""Settings of a preprocessing run, and the plan of its chunks, which is built before any text is read.

The order of the chunks depends only on the input files. Workers finish chunks in any order; the corpus has this order.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_neobert import __version__
from megatron_neobert.cli import option
from megatron_neobert.data.corpus.attribute_columns import check_record_keys
from megatron_neobert.data.corpus.format import CorpusFiles, corpus_files
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.corpus.writer import refuse_existing
from megatron_neobert.data.inputs.find import InputVersion, find_inputs, input_label, input_version
from megatron_neobert.data.inputs.recognise import split_into_chunks
from megatron_neobert.data.inputs.records import ReadSettings, read_size
from megatron_neobert.data.inputs.stream import Chunk, is_url
from megatron_neobert.data.preprocessing.chunks import TokenizeJob
from megatron_neobert.data.preprocessing.filters import FilterSource, find_filters
from megatron_neobert.data.tokenizer.fast_backends import Backend, Encoder, open_encoder
from megatron_neobert.data.tokenizer.files import find_tokenizer_file
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.errors import ConfigError, DataError, MissingInputError
from megatron_neobert.runtime.jobs import JobFolder, JobOptions

_PLANNING_THREADS = 16  # opening remote input files is mostly waiting for the network


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
    files: CorpusFiles
    encoder: Encoder
    filter_sources: tuple[FilterSource, ...]
    versions: dict[str, InputVersion]  # by path or URL, in reading order
    chunks: list[Chunk]
    damaged: dict[str, str]  # reason for each damaged input file, by label; empty without --quarantine

    @property
    def chunk_settings(self) -> dict[str, Any]:
        """Settings that decide the content of finished chunks, by name. A resumed run must have the same settings."""
        settings = self.settings
        return {
            "tokenizer": self.encoder.tokenizer.fingerprint,
            "tokenizer backend": self.encoder.name,
            **asdict(settings.read),
            "filters": self.filter_sources,
            "version": __version__,
        }

    def jobs(self) -> list[TokenizeJob]:
        """Return one job per chunk, in the order of `chunks`. The paths in a job are absolute."""
        settings = self.settings
        jobs: list[TokenizeJob] = []
        chunks_of = Counter(chunk.path for chunk in self.chunks)
        for chunk in self.chunks:
            # Paths are absolute, because workers on other machines have another current folder.
            absolute = chunk if is_url(chunk.path) else replace(chunk, path=str(Path(chunk.path).absolute()))
            # The name depends only on the chunk, so the chunk is found again after input files are added or removed.
            name = hashlib.blake2b(json.dumps(asdict(absolute)).encode(), digest_size=12).hexdigest()
            jobs.append(
                TokenizeJob(
                    folder=self.files.partial.absolute(),
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
        settings = self.settings
        return {
            **{source.label: f"sha256 {source.sha256}" for source in self.filter_sources},
            "input_format": settings.read.input_format,
            "max_document_bytes": settings.read.max_document_bytes,
            "text_separator": settings.read.text_separator,
            **({"record_keys": ", ".join(settings.read.record_keys)} if settings.read.record_keys else {}),
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
        files=settings.files,
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
    """Raise DataError if `damaged` is not empty. With --quarantine, raise it only if all input files are damaged.

    `damaged` has the reason for each damaged input file, by label.
    """
    if not damaged or (plan.settings.quarantine and len(damaged) < len(plan.versions)):
        return
    reasons = list(damaged.values())
    if len(reasons) > 1:
        reasons = [f"{len(reasons):,} of {len(plan.versions):,} input files cannot be used:", *reasons]
    remedy = "" if plan.settings.quarantine else ". With --quarantine, the corpus is written without these files"
    raise DataError("\n  - ".join(reasons) + remedy)


def is_complete(plan: Plan) -> bool:
    """Return True if no run is unfinished, and the corpus matches settings and input files (size and time, no hash).

    --shard-size is not compared, except that a corpus with several shards needs one.
    """
    files, settings = plan.files, plan.settings
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
