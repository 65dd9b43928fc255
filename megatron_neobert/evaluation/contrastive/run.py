"""Contrastive fine-tuning of any encoder, with the trainer and the losses of sentence-transformers.

InfoNCE over cosine similarities: every query of a batch against the positives and the hard negatives of all its rows.
A row may have any number of negatives. Checkpoints hold all that a resumed run needs to end with the same weights; the
final folder loads with `SentenceTransformer(folder)` and carries one prompt per dataset.
"""

import json
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from transformers.trainer_callback import PrinterCallback

from megatron_neobert.errors import ConfigError, ConversionError, short_reason
from megatron_neobert.evaluation.contrastive.checkpoints import newest_checkpoint
from megatron_neobert.evaluation.contrastive.config import DatasetSource, TrainingSettings
from megatron_neobert.evaluation.contrastive.data import digest_of
from megatron_neobert.evaluation.contrastive.log import LossLog, write_curve
from megatron_neobert.evaluation.contrastive.sampling import SamplingPlan, TaskBatchSampler
from megatron_neobert.evaluation.encoders import LoadOptions, fingerprint, load_model, load_tokenizer, longest_input
from megatron_neobert.runtime.atomic_files import own_name


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What belongs to this run rather than to the recipe."""

    seed: int = 0
    gradient_cache: int | None = None  # texts that are computed at once; None: all, without caching
    autocast_bfloat16: bool = False
    device: str | None = None  # cpu, cuda, or whatever is there
    attention: str | None = None
    resume: bool = False


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where a run writes; the record comes last, so that a run that has one is complete."""

    checkpoints: Path
    final: Path
    record: Path
    lock: Path
    loss_csv: Path
    loss_png: Path

    @classmethod
    def of(cls, output: Path, name: str) -> "Places":
        folder = output / name
        return cls(
            checkpoints=folder / "checkpoints",
            final=folder / f"{name}-contrastive",
            record=folder / "contrastive.json",
            lock=folder / "contrastive.lock",
            loss_csv=folder / "contrastive_loss.csv",
            loss_png=folder / "contrastive_loss.png",
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


class _Trainer(SentenceTransformerTrainer):
    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """No card: it would quote texts of the datasets and the paths of this machine."""


def load_encoder(folder: Path, *, max_length: int, attention: str | None = None) -> SentenceTransformer:
    """A folder as sentence-transformers sees it; without modules.json, the mean over the tokens is its embedding.

    Its weights are float32, whatever the folder holds: AdamW's steps are smaller than what bfloat16 tells apart.

    Raises:
        MissingInputError: There is no such folder.
        ConversionError: The library cannot load it, or would draw weights that the folder does not hold.
    """
    load_tokenizer(folder)  # refuses a folder without model or tokenizer
    backbone = load_model(folder, "AutoModel", LoadOptions(attention=attention))
    changes = {"dtype": torch.float32} | ({} if attention is None else {"attn_implementation": attention})
    try:
        model = SentenceTransformer(
            str(folder), device="cpu", local_files_only=True, trust_remote_code=False, model_kwargs=changes
        )
    except Exception as error:  # a strange config.json makes the libraries raise almost anything
        reason = short_reason(error)
        raise ConversionError(f"{folder}: sentence-transformers cannot load it ({reason}).") from error
    model[0].model = backbone  # with our checks and classes, where the library's own loading has none
    limits = (max_length, model.max_seq_length, longest_input(backbone, model.tokenizer))
    model.max_seq_length = min(limit for limit in limits if limit is not None)
    return model


def plan_sampling(
    pairs: Mapping[str, datasets.Dataset],
    sources: Mapping[str, DatasetSource],
    training: TrainingSettings,
    *,
    seed: int,
    processes: int,
) -> SamplingPlan:
    """How the batches of a whole run are drawn, those of all processes together."""
    return SamplingPlan(
        names=tuple(pairs),
        sizes=tuple(len(rows) for rows in pairs.values()),
        batch_sizes=tuple(sources[key].batch_size(training.batch_size) for key in pairs),
        alpha=training.alpha,
        batches=training.steps * processes,
        seed=seed,
    )


def build_prompts(sources: Mapping[str, DatasetSource], training: TrainingSettings) -> dict[str, str]:
    """Dataset -> what is put before a text, the separator included."""
    if training.instructions == "none":
        return {}
    return {key: source.instruction + training.separator for key, source in sources.items()}


def finetune(
    model_folder: Path,
    pairs: Mapping[str, datasets.Dataset],
    sources: Mapping[str, DatasetSource],
    training: TrainingSettings,
    places: Places,
    options: RunOptions,
) -> dict[str, Any] | None:
    """Trains, writes the final folder and returns results for the record; None on ranks that write none.

    Collective: all processes of a torchrun.
    """
    transformers.set_seed(options.seed)  # before the model: a pooler that the folder lacks is drawn
    arguments = _build_arguments(training, places, options)
    model = load_encoder(model_folder, max_length=training.max_length, attention=options.attention)
    prompts = build_prompts({key: sources[key] for key in pairs}, training)
    model.prompts = {**model.prompts, **prompts}  # so that the final folder has them
    plan = plan_sampling(pairs, sources, training, seed=options.seed, processes=arguments.world_size)
    arguments.multi_dataset_batch_sampler = partial(TaskBatchSampler, plan=plan)
    columns = ("query", "document") if training.instructions == "both" else ("query",)
    by_column = {key: dict.fromkeys(columns, prompt) for key, prompt in prompts.items()}
    arguments.prompts = by_column
    trainer = _Trainer(
        model=model,
        args=arguments,
        train_dataset=datasets.DatasetDict(pairs),
        loss=_build_loss(model, training, options),
        data_collator=PairCollator(preprocess_fn=model.preprocess, prompts=by_column),
        callbacks=[LossLog(places.loss_csv)],
    )
    trainer.remove_callback(PrinterCallback)
    started = time.monotonic()
    checkpoint = newest_checkpoint(places.checkpoints) if options.resume else None
    if checkpoint is not None and trainer.is_world_process_zero():
        print(f"going on from {checkpoint}", flush=True)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    seconds = time.monotonic() - started
    if not trainer.is_world_process_zero():
        return None
    losses = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    write_curve(places.loss_png, places.final.name, losses)
    save_final(trainer.model, model_folder, places.final)
    return {
        "folder": str(places.final),
        "fingerprint": fingerprint(places.final),
        "first_loss_nats": losses[0][1],
        "last_loss_nats": losses[-1][1],
        "seconds_of_this_start": round(seconds, 1),
        "started_from": None if checkpoint is None else checkpoint.name,
        "datasets": describe_plan(plan),
    }


def describe_plan(plan: SamplingPlan) -> dict[str, dict[str, Any]]:
    """Rows, pairs per batch, probability and number of batches of every dataset."""
    drawn = plan.draw_datasets()
    return {
        name: {
            "rows": plan.sizes[number],
            "pairs_per_batch": plan.batch_sizes[number],
            "probability": round(float(plan.probabilities[number]), 6),
            "batches": int((drawn == number).sum()),
        }
        for number, name in enumerate(plan.names)
    }


def settings_of(
    model_folder: Path,
    pairs: Mapping[str, datasets.Dataset],
    sources: Mapping[str, DatasetSource],
    training: TrainingSettings,
    options: RunOptions,
    *,
    processes: int,
) -> dict[str, Any]:
    """All that another run needs to give the same weights, and that a resumed run must not change."""
    own = asdict(options)
    del own["resume"]
    return {
        "model": fingerprint(model_folder),
        **asdict(training),
        **own,
        "processes": processes,
        "datasets": {key: asdict(sources[key]) for key in pairs},
        "rows": {key: len(rows) for key, rows in pairs.items()},
        "texts": {key: digest_of(rows) for key, rows in pairs.items()},
    }


def save_final(model: SentenceTransformer, source: Path, final: Path) -> None:
    """Writes the folder whole or not at all, in place of what an earlier start has left there."""
    temporary = own_name(final)
    shutil.rmtree(temporary, ignore_errors=True)
    if model.tokenizer.is_fast:  # it keeps the padding and cutting of its last call, and would write them down
        model.tokenizer.backend_tokenizer.no_truncation()
        model.tokenizer.backend_tokenizer.no_padding()
    model.save_pretrained(str(temporary), create_model_card=False)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for name in {str(path).split("--")[-1].split(".")[0] for path in config.get("auto_map", {}).values()}:
        if (source / f"{name}.py").is_file():  # users without this project need it; nothing here has run it
            shutil.copyfile(source / f"{name}.py", temporary / f"{name}.py")
    shutil.rmtree(final, ignore_errors=True)
    temporary.replace(final)


def _build_loss(model: SentenceTransformer, training: TrainingSettings, options: RunOptions) -> torch.nn.Module:
    scale = 1 / training.temperature
    if options.gradient_cache is None:
        return MultipleNegativesRankingLoss(model, scale=scale)
    return CachedMultipleNegativesRankingLoss(model, scale=scale, mini_batch_size=options.gradient_cache)


def _build_arguments(
    training: TrainingSettings, places: Places, options: RunOptions
) -> SentenceTransformerTrainingArguments:
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(places.checkpoints),
        max_steps=training.steps,
        per_device_train_batch_size=training.batch_size,  # of the sampler's plan; see there what each dataset gets
        learning_rate=training.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=round(training.warmup_ratio * training.steps),
        weight_decay=training.weight_decay,
        max_grad_norm=training.clip_grad,
        bf16=options.autocast_bfloat16,
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
