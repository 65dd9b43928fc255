"""A look at the first documents of a run before it starts, and estimates for all of it."""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_neobert.data.corpus.format import token_dtype
from megatron_neobert.data.inputs.recognise import read_chunk
from megatron_neobert.data.preprocessing.filters import apply_filters
from megatron_neobert.data.preprocessing.plan import Plan
from megatron_neobert.data.tokenizer.fast_backends import BackendMismatch, Encoder, open_encoder
from megatron_neobert.errors import DataError

_SAMPLE_BYTES = 1 << 20  # of text, from each of three chunks


@dataclass(frozen=True)
class Preview:
    """The first documents of a run, and estimates for all of it."""

    examples: list[tuple[str, NDArray[np.int64]]]  # text and ids
    documents: float
    tokens: float
    bin_bytes: float
    core_seconds: float


def preview(plan: Plan, *, examples: int = 2) -> Preview:
    """Tokenize up to 3 MB of text of the first, the middle and the last chunk, and take the rest to be alike.

    Raises:
        DataError: No document is found there.
    """
    try:
        return _preview(plan, plan.encoder, examples=examples)
    except BackendMismatch:  # the run would do such chunks again, and log it
        return _preview(plan, open_encoder(plan.tokenizer, "reference"), examples=examples)


def _preview(plan: Plan, encoder: Encoder, *, examples: int) -> Preview:
    started = time.perf_counter()
    shown: list[tuple[str, NDArray[np.int64]]] = []
    documents = tokens = input_bytes = 0.0
    for number in sorted({0, len(plan.chunks) // 2, len(plan.chunks) - 1}):
        chunk, text_bytes, progress = plan.chunks[number], 0, 0.0
        encoder.start_part()
        for unfiltered in read_chunk(chunk, plan.settings.read):
            batch = apply_filters(unfiltered, plan.filter_sources, plan.input_name(chunk.path))
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
        input_bytes += progress * plan.input_bytes(chunk)
    if not documents or not input_bytes:
        raise DataError("no document in the first, the middle and the last chunk; check --input and --text-key")
    seconds = time.perf_counter() - started
    factor = sum(version.bytes for version in plan.versions.values()) / input_bytes
    return Preview(
        examples=shown,
        documents=documents * factor,
        tokens=tokens * factor,
        bin_bytes=tokens * factor * token_dtype(plan.tokenizer.vocab_size).itemsize,
        core_seconds=seconds * factor,
    )
