"""Opening of the corpora and the tokenizer of a run. Imports no torch, so that a wrong path is reported at once."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.config.data_path import Component, curve_names, parse_data_path, whole_weights
from megatron_neobert.config.phases import resolve_phases
from megatron_neobert.config.schema import DataConfig, Settings
from megatron_neobert.data.batches.order import SplitPart, split_documents
from megatron_neobert.data.batches.windows import Source
from megatron_neobert.data.corpus.attributes import ChosenDocuments, choose_documents
from megatron_neobert.data.corpus.drop_list import read_drop_list
from megatron_neobert.data.corpus.object_storage import ObjectStorage
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.inputs.input_reader import is_url
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from megatron_neobert.errors import DataError

_STEP = 1 << 20  # documents of a part of --split that are marked in one step


@dataclass(frozen=True)
class OpenedCorpora:
    """Opened corpora and tokenizer of one training phase."""

    tokenizer: Tokenizer
    training: tuple[Source, ...]
    # By name of the validation curve. Empty if --split has no share for validation and there is no --valid-data-path.
    validation: dict[str, tuple[Source, ...]]
    sha256: str  # of --data-path: equal for the same documents in the same proportions, under any path
    description: list[str]  # one line per component of --data-path

    @property
    def corpora(self) -> dict[str, str]:
        """Prefix of each corpus in --data-path, by `documents_sha256`, which is equal for all copies of a corpus."""
        return {source.corpus.manifest.documents_sha256: str(source.corpus.prefix) for source in self.training}


def open_corpora(data: DataConfig) -> OpenedCorpora:
    """Open the corpora and the tokenizer, and split the documents into training and validation.

    --split divides a corpus before filtering, so all parts of a blend that read this corpus hold out the same
    documents. Each part is spread evenly over the corpus.
    """
    components = parse_data_path(data.data_path)
    storage = ObjectStorage(Path(data.object_storage_cache_path or ""))
    tokenizer = load_tokenizer(Path(data.tokenizer_model or ""))

    @cache
    def open_corpus(prefix: str) -> Corpus:
        corpus = Corpus(prefix, storage if is_url(prefix) else None)
        corpus.check_tokenizer(tokenizer)
        return corpus

    training, held_out = _split_sources(components, data.share_of_data_path, open_corpus)
    validation = {"split": held_out} if held_out else {}
    entries = data.valid_data_path or ()
    for name, entry in zip(curve_names(entries), entries, strict=True):
        validation[name], _ = _split_sources(parse_data_path([entry], flag="--valid-data-path"), "100", open_corpus)
    description = []
    for component, source in zip(components, training, strict=True):
        count, tokens = len(source.corpus), source.corpus.manifest.tokens
        line = f"{component}: {len(source.documents):,} of {count:,} documents ({tokens:,} tokens before any cut)"
        kept = len(split_documents(count, data.share_of_data_path)[0])
        description.append(line + (f", {count - kept:,} held out by --split {data.split}" if kept < count else ""))
    return OpenedCorpora(
        tokenizer=tokenizer,
        training=training,
        validation=validation,
        sha256=_hash(components, training),
        description=description,
    )


def open_phases(settings: Settings) -> list[OpenedCorpora]:
    """Return the corpora of each phase of a run, in order. Phases with the same --data-path share one object.

    Raise ConfigError for an invalid setting, MissingInputError for a missing path, DataError for a damaged or
    unsuitable file, and StorageError if a remote corpus cannot be read.
    """
    data_of_phases = [phase.settings.data for phase in resolve_phases(settings)]
    data_by_path = {data.data_path: data for data in data_of_phases}
    opened = {data_path: open_corpora(data) for data_path, data in data_by_path.items()}
    return [opened[data.data_path] for data in data_of_phases]


def _split_sources(
    components: Sequence[Component], split: str, open_corpus: Callable[[str], Corpus]
) -> tuple[tuple[Source, ...], tuple[Source, ...]]:
    """Return the sources for training and for validation. Components that hold out nothing have no validation source.

    Raise ConfigError for a malformed `split`, and DataError if a component has no document for training, or if its
    filters choose no held-out document.
    """
    training: list[Source] = []
    validation: list[Source] = []
    for component, weight in zip(components, whole_weights(components), strict=True):
        corpus = open_corpus(component.prefix)
        parts = split_documents(len(corpus), split)
        if not parts[0]:
            raise DataError(
                f"--split {split} leaves none of the {len(corpus):,} documents of {component.prefix} for training. "
                "Raise the first weight."
            )
        bits = choose_documents(corpus, component.conditions, component.drop) if component.is_filtered else None
        bits_sha256 = hashlib.sha256(bits.data).hexdigest() if component.where and bits is not None else ""
        # A third part, for tests, is not used.
        for sources, part, purpose in zip((training, validation), parts, ("training", "validation"), strict=False):
            if part:
                documents = part if bits is None else _choose(component, corpus, bits, part, purpose)
                sources.append(Source(corpus, documents, weight, bits_sha256))
    return tuple(training), tuple(validation)


def _choose(
    component: Component, corpus: Corpus, bits: NDArray[np.uint8], part: SplitPart, purpose: str
) -> ChosenDocuments:
    """Return the documents of `part` whose bits are set. Raise DataError if there are none."""
    in_part = np.zeros_like(bits)
    for first in range(0, len(part), _STEP):
        numbers = part.numbers(np.arange(first, min(first + _STEP, len(part))))
        begin = int(numbers[0]) // 8
        is_in_part = np.zeros(int(numbers[-1]) + 1 - 8 * begin, np.bool_)
        is_in_part[numbers - 8 * begin] = True
        packed = np.packbits(is_in_part, bitorder="little")
        in_part[begin : begin + len(packed)] |= packed
    chosen = ChosenDocuments(bits & in_part)
    if not chosen:
        raise DataError(
            f"{component}: none of the {len(part):,} documents for {purpose} is chosen. neobert inspect data "
            f"{corpus.prefix} lists lengths and attributes; change min, max, where, drop or --split, or remove the "
            "component."
        )
    return chosen


def _hash(components: Sequence[Component], sources: Sequence[Source]) -> str:
    """Return a SHA-256 (hex) over documents, filters and weights. For one unfiltered corpus, only documents count."""
    if len(components) == 1 and not components[0].is_filtered:
        return sources[0].corpus.manifest.documents_sha256
    lines = []
    for weight, component, source in zip(whole_weights(components), components, sources, strict=True):
        corpus = source.corpus
        # Checkpoints store the hash, so the format of this line must not change.
        line = f"{weight} {corpus.manifest.documents_sha256} {component.minimum} {component.maximum}"
        for path in component.drop:
            line += f" {read_drop_list(Path(path), corpus)[0].mask_sha256}"
        if source.bits_sha256:
            line += f" where {source.bits_sha256}"
        lines.append(line)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
