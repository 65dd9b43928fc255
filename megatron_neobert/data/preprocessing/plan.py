"""What a preprocessing run will read and write: its settings, the plan made of them before any text is read, a preview.

The plan cuts the shards into parts, in an order that depends on nothing but the inputs; what workers do in any order is
joined in this one.
"""

import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus.format import (
    CorpusFiles,
    Manifest,
    corpus_files,
    read_manifest,
    token_dtype,
    validation_files,
)
from megatron_neobert.data.corpus.sources import SOURCE_DTYPE
from megatron_neobert.data.corpus.writer import refuse_existing
from megatron_neobert.data.inputs.find import InputVersion, find_inputs, input_label, input_sha256, input_version
from megatron_neobert.data.inputs.recognise import read_chunk, split_into_chunks
from megatron_neobert.data.inputs.records import ReadSettings
from megatron_neobert.data.inputs.stream import Chunk, is_url
from megatron_neobert.data.preprocessing.filters import FilterSource, apply_filters, find_filters
from megatron_neobert.data.preprocessing.job import JobFolder, KnownParts, PartTask, TaskSettings
from megatron_neobert.data.tokenizer.fast_backends import BackendMismatch, Encoder, open_encoder
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from megatron_neobert.errors import ConfigError, DataError, OutputError
from megatron_neobert.runtime.atomic_files import sync_to_disk

STANDARD_INPUT = "-"
_SAMPLE_BYTES = 1 << 20  # of text, from each of the three parts that a preview looks at
_PLANNING_THREADS = 16  # shards are opened one by one, and most of that is waiting for a network


@dataclass(frozen=True)
class PreprocessSettings:
    """The command line of neobert preprocess, whose --help explains each."""

    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer_model: str
    read: ReadSettings = field(default_factory=ReadSettings)
    tokenizer_type: str = "auto"
    tokenizer_backend: Literal["auto", "fast", "reference"] = "auto"
    filter: tuple[str, ...] = ()  # MODULE:FUNCTION or FILE.py:FUNCTION
    min_tokens: int = 0
    max_tokens: int | None = None
    deduplicate: Literal["exact"] | None = None
    split_validation: float = 0.0
    keep_shards: bool = False
    shard_size: int | None = None  # bytes of .bin
    workers: int | None = None  # None: one process here, all CPUs of a Ray cluster
    executor: Literal["local", "ray"] = "local"
    ray_address: str | None = None
    shard_index: int | None = None
    num_shards: int | None = None
    merge: bool = False
    on_error: Literal["skip", "fail"] = "skip"
    max_error_rate: float = 0.001
    quarantine: bool = False
    resume: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        if problems := list(_find_problems(self)):
            raise ConfigError(problems)

    @property
    def files(self) -> CorpusFiles:
        return corpus_files(f"{self.output_prefix}_{self.read.text_key}_document")


@dataclass(frozen=True)
class Plan:
    """What a run will read and write."""

    settings: PreprocessSettings
    files: CorpusFiles
    tokenizer: Tokenizer
    encoder: Encoder
    filter_sources: tuple[FilterSource, ...]
    versions: dict[str, InputVersion]  # by path or URL, in the order of reading
    parts: list[Chunk]
    known: KnownParts
    damaged: dict[str, str]  # why a shard has no parts, by path or URL; empty without --quarantine

    def shard_name(self, path: str) -> str:
        """What messages, rejects and the manifest call it."""
        return STANDARD_INPUT if STANDARD_INPUT in self.settings.inputs else input_label(path)  # it is the only one

    @cached_property
    def task_settings(self) -> TaskSettings:
        settings = self.settings
        return TaskSettings(
            read=settings.read,
            tokenizer_model=str(Path(settings.tokenizer_model).absolute()),  # other machines stand elsewhere
            tokenizer_type=settings.tokenizer_type,
            fingerprint=self.tokenizer.fingerprint,
            backend="reference" if self.encoder.is_reference else settings.tokenizer_backend,
            min_tokens=settings.min_tokens,
            max_tokens=settings.max_tokens,
            filters=self.filter_sources,
            with_hashes=settings.deduplicate is not None or settings.split_validation > 0,
            on_error=settings.on_error,
            folder=self.files.partial.absolute(),
        )

    @cached_property
    def _parts_of(self) -> Counter[str]:
        return Counter(part.path for part in self.parts)

    def input_bytes(self, part: Chunk) -> float:
        """Its share of the shard, taken as equal among the shard's parts: for estimates."""
        return self.versions[part.path].bytes / self._parts_of[part.path]

    @property
    def filters(self) -> dict[str, int | float | str | None]:
        """The settings that decide which documents are in the corpus."""
        settings = self.settings
        own = {source.label: f"sha256 {source.sha256}" for source in self.filter_sources}
        return own | {
            "min_tokens": settings.min_tokens,
            "max_tokens": settings.max_tokens,
            "deduplicate": settings.deduplicate,
            "split_validation": settings.split_validation,
            "input_format": settings.read.input_format,
            "max_document_bytes": settings.read.max_document_bytes,
            "text_separator": settings.read.text_separator,
        }


def plan_preprocessing(settings: PreprocessSettings) -> Plan:
    """Finds shards and tokenizer, and what would make the run fail early.

    Writes nothing, but for the copy of standard input in PREFIX.partial.

    Raises:
        MissingInputError: An input or the tokenizer does not exist.
        OutputError: The corpus exists and may not be overwritten.
        DataError: The tokenizer is unusable, or some shards are, by their format, schema or footer; it names them all.
        ConfigError: The output of an earlier run is among the inputs, a table has no column for --record-key or
            --source-key, or a fast back end is asked for and unusable.
    """
    files = settings.files
    if not (settings.resume or settings.merge):
        refuse_existing(files, overwrite=settings.overwrite)
    tokenizer = load_tokenizer(settings.tokenizer_model, tokenizer_type=settings.tokenizer_type)
    encoder = open_encoder(tokenizer, settings.tokenizer_backend)
    if STANDARD_INPUT not in settings.inputs:
        return _plan_parts(settings, tokenizer, encoder, find_inputs(settings.inputs))
    copy = _receive_standard_input(settings)
    try:
        return _plan_parts(settings, tokenizer, encoder, [copy])
    except DataError:  # it cannot be read, now or by --resume
        with JobFolder(files.partial) as job:
            job.remove()
        raise


def _plan_parts(settings: PreprocessSettings, tokenizer: Tokenizer, encoder: Encoder, shards: list[str]) -> Plan:
    output = settings.files.manifest.resolve()
    for folder in (Path(name).resolve() for name in settings.inputs if Path(name).is_dir()):
        if folder in output.parents:
            raise ConfigError(
                f"--output-prefix {settings.output_prefix} lies below --input {folder}, where a later run would find "
                "the corpus among the shards; write to another folder"
            )
    for shard in (Path(name) for name in shards if "://" not in name):
        if shard.parent.resolve() == output.parent and shard.name.startswith(f"{settings.files.name}."):
            raise ConfigError(f"--input matches {shard}, which belongs to --output-prefix; write to another folder")
    known = KnownParts(settings.files.partial, settings.read)
    with ThreadPoolExecutor(_PLANNING_THREADS) as threads:
        versions = list(threads.map(input_version, shards))

        def look(shard: str, version: InputVersion) -> list[Chunk] | DataError | ConfigError:
            try:
                return known.find(shard, version) or split_into_chunks(shard, settings.read)
            except (DataError, ConfigError) as error:
                return error

        looks = dict(zip(shards, threads.map(look, shards, versions), strict=True))
        if problems := [str(found) for found in looks.values() if isinstance(found, ConfigError)]:
            raise ConfigError(problems)
        plan = Plan(
            settings=settings,
            files=settings.files,
            tokenizer=tokenizer,
            encoder=encoder,
            filter_sources=find_filters(settings.filter),
            versions=dict(zip(shards, versions, strict=True)),
            parts=[part for parts in looks.values() if isinstance(parts, list) for part in parts],
            known=known,
            damaged={shard: str(found) for shard, found in looks.items() if isinstance(found, DataError)},
        )
    names = Counter(map(plan.shard_name, shards))
    if len(names) < len(shards):
        name = names.most_common(1)[0][0]
        raise ConfigError(
            f"--input has {names[name]} URLs that differ in their query alone ({name}), and the manifest names shards "
            "without it; copy them to files"
        )
    refuse_damaged(plan, plan.damaged)
    return plan


def refuse_damaged(plan: Plan, damaged: Mapping[str, str]) -> None:
    """Raises DataError about all damaged shards, unless they may be left out and others remain.

    Args:
        damaged: Why, by path or URL.
    """
    if not damaged or (plan.settings.quarantine and len(damaged) < len(plan.versions)):
        return
    reasons = list(damaged.values())
    if len(reasons) > 1:
        reasons = [f"{len(reasons):,} of {len(plan.versions):,} shards cannot be used:", *reasons]
    remedy = "" if plan.settings.quarantine else ". With --quarantine the corpus is made without such shards"
    raise DataError("\n  - ".join(reasons) + remedy)


def is_complete(plan: Plan) -> bool:
    """Return True if the corpora of this plan exist, whole, so that --resume has nothing left to do."""
    files, settings = plan.files, plan.settings
    manifest = None if JobFolder(files.partial).has_begun else _read_whole(files)
    if manifest is None or (settings.split_validation and not _read_whole(validation_files(files))):
        return False
    sizes = {plan.shard_name(path): version.bytes for path, version in plan.versions.items()}
    written = files.manifest.stat().st_mtime_ns

    def is_unchanged(path: str, version: InputVersion) -> bool:
        # A file server's clock may be ahead of this machine's, so a later time alone is no change.
        if is_url(path) or int(version.version) < written:
            return True
        record = manifest.inputs.get(plan.shard_name(path))
        return record is not None and input_sha256(path) == record.sha256

    largest = max(volume.bin.bytes for volume in manifest.volumes)
    return (
        (manifest.tokenizer_fingerprint, manifest.text_key) == (plan.tokenizer.fingerprint, settings.read.text_key)
        and (manifest.filters, manifest.source_key) == (plan.filters, settings.read.source_key)
        and (settings.quarantine or not manifest.quarantined)
        and list(manifest.inputs) == [name for name in sizes if name not in manifest.quarantined]
        and {name: record.bytes for name, record in (manifest.inputs | manifest.quarantined).items()} == sizes
        and (len(manifest.volumes) == 1 or settings.keep_shards or settings.shard_size is not None)
        and largest <= (settings.shard_size or largest)
        and all(is_unchanged(*shard) for shard in plan.versions.items())
    )


def _read_whole(files: CorpusFiles) -> Manifest | None:
    """Return the manifest of a corpus all of whose files have the recorded sizes, or None."""
    try:
        manifest = read_manifest(files.manifest)
    except (FileNotFoundError, DataError):
        return None
    recorded = [
        (file, record.bytes)
        for volume in manifest.volumes
        for file, record in zip(files.volume_files(volume.name), (volume.bin, volume.idx), strict=True)
    ]
    if manifest.source_key is not None:
        recorded.append((files.sources, SOURCE_DTYPE.itemsize * manifest.documents))
    return manifest if all(file.exists() and file.stat().st_size == size for file, size in recorded) else None


def _find_problems(settings: PreprocessSettings) -> Iterator[str]:
    for name, least in {"min_tokens": 0, "max_tokens": 0, "workers": 1, "shard_index": 0, "num_shards": 1}.items():
        number = getattr(settings, name)
        if number is not None and number < least:
            yield f"--{name.replace('_', '-')} {number} is below {least}; give at least {least}"
    if not 0.0 <= settings.max_error_rate <= 1.0:
        yield f"--max-error-rate {settings.max_error_rate} is not a fraction of the records; use 0 to 1"
    if (settings.shard_index is None) != (settings.num_shards is None):
        yield "--shard-index and --num-shards describe one task of an array together; give both or neither"
    elif settings.num_shards is not None and not 0 <= (settings.shard_index or 0) < settings.num_shards:
        yield (
            f"--shard-index {settings.shard_index} is not one of the {settings.num_shards} tasks of --num-shards; they "
            f"are numbered 0 to {settings.num_shards - 1}"
        )
    if settings.merge and settings.num_shards is not None:
        yield "--merge joins the parts of all tasks; leave out --shard-index and --num-shards"
    if settings.keep_shards and settings.shard_size is not None:
        yield "--keep-shards cuts the corpus at the shards, --shard-size at a size; choose one"
    if not 0.0 <= settings.split_validation < 1.0:
        yield f"--split-validation {settings.split_validation} is not a fraction of the documents; use 0 to below 1"
    if settings.max_tokens is not None and settings.max_tokens < settings.min_tokens:
        yield f"--max-tokens {settings.max_tokens} is below --min-tokens {settings.min_tokens}; exchange them"
    if settings.read.record_keys and not settings.filter:
        yield f"--record-key {settings.read.record_keys[0]} is for filters; give a --filter that looks at it"
    if settings.ray_address is not None and settings.executor != "ray":
        yield f"--ray-address {settings.ray_address} has no effect without --executor ray"
    if STANDARD_INPUT in settings.inputs:
        if len(settings.inputs) > 1:
            yield "--input - (standard input) stands alone; read the other shards in another run"
        if settings.num_shards is not None:
            yield "--input - (standard input) has one reader; give the tasks of an array files"
    if settings.read.text_separator == "":
        yield "--text-separator is empty; leave it out where each file is one document"


def _receive_standard_input(settings: PreprocessSettings) -> str:
    """Copies it to PREFIX.partial, where it can be read in parts, and again after a restart."""
    with JobFolder(settings.files.partial) as job:
        target = job.standard_input
        if target.exists() and not settings.overwrite:
            if not settings.resume:
                raise OutputError(
                    f"{job.path} holds the standard input of an earlier run; continue with it by --resume, or read "
                    "another by --overwrite"
                )
            return str(target)
        incoming = target.with_suffix(".incoming")
        with incoming.open("wb") as stream:
            shutil.copyfileobj(sys.stdin.buffer, stream, 1 << 20)
        sync_to_disk(incoming)
        incoming.replace(target)
    return str(target)


def part_tasks(plan: Plan) -> list[PartTask]:
    """All parts in order, as work for others."""
    paths = [None, *(part.path for part in plan.parts)]
    return [
        PartTask(
            number=number,
            part=part if "://" in part.path else replace(part, path=str(Path(part.path).absolute())),
            shard=plan.versions[part.path],
            shard_name=plan.shard_name(part.path),
            starts_shard=part.path != before,
            settings=plan.task_settings,
        )
        for number, (part, before) in enumerate(zip(plan.parts, paths, strict=False))
    ]


@dataclass(frozen=True)
class Preview:
    """The first documents of a run, and estimates for all of it."""

    examples: list[tuple[str, NDArray[np.int64]]]  # text and ids
    documents: float
    tokens: float
    bin_bytes: float
    core_seconds: float


def preview(plan: Plan, *, examples: int = 2) -> Preview:
    """Reads and tokenises up to 3 MB of text of the first, the middle and the last part: the rest is taken to be alike.

    Raises:
        DataError: No document is found there.
    """
    try:
        return _preview(plan, plan.encoder, examples=examples)
    except BackendMismatch:  # the run would do such parts again, and log it
        return _preview(plan, open_encoder(plan.tokenizer, "reference"), examples=examples)


def _preview(plan: Plan, encoder: Encoder, *, examples: int) -> Preview:
    started = time.perf_counter()
    shown: list[tuple[str, NDArray[np.int64]]] = []
    documents = tokens = input_bytes = 0.0
    for number in sorted({0, len(plan.parts) // 2, len(plan.parts) - 1}):
        part, text_bytes, progress = plan.parts[number], 0, 0.0
        encoder.start_part()
        for unfiltered in read_chunk(part, plan.settings.read):
            batch = apply_filters(unfiltered, plan.filter_sources, plan.shard_name(part.path))
            encoded = encoder.encode_batch(batch.texts)
            ends = np.cumsum(encoded.lengths)
            for text, end, length in zip(batch.texts, ends, encoded.lengths, strict=True):
                if len(shown) == examples:
                    break
                shown.append((text, encoded.ids[end - length : end].astype(np.int64)))
            documents, tokens = documents + len(batch.texts), tokens + encoded.ids.size
            text_bytes, progress = text_bytes + batch.utf8_bytes, batch.progress
            if text_bytes >= _SAMPLE_BYTES:
                break
        input_bytes += progress * plan.input_bytes(part)
    if not documents or not input_bytes:
        raise DataError("no document in the first, the middle and the last part; check --input and --text-key")
    seconds = time.perf_counter() - started
    factor = sum(version.bytes for version in plan.versions.values()) / input_bytes
    return Preview(
        examples=shown,
        documents=documents * factor,
        tokens=tokens * factor,
        bin_bytes=tokens * factor * token_dtype(plan.tokenizer.vocab_size).itemsize,
        core_seconds=seconds * factor,
    )
