"""Data of contrastive fine-tuning: the YAML file with the settings, pairs from local files, and batches.

A dataset KEY is a file KEY.parquet or KEY.jsonl with the columns query, positive and, optionally, negatives: a list of
hard negatives. Files are read through the memory-mapped cache of `datasets` (HF_DATASETS_CACHE).

Every batch has pairs of one dataset, drawn with p ~ size^alpha, and no text twice. The order of the batches depends
only on the data and the seed. Within a dataset it is the order of sentence-transformers' NoDuplicatesBatchSampler.
"""

import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import datasets
import numpy as np
import torch
from msgspec import Meta, Struct, field
from pyarrow.parquet import ParquetFile
from sentence_transformers.base.sampler import MultiDatasetDefaultBatchSampler, NoDuplicatesBatchSampler
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator
from torch.utils.data import BatchSampler, ConcatDataset

from megatron_neobert.errors import ConfigError, DataError, MissingInputError
from megatron_neobert.evaluation.data import read_json_lines, reading, to_text
from megatron_neobert.evaluation.options import SHORTEST_INPUT
from megatron_neobert.runtime.atomic_files import sha256_of

_Count = Annotated[int, Meta(ge=1)]
_Positive = Annotated[float, Meta(gt=0)]

VALIDATION = "validation"  # file name of the held-out pairs
_KEY = "^[A-Za-z0-9_-]+$"  # a key is a file name, and a prompt name of the final model


class TrainingSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `training` of the YAML file. configs/evaluation/contrastive.yaml cites the sources of the defaults."""

    steps: _Count = 2000
    batch_size: _Count = 128  # pairs per process and step, before the divisor of a dataset
    alpha: Annotated[float, Meta(ge=0)] = 0.5
    temperature: _Positive = 0.07
    learning_rate: _Positive = 1e-4
    warmup_ratio: Annotated[float, Meta(ge=0, lt=1)] = 0.1  # of the steps
    weight_decay: Annotated[float, Meta(ge=0)] = 0.01
    clip_grad: _Positive = 1.0
    max_length: Annotated[int, Meta(ge=SHORTEST_INPUT)] = 1024  # tokens
    instructions: Literal["query", "both", "none"] = "query"
    separator: str = " "  # between instruction and text
    matryoshka: tuple[_Count, ...] = ()  # the loss also has terms for embeddings cut to these dimensions
    log_interval: _Count = 10  # steps
    save_interval: _Count = 250  # steps


class DatasetSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    divisor: _Count = 1  # of the batch size
    instruction: str = ""

    def batch_size(self, target: int) -> int:
        """Return the pairs per batch: at least two, because a single pair has no in-batch negative."""
        return max(2, target // self.divisor)


class ContrastiveConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Content of the YAML file. If `datasets` is empty, all files in --data-dir are used."""

    datasets: dict[Annotated[str, Meta(pattern=_KEY)], DatasetSettings] = field(default_factory=dict)
    training: TrainingSettings = field(default_factory=TrainingSettings)

    def __post_init__(self) -> None:
        if VALIDATION in self.datasets:
            raise ValueError(f"datasets: {VALIDATION} is the name of the held-out pairs; rename the dataset")


# --- local files


_TEXT = datasets.Value("string")
_FEATURES = datasets.Features({"query": _TEXT, "positive": _TEXT, "negatives": [_TEXT]})


def find_pairs(data_dir: Path, keys: Sequence[str]) -> dict[str, Path]:
    """Return {key: file}, sorted by key, for the datasets and, under the key VALIDATION, for the held-out pairs.

    Each file is KEY.parquet in `data_dir` or, if that is missing, KEY.jsonl. If `keys` is empty, all these files are
    datasets. Raises MissingInputError if a dataset has no file, or ConfigError if a file name is not a valid key.
    """
    # Sorted, so that the order of the YAML file does not affect a run.
    files = sorted(data_dir.glob("*.jsonl")) + sorted(data_dir.glob("*.parquet"))
    paths = {path.stem: path for path in sorted(files, key=lambda path: path.stem)}
    missing = sorted(set(keys) - set(paths))
    if missing or not set(paths) - {VALIDATION}:
        named = f"for {', '.join(missing)}" if missing else "to train on"
        raise MissingInputError(
            f"--data-dir {data_dir} has no pairs {named}: expected KEY.parquet or KEY.jsonl with the columns query and "
            "positive. Write the files (examples/prepare_contrastive.py downloads the paper's), or remove the datasets "
            "from --config."
        )
    if not keys and (unusable := [path.name for key, path in paths.items() if not re.match(_KEY, key)]):
        raise ConfigError(
            f"--data-dir {data_dir}: {unusable[0]!r:.80} is no name of a dataset; use letters, digits, - and _."
        )
    return {key: path for key, path in paths.items() if not keys or key in (*keys, VALIDATION)}


def load_pairs(path: Path, *, limit: int | None = None) -> datasets.Dataset:
    """Return the pairs of a Parquet or JSON Lines file, with the columns query, positive and negatives (a list).

    The file needs the columns query and positive; negatives is optional. Texts are stripped. Rows without query or
    positive are dropped, and their number is printed. Negatives are dropped if they are empty, repeated, or equal to
    query or positive. Then the first `limit` pairs (None: all) are returned. The rows are cached in HF_DATASETS_CACHE.
    Raises DataError if the file cannot be read, lacks columns, or has no row with a query and a positive.
    """
    if not sys.stderr.isatty():  # every update of a bar would be a line of the log
        datasets.disable_progress_bars()
    with reading(path):
        # Keyed by content, because the library's key (name, size and time of the file) may be equal for changed files.
        cache = Path(datasets.config.HF_DATASETS_CACHE) / "pairs" / sha256_of(path)
        # Not the library's readers: of JSON they infer types from the first block, which later values do not fit.
        try:
            rows: Any = datasets.Dataset.from_generator(
                _read_rows, features=_FEATURES, gen_kwargs={"path": path}, cache_dir=str(cache)
            )
        except datasets.exceptions.DatasetGenerationError as error:
            raise error.__cause__ or error from None
        pairs = rows.filter(lambda query, positive: bool(query and positive), input_columns=["query", "positive"])
    if len(pairs) < len(rows):
        print(f"{path.stem}: dropped {len(rows) - len(pairs):,} of {len(rows):,} rows without a pair", file=sys.stderr)
    if not len(pairs):
        raise DataError(f"{path} has no row with a query and a positive; write it again.")
    return pairs if limit is None else pairs.select(range(min(limit, len(pairs))))


def without_held_out(pairs: datasets.Dataset, held_out: datasets.Dataset, name: str) -> datasets.Dataset:
    """Drop pairs whose query or positive is a query of the held-out pairs. Print their number; return the other pairs.

    Documents may be shared, as in every retrieval corpus. Raises DataError if no pair is left; `name` is for messages.
    """
    queries = set(held_out["query"])
    kept = pairs.filter(
        lambda query, positive: query not in queries and positive not in queries, input_columns=["query", "positive"]
    )
    if dropped := len(pairs) - len(kept):
        print(f"{name}: dropped {dropped:,} of {len(pairs):,} pairs with a held-out query", file=sys.stderr)
    if not len(kept):
        raise DataError(f"{name}: every pair has a query of the file {VALIDATION}; use other pairs for validation.")
    return kept


def _read_rows(path: Path) -> Iterator[dict[str, Any]]:
    names, rows = dict[str, None](), read_json_lines(path)
    if path.suffix == ".parquet":
        # select refuses a repeated name, of which to_pylist would take the last column.
        batches = (batch.select(batch.schema.names) for batch in ParquetFile(path).iter_batches())
        rows = (row for batch in batches for row in batch.to_pylist())
    for row in rows:
        names |= dict.fromkeys(row)
        query, positive = (to_text(row.get(name)).strip() for name in ("query", "positive"))
        negatives = row.get("negatives") or []
        if not isinstance(negatives, list):
            raise TypeError(f"negatives is {negatives!r:.80}, not a list of texts")
        texts = dict.fromkeys(to_text(text).strip() for text in negatives)
        kept = [text for text in texts if text not in ("", query, positive)]
        yield {"query": query, "positive": positive, "negatives": kept}
    if missing := {"query", "positive"} - set(names):
        raise DataError(
            f"{path} has the columns {', '.join(names)}, but no {', '.join(sorted(missing))}; rename the columns."
        )


# --- batches


def draw_datasets(sizes: Sequence[int], *, alpha: float, batches: int, seed: int) -> np.ndarray:
    """Draw a dataset for each batch, with p ~ size^alpha. Return dataset indices. `sizes` are pairs per dataset."""
    weights = np.asarray(sizes, dtype=np.float64) ** alpha
    return np.random.default_rng([seed, 0]).choice(len(sizes), size=batches, p=weights / weights.sum())


class PlannedBatchSampler(MultiDatasetDefaultBatchSampler):
    """Sampler of `batches` batches, as indices into the concatenated datasets. The trainer constructs the sampler.

    `batch_sizes` maps each dataset's name (for messages) to its pairs per batch, in the order of the datasets.
    """

    def __init__(
        self,
        dataset: ConcatDataset,
        batch_samplers: list[BatchSampler],
        *,
        batch_sizes: Mapping[str, int],
        alpha: float,
        batches: int,
        **arguments: Any,
    ) -> None:
        super().__init__(dataset, batch_samplers, **arguments)
        self.batch_sizes, self.alpha, self.batches = batch_sizes, alpha, batches
        # Batch sizes differ. With a fixed size, accelerate would drop batches of other sizes.
        self.batch_size = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[list[int]]:
        sizes = [len(pairs) for pairs in self.dataset.datasets]  # type: ignore[arg-type]
        offsets = [0, *itertools.accumulate(sizes)]
        sources = zip(self.dataset.datasets, self.batch_sizes.items(), strict=True)
        streams = [
            distinct_batches(pairs, batch_size, seed=(self.seed, number), name=name)
            for number, (pairs, (name, batch_size)) in enumerate(sources, start=1)
        ]
        for index in draw_datasets(sizes, alpha=self.alpha, batches=self.batches, seed=self.seed):
            yield [offsets[index] + pair for pair in next(streams[index])]

    def __len__(self) -> int:
        return self.batches


class _TextColumns:
    """View of a dataset of pairs with one column per text, the format that NoDuplicatesBatchSampler reads."""

    column_names: ClassVar[list[str]] = []  # the sampler looks for label columns here

    def __init__(self, pairs: Any) -> None:
        self._pairs = pairs

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> dict[Any, str]:
        pair = self._pairs[index]
        return {"query": pair["query"], "positive": pair["positive"], **dict(enumerate(pair["negatives"]))}


def distinct_batches(pairs: Any, batch_size: int, *, seed: Sequence[int], name: str) -> Iterator[list[int]]:
    """Yield batches of `batch_size` indices into `pairs`, without end. Every pass over the pairs has a new order.

    No two pairs of a batch share a text, in any column. Pairs that do not fill a last batch are left out of a pass. If
    shared texts leave a pass with fewer than len(pairs) // batch_size batches, pairs are drawn again to fill the rest.
    Raises DataError, with the `name` of the dataset, if a pass does not fill one batch.
    """
    (sampler_seed,) = np.random.SeedSequence(seed).generate_state(1).tolist()
    sampler = NoDuplicatesBatchSampler(
        _TextColumns(pairs), batch_size, drop_last=True, generator=torch.Generator(), seed=sampler_seed
    )
    for epoch in itertools.count():
        sampler.set_epoch(epoch)  # shuffles anew: the sampler adds the epoch to its seed
        batch = None
        for batch in sampler:
            yield batch
        if batch is None:
            raise DataError(
                f"{name}: its {len(pairs):,} rows do not fill one batch of {batch_size} without repeating a text; "
                "lower --batch-size, raise the divisor of the dataset, or leave it out."
            )


class PairCollator(SentenceTransformerDataCollator):
    """Collator that tokenizes a batch into the columns query and document.

    The documents are the positives in the order of the queries, then all negatives of the batch. The losses match the
    first documents to the queries and use all documents as candidates, so pairs may have different numbers of
    negatives.
    """

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        documents = [pair["positive"] for pair in features] + [text for pair in features for text in pair["negatives"]]
        columns = {"query": [pair["query"] for pair in features], "document": documents}
        dataset = {"dataset_name": features[0]["dataset_name"]} if "dataset_name" in features[0] else {}
        prompts = self._resolve_prompts(dataset) or {}
        batch: dict[str, Any] = {}
        for name, texts in columns.items():
            tokens = self.preprocess_fn(texts, prompt=self._get_prompt_for_column(prompts, name))
            batch |= {f"{name}_{key}": value for key, value in tokens.items()}
        return batch | dataset
