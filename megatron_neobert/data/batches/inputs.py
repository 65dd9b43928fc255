"""The corpora and the tokenizer that a run names, opened together. No torch: a wrong path costs milliseconds."""

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
from megatron_neobert.data.batches.masking import MaskingScheme, TokenIds
from megatron_neobert.data.batches.order import split_ranges
from megatron_neobert.data.batches.rows import BatchSettings, Source
from megatron_neobert.data.corpus.attributes import ChosenDocuments, choose_documents
from megatron_neobert.data.corpus.drop_list import read_drop_list
from megatron_neobert.data.corpus.format import Manifest
from megatron_neobert.data.corpus.object_storage import ObjectStorage
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.inputs.stream import is_url
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from megatron_neobert.errors import DataError

_MASKING = {"all_mask": (1.0, 0.0, 0.0), "bert": (0.8, 0.1, 0.1)}  # shares of [MASK], random tokens, unchanged


@dataclass(frozen=True)
class Inputs:
    """Opened corpora and tokenizer of a run."""

    tokenizer: Tokenizer
    training: tuple[Source, ...]
    # By the name of the curve. Empty: --split has one share, or the second is 0.
    validation: dict[str, tuple[Source, ...]]
    # Hashes of --data-path: the same for the same documents in the same proportions, under any path. The second is how
    # earlier versions computed it, without the boundaries of documents; their checkpoints have it.
    identities: tuple[str, str]
    description: list[str]  # a line for each component of --data-path


def open_inputs(data: DataConfig) -> Inputs:
    """Opens and checks all of it, and cuts the documents into training and validation where a corpus serves both.

    Every component of a blend is cut alike, before its documents are chosen by length, so that a corpus that stands
    in several components holds out the same documents in all.

    Raises:
        ConfigError: --data-path or --split is malformed.
        MissingInputError: A path does not exist.
        DataError: A file is damaged, the tokenizer is not a corpus's, or a component has no document left.
    """
    components = parse_data_path(data.data_path)
    storage = ObjectStorage(Path(data.object_storage_cache_path or ""))
    tokenizer = load_tokenizer(Path(data.tokenizer_model or ""), data.tokenizer_type)

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
    corpora = [open_corpus(component.prefix) for component in components]
    return Inputs(
        tokenizer=tokenizer,
        training=training,
        validation=validation,
        identities=(
            _identity(components, corpora, training, lambda manifest: manifest.documents_sha256),
            _identity(components, corpora, training, lambda manifest: manifest.sha256),
        ),
        description=[
            f"{component}: {len(source.documents):,} of {corpus.manifest.documents:,} documents "
            f"({corpus.manifest.tokens:,} tokens){_held_out(corpus, data)}"
            for component, corpus, source in zip(components, corpora, training, strict=True)
        ],
    )


def open_phases(settings: Settings) -> list[Inputs]:
    """Open what each phase of a run reads, once per --data-path.

    Raises:
        ConfigError, MissingInputError, DataError: As `open_inputs`.
    """
    opened: dict[tuple[str, ...], Inputs] = {}
    data_of_phases = [phase.settings.data for phase in resolve_phases(settings)]
    for data in data_of_phases:
        if data.data_path not in opened:
            opened[data.data_path] = open_inputs(data)
    return [opened[data.data_path] for data in data_of_phases]


def token_ids_of(tokenizer: Tokenizer) -> TokenIds:
    """Return the token ids that batches need."""
    return TokenIds(
        vocab_size=tokenizer.vocab_size,
        cls=tokenizer.cls_id,
        sep=tokenizer.sep_id,
        pad=tokenizer.pad_id,
        mask=tokenizer.mask_id,
        special=tuple(tokenizer.special_ids),
    )


def batch_settings(settings: Settings, tokenizer: Tokenizer, *, fixed_shapes: bool = False) -> BatchSettings:
    """Return the settings that decide the batches of a run."""
    mask, random, keep = _MASKING[settings.data.mask_replacement]
    return BatchSettings(
        seq_length=settings.data.seq_length,
        micro_batch_size=settings.training.micro_batch_size,
        global_batch_size=settings.training.global_batch_size,
        long_documents=settings.data.long_documents,
        masking=MaskingScheme(settings.data.mask_prob, mask_share=mask, random_share=random, keep_share=keep),
        token_ids=token_ids_of(tokenizer),
        seed=settings.training.seed,
        batch_layout=settings.data.batch_layout,
        document_block_size=settings.data.document_block_size,
        fixed_shapes=fixed_shapes,
    )


def _split_sources(
    components: Sequence[Component], split: str, open_corpus: Callable[[str], Corpus]
) -> tuple[tuple[Source, ...], tuple[Source, ...]]:
    """Return the sources of training, and of validation if --split gives it a share."""
    parts: tuple[list[Source], list[Source]] = ([], [])
    for component, weight in zip(components, whole_weights(components), strict=True):
        corpus = open_corpus(component.prefix)
        ranges = split_ranges(len(corpus), split)
        if not ranges[0]:
            raise DataError(
                f"--split {split} leaves none of the {len(corpus):,} documents of {component.prefix} for training; "
                "give the first share more."
            )
        bits = choose_documents(corpus, component.conditions, component.drop) if component.is_filtered else None
        for sources, documents, purpose in zip(parts, ranges, ("training", "validation"), strict=False):
            if documents:
                chosen = documents if bits is None else _choose(component, corpus, bits, documents, purpose)
                sources.append(Source(corpus, chosen, weight))
    return tuple(parts[0]), tuple(parts[1])


def _held_out(corpus: Corpus, data: DataConfig) -> str:
    """Format the number of documents that --split keeps for validation; empty if there are none."""
    held_out = sum(map(len, split_ranges(len(corpus), data.share_of_data_path)[1:]))
    return f", {held_out:,} held out by --split {data.split}" if held_out else ""


def _choose(
    component: Component, corpus: Corpus, bits: NDArray[np.uint8], documents: range, purpose: str
) -> ChosenDocuments:
    chosen = ChosenDocuments(bits, documents)
    if not chosen:
        statistics = corpus.manifest.statistics
        raise DataError(
            f"{component}: none of the {len(documents):,} documents for {purpose} is chosen; documents of this corpus "
            f"have {statistics.shortest:,} to {statistics.longest:,} tokens, and neobert inspect data lists their "
            "attributes. Change min, max, where and drop, or --split, or leave the component out."
        )
    return chosen


def _identity(
    components: Sequence[Component],
    corpora: Sequence[Corpus],
    sources: Sequence[Source],
    hash_of: Callable[[Manifest], str],
) -> str:
    if len(components) == 1 and not components[0].is_filtered:
        return hash_of(corpora[0].manifest)
    lines = []
    for weight, component, corpus, source in zip(whole_weights(components), components, corpora, sources, strict=True):
        # Limits of length and drop lists are hashed as earlier versions hashed them; their checkpoints resume.
        line = f"{weight} {hash_of(corpus.manifest)} {component.minimum} {component.maximum}"
        if component.drop is not None:
            line += f" {read_drop_list(Path(component.drop), corpus.manifest, corpus.prefix)[0].mask_sha256}"
        if component.where is not None and isinstance(source.documents, ChosenDocuments):
            line += f" where {hashlib.sha256(source.documents.bits.data).hexdigest()}"
        lines.append(line)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
