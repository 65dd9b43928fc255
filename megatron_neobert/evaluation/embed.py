"""Contrastive fine-tuning of any encoder, with the trainer and the losses of sentence-transformers.

InfoNCE over cosine similarities: every query of a batch against the positives and hard negatives of all pairs. A pair
may have any number of negatives. Checkpoints hold all that a resumed run needs to end with the same weights; the
trainer writes them file by file, `trainer_state.json` last: without a readable one a checkpoint is incomplete. They are
in a folder by the key of all settings and data, so that the same command resumes, and are removed at the end. The
final folder loads with `SentenceTransformer(folder)` and carries one prompt per dataset.

A batch has pairs of one dataset, drawn with p ~ size^alpha, and no text twice. The order is a function of the seed
alone. Within a dataset it is that of sentence-transformers' NoDuplicatesBatchSampler, which reads the rows in passes
over a random order and lets a row that shares a text with the batch wait for the next one.
"""

import itertools
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import datasets
import msgspec
import numpy as np
import torch
import transformers
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.sampler import MultiDatasetDefaultBatchSampler, NoDuplicatesBatchSampler
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from torch.utils.data import BatchSampler, ConcatDataset

from megatron_neobert.config.recipes import find_config
from megatron_neobert.errors import ConfigError, DataError, OutputError
from megatron_neobert.evaluation.data import digest_of
from megatron_neobert.evaluation.embed_data import (
    DatasetSource,
    TrainingSettings,
    find_local,
    load_pairs,
    read_config,
)
from megatron_neobert.evaluation.ledger import Ledger, key_of, open_ledger, write_record
from megatron_neobert.evaluation.models import LoadOptions, choose_device, fingerprint, load_sentence_transformer
from megatron_neobert.evaluation.options import FinetuneOptions
from megatron_neobert.evaluation.report import write_page
from megatron_neobert.runtime.atomic_files import temporary_path
from megatron_neobert.text import parse_json


def finetune(options: FinetuneOptions) -> None:
    """Train, and write the final folder, the record and its page, unless the ledger has them.

    Collective: all processes of a torchrun.

    Raises:
        ConfigError: The settings are impossible.
        MissingInputError, DataError, ConversionError: Model or data cannot be used.
        OutputError: The output has a model of other settings or data.
    """
    config, model = read_config(find_config(options.config)), options.model
    changes = {name: value for name in ("steps", "batch_size") if (value := getattr(options, name)) is not None}
    training = msgspec.structs.replace(config.training, **changes)
    device, first = choose_device(options.device).type, os.environ.get("RANK", "0") == "0"
    fingerprint(model)  # refuses what is no model, before minutes of reading
    paths = find_local(options.data_dir, [key for key, source in config.datasets.items() if source.default])
    pairs = {key: load_pairs(path, limit=options.limit) for key, path in paths.items()}
    settings = {
        "model": fingerprint(model),
        **msgspec.structs.asdict(training),
        "seed": options.seed,
        "gradient_cache": options.gradient_cache,
        "autocast_bfloat16": (options.dtype or ("bfloat16" if device == "cuda" else "float32")) == "bfloat16",
        "device": device,
        "attention": options.attention,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "datasets": {key: msgspec.structs.asdict(config.datasets[key]) for key in pairs},
        "rows": {key: len(rows) for key, rows in pairs.items()},
        "texts": {key: digest_of(rows, ("query", "positive", "negatives")) for key, rows in pairs.items()},
    }
    folder = options.output / model.resolve().name
    final, place = folder / f"{folder.name}-contrastive", folder / "contrastive"
    checkpoints = place / key_of(settings)
    with open_ledger(place, device) if first else nullcontext(Ledger(place)) as ledger:
        results = ledger.find(settings)
        if results is not None and final.exists() and fingerprint(final) == results["fingerprint"]:
            print(f"{final} is there already")
        elif final.exists() and (not checkpoints.exists() or is_recorded(final, ledger)):
            raise OutputError(f"{final} was made with other settings or data; use those, or name another --output.")
        else:
            arguments = build_arguments(training, options, checkpoints, autocast=settings["autocast_bfloat16"])
            results = train(model, pairs, config.datasets, training, options, arguments, final)
            results = results and ledger.add(settings, results)
        if first and results is not None:
            lines, record = [ledger.lines[key_of(settings)]], folder / "contrastive.json"
            write_record(record, "contrastive", folder=model, settings=settings, results=results, lines=lines)
            write_page("contrastive", [record], folder)
            shutil.rmtree(checkpoints, ignore_errors=True)


def build_arguments(
    training: TrainingSettings, options: FinetuneOptions, checkpoints: Path, *, autocast: bool
) -> SentenceTransformerTrainingArguments:
    """Return the arguments of the library's trainer.

    Raises:
        ConfigError: This process sees several GPUs.
    """
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(checkpoints),
        max_steps=training.steps,
        per_device_train_batch_size=training.batch_size,  # of the sampler's plan; see there what each dataset gets
        learning_rate=training.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=round(training.warmup_ratio * training.steps),
        weight_decay=training.weight_decay,
        max_grad_norm=training.clip_grad,
        bf16=autocast,
        use_cpu=options.device == "cpu",
        logging_steps=min(training.log_interval, training.steps),
        save_steps=training.save_interval,
        save_total_limit=2,
        dataloader_drop_last=True,  # the plan has a batch for every process at every step
        seed=options.seed,
        report_to="none",
        disable_tqdm=not sys.stderr.isatty(),
    )
    if arguments.n_gpu > 1:
        raise ConfigError(
            f"{arguments.n_gpu} GPUs are visible to one process, which would share out single batches; start with "
            f"torchrun --nproc-per-node {arguments.n_gpu}, or show it one with CUDA_VISIBLE_DEVICES=0."
        )
    return arguments


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint with the most steps, without those that were cut off."""
    complete = dict[int, Path]()
    for path in folder.glob("checkpoint-*/trainer_state.json"):
        with suppress(ValueError):  # cut off
            complete[parse_json(path.read_text(encoding="utf-8"))["global_step"]] = path.parent
    return complete[max(complete)] if complete else None


class _Trainer(SentenceTransformerTrainer):
    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """Add no model card: it would quote texts of the datasets and the paths of this machine."""


def build_prompts(sources: Mapping[str, DatasetSource], training: TrainingSettings) -> dict[str, dict[str, str]]:
    """Return by dataset and column the prompt before its texts, with the separator; nothing without instructions."""
    columns = {"none": (), "query": ("query",), "both": ("query", "document")}[training.instructions]
    prompts = {key: source.instruction + training.separator for key, source in sources.items()}
    return {key: dict.fromkeys(columns, prompt) for key, prompt in prompts.items() if columns}


def build_loss(model: SentenceTransformer, temperature: float, gradient_cache: int | None) -> torch.nn.Module:
    if gradient_cache is None:
        return MultipleNegativesRankingLoss(model, scale=1 / temperature)
    return CachedMultipleNegativesRankingLoss(model, scale=1 / temperature, mini_batch_size=gradient_cache)


def is_recorded(final: Path, ledger: Ledger) -> bool:
    """Return whether a finished unit made this model; if not, a start that was killed has left it."""
    return fingerprint(final) in {line["result"].get("fingerprint") for line in ledger.lines.values()}


def train(
    model_folder: Path,
    pairs: Mapping[str, datasets.Dataset],
    sources: Mapping[str, DatasetSource],
    training: TrainingSettings,
    options: FinetuneOptions,
    arguments: SentenceTransformerTrainingArguments,
    final: Path,
) -> dict[str, Any] | None:
    """Train, write the final folder, and return results for the record; None on ranks that write none.

    Collective: all processes of a torchrun.
    """
    transformers.set_seed(options.seed)  # before the model: a pooler that the folder lacks is drawn
    # AdamW's steps are smaller than what bfloat16 tells apart: float32, whichever type the folder holds.
    loading = LoadOptions(attention=options.attention)
    model = load_sentence_transformer(model_folder, loading, max_length=training.max_length)
    by_column = build_prompts({key: sources[key] for key in pairs}, training)
    # For users: encode_query and encode_document take the prompts of the data set that is drawn most often.
    usual = by_column.get(max(pairs, key=lambda key: len(pairs[key])), {})
    model.prompts = {**model.prompts, **usual, **{key: prompts["query"] for key, prompts in by_column.items()}}
    plan = SamplingPlan(
        names=tuple(pairs),
        sizes=tuple(len(rows) for rows in pairs.values()),
        batch_sizes=tuple(sources[key].batch_size(training.batch_size) for key in pairs),
        alpha=training.alpha,
        batches=training.steps * arguments.world_size,  # of all processes together
        seed=options.seed,
    )
    arguments.multi_dataset_batch_sampler = partial(TaskBatchSampler, plan=plan)
    arguments.prompts = by_column
    trainer = _Trainer(
        model=model,
        args=arguments,
        train_dataset=datasets.DatasetDict(pairs),
        loss=build_loss(model, training.temperature, options.gradient_cache),
        data_collator=PairCollator(preprocess_fn=model.preprocess, prompts=by_column),
    )
    started, checkpoint = time.monotonic(), newest_checkpoint(Path(str(arguments.output_dir)))
    if checkpoint is not None and trainer.is_world_process_zero():
        print(f"resuming from {checkpoint}", flush=True)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    seconds = time.monotonic() - started
    if not trainer.is_world_process_zero():
        return None
    # The history travels with the checkpoints, so that no step is there twice. A loss is the mean since the entry
    # before it; where a run resumed in the middle of an interval, since the checkpoint.
    losses = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    save_final(trainer.model, model_folder, final)
    first, last = losses[0][1], losses[-1][1]
    print(f"loss {first:.3f} -> {last:.3f} nats in {seconds:.0f} s; wrote {final}")
    return {
        "folder": str(final),
        "fingerprint": fingerprint(final),
        "first_loss_nats": first,
        "last_loss_nats": last,
        "losses_nats": losses,  # by step
        "seconds_of_this_start": round(seconds, 1),
        "datasets": plan.describe(),
    }


def save_final(model: SentenceTransformer, source: Path, final: Path) -> None:
    """Write the folder whole or not at all, in place of what an earlier start has left there."""
    temporary = temporary_path(final)
    shutil.rmtree(temporary, ignore_errors=True)
    if model.tokenizer.is_fast:  # it keeps the padding and cutting of its last call, and would write them down
        model.tokenizer.backend_tokenizer.no_truncation()
        model.tokenizer.backend_tokenizer.no_padding()
    model.save_pretrained(str(temporary), create_model_card=False)
    config = parse_json((source / "config.json").read_text(encoding="utf-8"))
    for name in {str(path).split("--")[-1].split(".")[0] for path in config.get("auto_map", {}).values()}:
        if (source / f"{name}.py").is_file():  # users without this project need it; nothing here has run it
            shutil.copyfile(source / f"{name}.py", temporary / f"{name}.py")
    shutil.rmtree(final, ignore_errors=True)
    temporary.replace(final)


# --- batches


@dataclass(frozen=True)
class SamplingPlan:
    """The drawing of batches; datasets in the order of the DatasetDict."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]  # rows
    batch_sizes: tuple[int, ...]  # pairs
    alpha: float
    batches: int
    seed: int

    def draw_datasets(self) -> np.ndarray:
        """Return the number of the dataset of each batch."""
        weights = np.asarray(self.sizes, dtype=np.float64) ** self.alpha
        generator = np.random.default_rng([self.seed, 0])
        return generator.choice(len(self.sizes), size=self.batches, p=weights / weights.sum())

    def describe(self) -> dict[str, dict[str, int]]:
        """Return rows, pairs per batch and number of batches of every dataset."""
        drawn = np.bincount(self.draw_datasets(), minlength=len(self.sizes)).tolist()
        return {
            name: {"rows": rows, "pairs_per_batch": pairs, "batches": batches}
            for name, rows, pairs, batches in zip(self.names, self.sizes, self.batch_sizes, drawn, strict=True)
        }


class TaskBatchSampler(MultiDatasetDefaultBatchSampler):
    """Batches of row numbers for a DataLoader over the concatenated datasets; made by the library's trainer."""

    def __init__(
        self,
        dataset: ConcatDataset,
        batch_samplers: list[BatchSampler],
        generator: torch.Generator | None = None,
        seed: int = 0,
        *,
        plan: SamplingPlan,
    ) -> None:
        super().__init__(dataset, batch_samplers, generator, seed)
        self.plan = plan
        # Of changing length: accelerate, which deals batches out to processes, would drop those of another length.
        self.batch_size = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[list[int]]:
        starts = [0, *itertools.accumulate(self.plan.sizes)]
        parts: list[Any] = self.dataset.datasets
        streams = [
            distinct_batches(rows, size, seed=(self.plan.seed, number), name=name)
            for number, (rows, size, name) in enumerate(
                zip(parts, self.plan.batch_sizes, self.plan.names, strict=True), start=1
            )
        ]
        for number in self.plan.draw_datasets():
            yield [starts[number] + row for row in next(streams[number])]

    def __len__(self) -> int:
        return self.plan.batches


class _Texts:
    """Rows as the library compares them: a column for each text, every hard negative one of its own."""

    column_names: ClassVar[list[str]] = []  # none of them is a label

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[Any, str]:
        row = self._rows[number]
        return {"query": row["query"], "positive": row["positive"], **dict(enumerate(row["negatives"]))}


def distinct_batches(rows: Any, size: int, *, seed: Sequence[int], name: str) -> Iterator[list[int]]:
    """Yield batches of row numbers without end; no two rows of a batch share a text, in any column.

    Args:
        rows: A dataset or a list of mappings with query, positive and negatives.

    Raises:
        DataError: A whole pass does not give one batch.
    """
    (first,) = np.random.SeedSequence(seed).generate_state(1).tolist()
    # The library's sampler adds the number of a pass to its seed.
    sampler = NoDuplicatesBatchSampler(_Texts(rows), size, drop_last=True, generator=torch.Generator(), seed=first)
    for number in itertools.count():
        sampler.set_epoch(number)
        batch = None
        for batch in sampler:
            yield batch
        if batch is None:
            raise DataError(
                f"{name}: its {len(rows):,} rows do not give one batch of {size} without a text that is there "
                "twice; lower --batch-size, or leave the dataset out."
            )


class PairCollator(SentenceTransformerDataCollator):
    """Queries, and documents: the positives in the order of the queries, then every negative of the batch.

    The losses take the first documents for the positives and all of them for candidates, so that rows may have
    different numbers of negatives.
    """

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        documents = [row["positive"] for row in features] + [text for row in features for text in row["negatives"]]
        columns = {"query": [row["query"] for row in features], "document": documents}
        named = {"dataset_name": features[0]["dataset_name"]} if "dataset_name" in features[0] else {}
        prompts = self._resolve_prompts(named) or {}
        batch: dict[str, Any] = {}
        for name, texts in columns.items():
            tokens = self.preprocess_fn(texts, prompt=self._get_prompt_for_column(prompts, name))
            batch |= {f"{name}_{key}": value for key, value in tokens.items()}
        return batch | named
