"""Documents and vocabulary that a plan assumes for a run without --data-path: RefinedWeb's and bert-base-uncased's."""

import math
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import models

from megatron_neobert.config.data_path import Component, parse_data_path, whole_weights
from megatron_neobert.config.phases import resolve_phases
from megatron_neobert.config.schema import DataConfig, Settings
from megatron_neobert.data.batches.corpora import OpenedCorpora, open_phases
from megatron_neobert.data.batches.order import split_documents
from megatron_neobert.data.batches.windows import Source
from megatron_neobert.data.corpus.reader import Corpus
from megatron_neobert.data.tokenizer.files import STANDARD_NAMES, build_bert_backend
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from megatron_neobert.errors import ConfigError
from megatron_neobert.text import approximate

# tiiuae/falcon-refinedweb has 968 million rows, and about 600 billion tokens (arXiv 2306.01116).
DOCUMENTS = 968_000_000
# Of its documents in tokens of bert-base-uncased; their lengths are nearly log-normal.
MEDIAN_TOKENS, MEAN_TOKENS = 368, 640
VOCAB_SIZE = 30_522
_DRAWN = 1 << 18


class AssumedCorpus:
    """Document lengths like RefinedWeb's. Replaces a `Corpus` in a plan, which reads only lengths."""

    def __init__(self, component: Component) -> None:
        lengths, longest = _draw_lengths(), component.maximum or math.inf
        self.lengths = lengths[(lengths >= component.minimum) & (lengths <= longest)]
        self.documents = DOCUMENTS * len(self.lengths) // _DRAWN
        if not self.documents:
            raise ConfigError(f"{component}: no web document has such a length; plan with --data-path, or change it.")

    def lengths_of(self, documents: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the number of tokens of each document."""
        return self.lengths[documents % len(self.lengths)]


@cache
def _draw_lengths() -> NDArray[np.int32]:
    sigma = math.sqrt(2 * math.log(MEAN_TOKENS / MEDIAN_TOKENS))
    return np.random.default_rng(0).lognormal(math.log(MEDIAN_TOKENS), sigma, _DRAWN).clip(1).astype(np.int32)


def assumptions(settings: Settings) -> list[str]:
    """Return a sentence about the assumed data, or [] if the run has a --data-path."""
    if settings.data.data_path:
        return []
    vocabulary = f" and a vocabulary of {VOCAB_SIZE:,} ids" if settings.data.tokenizer_model is None else ""
    return [
        f"no --data-path, so documents like RefinedWeb's (median {MEDIAN_TOKENS} tokens, mean {MEAN_TOKENS})"
        f"{vocabulary}; --data-path and --tokenizer-model plan with your data"
    ]


def open_or_assume_phases(settings: Settings) -> list[OpenedCorpora]:
    """Return the opened data of each phase, or assumed data for a plan without --data-path.

    Assumed documents have lengths like RefinedWeb's. If --tokenizer-model is not given, a tokenizer of VOCAB_SIZE ids
    is assumed. Weights, `min` and `max` in a phase's data_path apply to the assumed documents; no corpus is opened.
    """
    if settings.data.data_path:
        return open_phases(settings)
    path = settings.data.tokenizer_model
    if path is None:
        names = {role: names[0] for role, names in STANDARD_NAMES.items()}
        words = [*names.values(), *(f"w{number}" for number in range(VOCAB_SIZE - len(names)))]
        vocabulary = {word: number for number, word in enumerate(words)}
        tokenizer = Tokenizer(build_bert_backend(models.WordPiece(vocabulary), lowercase=True), names)
    else:
        tokenizer = load_tokenizer(Path(path))
    return [_assume(phase.settings.data, tokenizer) for phase in resolve_phases(settings)]


def _assume(data: DataConfig, tokenizer: Tokenizer) -> OpenedCorpora:
    components = parse_data_path(data.data_path or ("RefinedWeb",))
    corpora = [AssumedCorpus(component) for component in components]
    return OpenedCorpora(
        tokenizer=tokenizer,
        training=tuple(
            Source(cast(Corpus, corpus), split_documents(corpus.documents, data.share_of_data_path)[0], weight)
            for corpus, weight in zip(corpora, whole_weights(components), strict=True)
        ),
        validation={},
        sha256="",
        description=[
            f"assumed for {component}: {approximate(corpus.documents)} documents "
            f"({approximate(corpus.documents * float(corpus.lengths.mean()))} tokens before any cut)"
            for component, corpus in zip(components, corpora, strict=True)
        ],
    )
