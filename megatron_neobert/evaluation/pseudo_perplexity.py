"""Pseudo-perplexity, exp(-1/N sum log p(x_i | x without i)): how sure a model is of each token given all the others.

Tokens that the tokenizer adds are neither masked nor counted. Costs as many forwards as tokens are masked, so a text of
4,096 tokens costs 4,096 of them unless positions are drawn. Tokens are masked one at a time, in batches of documents of
similar length. The longest documents come first: what does not fit into memory is found at once, and the time that
remains is not underrated. Each document is a unit of the ledger, added when its last position is done.

A document is known by a hash of its text, by the same name in every file and order. One that occurs twice counts once.
A document is truncated at the longest input: the rest is neither read nor scored.

Of a document with N tokens of which K were drawn, the mean loss has the standard error s sqrt((1 - K/N) / K), s² being
the variance of the K losses: none when all tokens were masked. Documents are averaged as logarithms, because there the
drawing is unbiased, while exp raises every drawn value. The band is the 95 % Student interval of that average over the
documents of a bin, each taken as one observation, so it holds the noise of the drawing as well.
"""

import hashlib
import math
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import t as student
from tqdm import tqdm

from megatron_neobert.data.inputs.find import find_inputs, input_label
from megatron_neobert.data.inputs.recognise import read_chunk, split_into_chunks
from megatron_neobert.data.inputs.records import ReadSettings
from megatron_neobert.errors import DataError
from megatron_neobert.evaluation.ledger import Ledger, Unit, key_of, open_ledger, write_record
from megatron_neobert.evaluation.masked_scorer import Row, Scorer
from megatron_neobert.evaluation.models import LoadOptions, choose_device, fingerprint
from megatron_neobert.evaluation.options import PerplexityOptions
from megatron_neobert.evaluation.report import write_page
from megatron_neobert.runtime.atomic_files import name_models

BAND = "95 % of the average over documents"
_ID_DIGITS = 16  # 64 bits: two of a million documents share one with a probability of 3e-8
_CONFIDENCE = 0.95  # of the band above
_SHORTEST_BIN = 128  # tokens; bins end at this and at its doublings
_DOCUMENTS_OF_BAND = 5  # of fewer, Student's interval spans orders of magnitude


@dataclass(frozen=True)
class Document:
    """One row: its tokens, and the positions that will be masked one at a time."""

    id: str
    ids_s: NDArray[np.int32]
    positions: tuple[int, ...]  # increasing
    scorable: int  # tokens that could be masked: all but those that the tokenizer adds
    truncated: bool  # as long as the longest input: cut there, or by chance exactly as long


def evaluate(options: PerplexityOptions) -> None:
    """Measure one model after the other, and draw their curves.

    Raises:
        MissingInputError, ConversionError, DataError: A model or the texts cannot be used.
        ConfigError: A model cannot read rows as long as asked for.
        OutputError: Another command is measuring a model into this output.
    """
    folders, left_out = name_models(options.model), Counter[str]()
    if next(_read(options, left_out), None) is None:  # before a model is loaded
        raise DataError(
            f"--data {' '.join(options.data)} has no text ({_listed(left_out)}); check --text-key {options.text_key}."
        )
    for name, folder in folders.items():
        found = evaluate_model(folder, options)
        value, error = f"{found['pseudo_perplexity']:.6g}", found["standard_error"]
        drawn = f" ± {error:.3g} (standard error, of the positions drawn)" if error else ""
        print(f"{name}: pseudo-perplexity {value}{drawn}, {found['documents']:,} documents", flush=True)
    write_page(
        "pseudo_perplexity", [options.output / name / "pseudo_perplexity.json" for name in folders], options.output
    )
    print(f"wrote {options.output / 'pseudo_perplexity.md'} and .png")


def evaluate_model(folder: Path, options: PerplexityOptions) -> dict[str, Any]:
    """Measure a model; write OUTPUT/MODEL/pseudo_perplexity.json and return its results."""
    loading = LoadOptions(
        dtype=getattr(torch, options.dtype), device=choose_device(options.device), attention=options.attention
    )
    scorer = Scorer(folder, loading)
    max_length = options.max_length or scorer.max_length
    scorer.check_length(max_length)
    selected, left_out = select_documents(options, scorer.tokenizer, max_length)
    protocol = {
        "model": fingerprint(folder),
        "max_length": max_length,
        "positions_per_document": options.positions_per_doc,
        "seed": None if options.positions_per_doc is None else options.seed,
        "dtype": str(scorer.model.dtype).removeprefix("torch."),
        "attention": scorer.model.config._attn_implementation,
    }
    place = options.output / folder.resolve().name
    with open_ledger(place / "pseudo_perplexity", scorer.model.device) as ledger:
        units = {document.id: {**protocol, "document": document.id} for document in selected}
        left = [document for document in selected if ledger.find(units[document.id]) is None]
        total = sum(len(document.positions) * len(document.ids_s) for document in left)
        with tqdm(total=total, desc=place.name, unit=" tokens", unit_scale=True, mininterval=_seconds()) as progress:
            for tokens in measure(scorer, left, ledger, units, batch_tokens=options.batch_tokens):
                progress.update(tokens)
        lines = [ledger.lines[key_of(unit)] for unit in units.values()]
    documents = [DocumentResult(**line["result"]) for line in lines]
    results = {
        **average_over_tokens(documents),
        "documents": len(documents),
        "positions": sum(result.positions for result in documents),
        "truncated": sum(result.truncated for result in documents),
        "left_out": dict(left_out),
        "curve": average_by_length(documents),
        "band": BAND,
    }
    others = ("min_length", "limit", "text_key", "batch_tokens")
    settings = protocol | {name: getattr(options, name) for name in others}
    settings |= {"data": list(map(input_label, options.data)), "device": str(scorer.model.device)}
    record = place / "pseudo_perplexity.json"
    write_record(record, "pseudo_perplexity", folder=folder, settings=settings, results=results, lines=lines)
    return results


def _seconds() -> float:
    """Return the seconds between two lines of progress, of which a log keeps every one."""
    return 0.1 if sys.stderr.isatty() else 30.0


def measure(
    scorer: Scorer, documents: Sequence[Document], ledger: Ledger, units: Mapping[str, Unit], *, batch_tokens: int
) -> Iterator[int]:
    """Measure documents, and add each to the ledger as soon as its last position is done.

    Args:
        units: Unit of work of each document, by its id.
        batch_tokens: Rows times the longest of them, at most, unless a single row is longer.

    Yields:
        The tokens of each batch, padding not counted.
    """
    losses_of: dict[str, list[float]] = {}
    for batch in batches(documents, batch_tokens=batch_tokens):
        found = scorer.score([Row(document.ids_s, position) for document, position in batch])
        for (document, _), loss in zip(batch, found, strict=True):
            losses = losses_of.setdefault(document.id, [])
            losses.append(loss)
            if len(losses) < len(document.positions):
                continue
            del losses_of[document.id]
            result = DocumentResult(
                id=document.id,
                length=len(document.ids_s),
                truncated=document.truncated,
                tokens=document.scorable,
                positions=len(losses),
                nll_sum=math.fsum(losses),
                nll_variance=variance(losses) if len(losses) > 1 else None,
            )
            ledger.add(units[document.id], asdict(result))
        yield sum(len(document.ids_s) for document, _ in batch)


def batches(documents: Iterable[Document], *, batch_tokens: int) -> Iterator[list[tuple[Document, int]]]:
    """Yield every position of every document once, the longest documents first, in batches of similar length."""
    batch: list[tuple[Document, int]] = []
    for document in sorted(documents, key=lambda document: (-len(document.ids_s), document.id)):
        for position in document.positions:
            if batch and (len(batch) + 1) * len(batch[0][0].ids_s) > batch_tokens:
                yield batch
                batch = []
            batch.append((document, position))
    if batch:
        yield batch


# --- averages


@dataclass(frozen=True, kw_only=True)
class DocumentResult:
    """Result of one document; losses in nats."""

    id: str
    length: int  # tokens of the row, those that the tokenizer adds included
    truncated: bool
    tokens: int  # that could be masked
    positions: int  # that were
    nll_sum: float
    nll_variance: float | None  # of the positions' losses; None of a single one

    @property
    def mean_nll(self) -> float:
        return self.nll_sum / self.positions

    @property
    def standard_error(self) -> float | None:
        """Standard error of `mean_nll`; None where a single position tells nothing about others."""
        if self.positions == self.tokens:
            return 0.0
        if self.nll_variance is None:
            return None
        return math.sqrt(self.nll_variance / self.positions * (1 - self.positions / self.tokens))


def average_by_length(results: Iterable[DocumentResult]) -> list[dict[str, Any]]:
    """Return the curve: one point per bin that has documents, by increasing length. Bins end at 128, 256, 512, ..."""
    groups: dict[int, list[DocumentResult]] = {}
    for result in results:
        groups.setdefault(max(_SHORTEST_BIN, 1 << (result.length - 1).bit_length()), []).append(result)
    curve = []
    for end, group in sorted(groups.items()):
        losses = [result.mean_nll for result in group]
        mean = fmean(losses)
        band: list[float | None] = [None, None]
        if len(losses) >= _DOCUMENTS_OF_BAND:
            half = float(student.ppf((1 + _CONFIDENCE) / 2, len(losses) - 1)) * stdev(losses) / math.sqrt(len(losses))
            band = [math.exp(mean - half), math.exp(mean + half)]
        curve.append(
            {
                "above": 0 if end == _SHORTEST_BIN else end // 2,
                "up_to": end,
                "documents": len(losses),
                "mean_length": fmean(result.length for result in group),
                "pseudo_perplexity": math.exp(mean),
                "low": band[0],  # None where there are too few documents to know their spread
                "high": band[1],
            }
        )
    return curve


def average_over_tokens(results: Sequence[DocumentResult]) -> dict[str, float | None]:
    """Return the average as if all documents were one: each counts as often as it has tokens, drawn or not.

    The standard error is that of the positions that were not drawn; None where a document has a single one.
    """
    tokens = sum(result.tokens for result in results)
    mean = math.fsum(result.tokens * result.mean_nll for result in results) / tokens
    known = [result.tokens * error for result in results if (error := result.standard_error) is not None]
    error = math.exp(mean) * math.hypot(*known) / tokens if len(known) == len(results) else None
    return {"pseudo_perplexity": math.exp(mean), "standard_error": error, "nats_per_token": mean}


# --- documents


def select_documents(
    options: PerplexityOptions, tokenizer: Any, max_length: int
) -> tuple[list[Document], Counter[str]]:
    """Return documents that are read, tokenised and chosen in the order of the files, and the others by reason.

    Raises:
        MissingInputError: An input does not exist.
        DataError: A file is damaged or has no such text, or no document is long enough.
    """
    chosen, left_out, seen = list[Document](), Counter[str](), set[str]()
    for texts in _read(options, left_out):
        encoded = tokenizer(
            texts,
            truncation=True,
            max_length=max_length,
            return_special_tokens_mask=True,
            return_attention_mask=False,
            split_special_tokens=True,  # "[SEP]" written in a text is five characters
        )
        for text, ids, added in zip(texts, encoded["input_ids"], encoded["special_tokens_mask"], strict=True):
            id = document_id(text)
            scorable = [place for place, special in enumerate(added) if not special]
            if id in seen:
                left_out["met before"] += 1
            elif len(ids) < options.min_length or not scorable:
                left_out["shorter than --min-length"] += 1
            else:
                chosen.append(
                    Document(
                        id=id,
                        ids_s=np.array(ids, dtype=np.int32),
                        positions=draw_positions(id, scorable, options.positions_per_doc, seed=options.seed),
                        scorable=len(scorable),
                        truncated=len(ids) == max_length,
                    )
                )
                if len(chosen) == options.limit:
                    return chosen, left_out
            seen.add(id)
    if not chosen:
        raise DataError(
            f"--data {' '.join(options.data)} has no document to measure ({_listed(left_out)}); "
            f"check --text-key {options.text_key} and --min-length {options.min_length}."
        )
    return chosen, left_out


def document_id(text: str) -> str:
    """Return the name of a text, the same in every file."""
    return hashlib.sha256(text.encode()).hexdigest()[:_ID_DIGITS]


def draw_positions(id: str, scorable: Sequence[int], count: int | None, *, seed: int) -> tuple[int, ...]:
    """Draw `count` of the positions without replacement, increasing; they depend on document and seed only."""
    if count is None or count >= len(scorable):
        return tuple(scorable)
    return tuple(sorted(random.Random(f"{seed} {id}").sample(scorable, count)))


def _listed(left_out: Counter[str]) -> str:
    return ", ".join(f"{count:,} x {reason}" for reason, count in left_out.items()) or "no record"


def _read(options: PerplexityOptions, left_out: Counter[str]) -> Iterator[list[str]]:
    read = ReadSettings(text_key=options.text_key)
    for path in find_inputs(options.data):
        for chunk in split_into_chunks(path, read):
            for batch in read_chunk(chunk, read):
                left_out.update(rejected.reason for rejected in batch.rejected)
                left_out.update(batch.dropped)
                if batch.texts:
                    yield batch.texts
