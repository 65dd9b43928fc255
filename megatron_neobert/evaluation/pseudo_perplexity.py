"""Pseudo-perplexity of documents, exp(-1/N sum_i log p(x_i | all other tokens)), and its curve by length.

Each token is masked alone, so a document costs as many forward passes as tokens are masked: 4,096 for 4,096 tokens,
unless `--positions-per-doc` draws fewer. Tokens that the tokenizer adds are neither masked nor counted. A batch holds
copies of one document.

Each document is a unit of the ledger. It is identified by a hash of its text, so file names and order do not matter,
and a document that occurs twice is measured once. Documents are truncated at the longest input of the model.

With K of N tokens drawn, the mean loss of a document has the standard error s sqrt((1 - K/N) / K), where s² is the
variance of the K losses. Documents are averaged by their losses: the mean of drawn losses is unbiased, its exp is not.
The band of a bin is the 95 % Student interval of the mean loss over the bin's documents, so it includes the error of
drawing positions.

Shapes: b copies of a document, s tokens, h hidden size, v vocabulary.
"""

import hashlib
import math
import random
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Any

import torch
from scipy.stats import t as student
from torch import Tensor, nn
from tqdm import tqdm

from megatron_neobert.data.inputs.find import input_label
from megatron_neobert.errors import ConfigError, ConversionError, DivergenceError
from megatron_neobert.evaluation.ledger import key_of, open_ledger, origin_of, write_record
from megatron_neobert.evaluation.models import (
    UNLIMITED_LENGTH,
    count_learned_positions,
    fingerprint,
    load_model,
    load_tokenizer,
    longest_input,
)
from megatron_neobert.evaluation.options import ComputeOptions, PerplexityOptions
from megatron_neobert.evaluation.report import write_page
from megatron_neobert.evaluation.texts import no_document, read_texts
from megatron_neobert.huggingface.hub import find_models, model_name

BAND = "95 % confidence interval of the mean over documents"
_CONFIDENCE = 0.95  # of BAND
_ID_DIGITS = 16  # 64 bits: among a million documents, two share an id with a probability of 3e-8
_SHORTEST_BIN_TOKENS = 128  # bins end at this length and at its doublings
_BAND_DOCUMENTS = 5  # with fewer, Student's interval spans orders of magnitude


@dataclass(frozen=True)
class Document:
    """Token ids of a document, and the positions to mask one at a time."""

    id: str
    ids_s: Tensor  # int32
    positions: tuple[int, ...]  # increasing
    scorable: int  # tokens that could be masked: all except the tokens that the tokenizer added
    truncated: bool  # True for every document of the maximum length, even if nothing was cut


@dataclass(frozen=True, kw_only=True)
class DocumentResult:
    """Result of one document; losses in nats."""

    id: str
    length: int  # tokens, including those that the tokenizer added
    truncated: bool
    tokens: int  # tokens that could be masked
    positions: int  # tokens that were masked
    nll_sum: float
    nll_variance: float | None  # variance of the losses; None for a single one

    @property
    def mean_nll(self) -> float:
        return self.nll_sum / self.positions

    @property
    def standard_error(self) -> float | None:
        """Standard error of `mean_nll` in nats: 0 if all tokens were masked, None if only one of several was masked."""
        if self.positions == self.tokens:
            return 0.0
        if self.nll_variance is None:
            return None
        return math.sqrt(self.nll_variance / self.positions * (1 - self.positions / self.tokens))


def run_perplexity(options: PerplexityOptions) -> None:
    """Measure each model; write a record per model, and a page and a figure of all models; print a line per model."""
    models = find_models(options.model)
    for name, folder in models.items():
        results = evaluate_model(folder, options)
        value, error = f"{results['pseudo_perplexity']:.6g}", results["standard_error"]
        margin = f" ± {error:.3g} (standard error)" if error else ""
        print(f"{name}: pseudo-perplexity {value}{margin}, {results['documents']:,} documents", flush=True)
    records = [options.output / name / "pseudo_perplexity.json" for name in models]
    write_page("pseudo_perplexity", records, options.output)
    print(f"wrote {options.output / 'pseudo_perplexity.md'} and .png")


def evaluate_model(folder: Path, options: PerplexityOptions) -> dict[str, Any]:
    """Measure a model, write OUTPUT/MODEL/pseudo_perplexity.json, and return the `results` in this record.

    Documents in the ledger are not measured again.
    """
    scorer = Scorer(folder, options, options.max_length)
    documents, dropped = select_documents(options, scorer.tokenizer, scorer.max_length)
    protocol = {
        "model": fingerprint(folder),
        "max_length": scorer.max_length,
        "positions_per_document": options.positions_per_doc,
        "seed": None if options.positions_per_doc is None else options.seed,
        "dtype": str(scorer.model.dtype).removeprefix("torch."),
        "attention": scorer.model.config._attn_implementation,
    }
    output = options.output / model_name(folder)
    with open_ledger(output / "pseudo_perplexity", scorer.model.device) as ledger:
        units = {document.id: {**protocol, "document": document.id} for document in documents}
        unmeasured = [document for document in documents if ledger.find(units[document.id]) is None]
        total = sum(len(document.positions) * len(document.ids_s) for document in unmeasured)
        # Between two updates: a terminal overwrites the line, a log keeps every line.
        seconds = 0.1 if sys.stderr.isatty() else 30.0
        with tqdm(total=total, desc=output.name, unit=" tokens", unit_scale=True, mininterval=seconds) as progress:
            # Longest first: a batch that does not fit into memory fails at the start, and the first estimate of the
            # remaining time is not too low.
            for document in sorted(unmeasured, key=lambda document: (-len(document.ids_s), document.id)):
                result = measure_document(scorer, document, batch_tokens=options.batch_tokens, progress=progress)
                ledger.add(units[document.id], asdict(result))
        lines = [ledger.lines[key_of(unit)] for unit in units.values()]
    measured = [DocumentResult(**line["result"]) for line in lines]
    results = {
        **average_over_tokens(measured),
        "documents": len(measured),
        "positions": sum(result.positions for result in measured),
        "truncated": sum(result.truncated for result in measured),
        "left_out": dict(dropped),
        "curve": average_by_length(measured),
        "band": BAND,
    }
    settings = {
        **protocol,
        **{name: getattr(options, name) for name in ("min_length", "limit", "text_key", "batch_tokens")},
        "data": list(map(input_label, options.data)),
        "device": str(scorer.model.device),
    }
    path, origin = output / "pseudo_perplexity.json", origin_of(lines)
    write_record(path, folder=folder, fingerprint=protocol["model"], settings=settings, results=results, origin=origin)
    return results


# --- losses


class Scorer:
    """A masked language model and its tokenizer. Documents are truncated at `max_length` tokens."""

    def __init__(self, folder: Path, options: ComputeOptions, max_length: int | None = None) -> None:
        """Load the model and its tokenizer. If `max_length` is None, use the longest input that both support.

        Raises:
            ConversionError: The tokenizer has no mask token.
            ConfigError: The model has fewer learned positions than `max_length`, or there is no maximum length.
        """
        self.folder = folder
        self.tokenizer = load_tokenizer(folder)
        if self.tokenizer.mask_token_id is None:
            raise ConversionError(
                f"{folder}: its tokenizer has no mask token, which pseudo-perplexity needs; name an encoder trained "
                "with masks, or add mask_token to tokenizer_config.json."
            )
        self.model = load_model(folder, "AutoModelForMaskedLM", options)
        self.max_length = max_length or longest_input(self.model, self.tokenizer, at_most=UNLIMITED_LENGTH)
        positions = count_learned_positions(self.model)
        if positions is not None and self.max_length > positions:
            raise ConfigError(
                f"--max-length {max_length}: {folder} has {positions} learned positions; give at most {positions}."
            )
        if self.max_length >= UNLIMITED_LENGTH:
            raise ConfigError(f"{folder}: model and tokenizer set no maximum length; give --max-length.")

    @torch.inference_mode()
    def score(self, ids_s: Tensor, positions: Sequence[int]) -> list[float]:
        """Mask each position of a document alone, all in one batch, and return the losses: -log p, in nats.

        Raises DivergenceError if a loss is not finite, and ConfigError if the batch does not fit into GPU memory.
        """
        rows_b, positions_b = torch.arange(len(positions)), torch.tensor(positions)
        ids_bs = ids_s.long().repeat(len(positions), 1)
        targets_b = ids_bs[rows_b, positions_b]
        ids_bs[rows_b, positions_b] = self.tokenizer.mask_token_id

        def keep_masked_positions(module: nn.Module, arguments: Any, output: Any) -> None:
            output.last_hidden_state = output.last_hidden_state[rows_b, positions_b][:, None]

        try:
            ids_bs = ids_bs.to(self.model.device)
            # The head computes every position separately, so it only gets the masked ones: [b, 1, h].
            with self.model.base_model.register_forward_hook(keep_masked_positions):
                logits_bv = self.model(input_ids=ids_bs, attention_mask=torch.ones_like(ids_bs)).logits[:, 0].float()
            losses_b = nn.functional.cross_entropy(logits_bv, targets_b.to(logits_bv.device), reduction="none")
        except torch.OutOfMemoryError as error:
            tokens = len(positions) * len(ids_s)
            raise ConfigError(
                f"{len(positions)} x {len(ids_s)} tokens do not fit into memory; give --batch-tokens below {tokens}."
            ) from error
        if not losses_b.isfinite().all():
            bad = losses_b[~losses_b.isfinite()][0].item()
            raise DivergenceError(
                f"{self.folder}: the model gives {bad} instead of a loss in "
                f"{str(self.model.dtype).removeprefix('torch.')}; try --dtype float32."
            )
        losses: list[float] = losses_b.tolist()
        return losses


def measure_document(scorer: Scorer, document: Document, *, batch_tokens: int, progress: tqdm) -> DocumentResult:
    """Mask each of `document.positions` in its own copy of the document, score the copies, and return the result.

    A batch has as many copies as fit into `batch_tokens`, at least one. `progress` advances by each batch's tokens.
    """
    length, losses = len(document.ids_s), list[float]()
    size = max(1, batch_tokens // length)
    for start in range(0, len(document.positions), size):
        positions = document.positions[start : start + size]
        losses += scorer.score(document.ids_s, positions)
        progress.update(len(positions) * length)
    return DocumentResult(
        id=document.id,
        length=length,
        truncated=document.truncated,
        tokens=document.scorable,
        positions=len(losses),
        nll_sum=math.fsum(losses),
        nll_variance=variance(losses) if len(losses) > 1 else None,
    )


# --- averages


def average_by_length(results: Iterable[DocumentResult]) -> list[dict[str, Any]]:
    """Return the curve: one point for each bin of lengths that has documents, by increasing length.

    Bins end at 128, 256, 512, ... tokens (inclusive). All documents of a bin have the same weight. `low` and `high` are
    the ends of the 95 % interval, or None if the bin has fewer than five documents.
    """
    bins: dict[int, list[DocumentResult]] = {}
    for result in results:
        bins.setdefault(max(_SHORTEST_BIN_TOKENS, 1 << (result.length - 1).bit_length()), []).append(result)
    curve = []
    for end, members in sorted(bins.items()):
        losses = [result.mean_nll for result in members]
        mean, low, high = fmean(losses), None, None
        if len(losses) >= _BAND_DOCUMENTS:
            half = float(student.ppf((1 + _CONFIDENCE) / 2, len(losses) - 1)) * stdev(losses) / math.sqrt(len(losses))
            low, high = math.exp(mean - half), math.exp(mean + half)
        curve.append(
            {
                "above": 0 if end == _SHORTEST_BIN_TOKENS else end // 2,
                "up_to": end,
                "documents": len(losses),
                "mean_length": fmean(result.length for result in members),
                "pseudo_perplexity": math.exp(mean),
                "low": low,
                "high": high,
            }
        )
    return curve


def average_over_tokens(results: Sequence[DocumentResult]) -> dict[str, float | None]:
    """Return pseudo_perplexity, standard_error and nats_per_token of all documents together.

    The weight of a document is its number of tokens, masked or not. The standard error of the pseudo-perplexity comes
    from drawing positions: 0 if all tokens were masked, and None if any document has no standard error.
    """
    tokens = sum(result.tokens for result in results)
    mean = math.fsum(result.tokens * result.mean_nll for result in results) / tokens
    errors = [result.tokens * error for result in results if (error := result.standard_error) is not None]
    error = math.exp(mean) * math.hypot(*errors) / tokens if len(errors) == len(results) else None
    return {"pseudo_perplexity": math.exp(mean), "standard_error": error, "nats_per_token": mean}


# --- documents


def select_documents(
    options: PerplexityOptions, tokenizer: Any, max_length: int
) -> tuple[list[Document], Counter[str]]:
    """Read and tokenize documents in the order of the files, until `--limit` are kept, and draw the positions to mask.

    Return the documents, truncated to `max_length` tokens, and {reason: number of dropped records}. Raises DataError if
    no document remains.
    """
    documents, dropped, seen, count = list[Document](), Counter[str](), set[str](), options.positions_per_doc
    for texts in read_texts(options, dropped):
        encoded = tokenizer(
            texts,
            truncation=True,
            max_length=max_length,
            return_special_tokens_mask=True,
            return_attention_mask=False,
            split_special_tokens=True,  # "[SEP]" in a text is five characters
        )
        for text, ids, special in zip(texts, encoded["input_ids"], encoded["special_tokens_mask"], strict=True):
            id_ = hashlib.sha256(text.encode()).hexdigest()[:_ID_DIGITS]
            scorable = [position for position, is_special in enumerate(special) if not is_special]
            if id_ in seen:
                dropped["met before"] += 1
            elif len(ids) < options.min_length or not scorable:
                dropped["shorter than --min-length"] += 1
            else:
                ids_s, is_cut, positions = torch.tensor(ids, dtype=torch.int32), len(ids) == max_length, scorable
                if count is not None and count < len(scorable):
                    positions = sorted(random.Random(f"{options.seed} {id_}").sample(scorable, count))
                documents.append(Document(id_, ids_s, tuple(positions), len(scorable), is_cut))
                if len(documents) == options.limit:
                    return documents, dropped
            seen.add(id_)
    if not documents:
        raise no_document(options, dropped)
    return documents, dropped
