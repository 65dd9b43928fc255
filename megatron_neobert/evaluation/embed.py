"""Contrastive fine-tuning of any encoder, with the trainer and the losses of sentence-transformers.

InfoNCE over cosine similarities: every query of a batch against the positives and hard negatives of all pairs. A pair
may have any number of negatives. Checkpoints hold all that a resumed run needs to end with the same weights; the
trainer writes them file by file, `trainer_state.json` last: without a readable one a checkpoint is incomplete. The
final folder loads with `SentenceTransformer(folder)` and carries one prompt per dataset.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from megatron_neobert.config.recipes import find_config
from megatron_neobert.errors import ConfigError, OutputError
from megatron_neobert.evaluation.data import digest_of
from megatron_neobert.evaluation.embed_data import (
    DatasetSource,
    TrainingSettings,
    choose_datasets,
    find_local,
    load_pairs,
    read_config,
)
from megatron_neobert.evaluation.embed_sampling import PairCollator, SamplingPlan, TaskBatchSampler
from megatron_neobert.evaluation.ledger import Ledger, Unit, key_of, open_ledger, write_record
from megatron_neobert.evaluation.models import LoadOptions, choose_device, fingerprint, load_sentence_transformer
from megatron_neobert.evaluation.options import FinetuneOptions
from megatron_neobert.evaluation.pages import to_csv
from megatron_neobert.evaluation.plots import Curve, plot_curves
from megatron_neobert.runtime.atomic_files import own_name, replace_file
from megatron_neobert.text import parse_json

_OVERRIDES = ("steps", "batch_size", "learning_rate", "instructions", "max_length", "save_interval")


def finetune(options: FinetuneOptions) -> None:
    """Train, and write the final folder, the losses and the record, unless the ledger has them.

    Collective: all processes of a torchrun.

    Raises:
        ConfigError: The settings are impossible, or the output has checkpoints of other settings or data.
        MissingInputError, DataError, ConversionError: Model or data cannot be used.
        OutputError: The output has a model or checkpoints already.
    """
    config = read_config(find_config(options.config))
    changes = {name: value for name in _OVERRIDES if (value := getattr(options, name)) is not None}
    training, keys = replace(config.training, **changes), choose_datasets(options.limit_datasets, config)
    model, device = options.model, choose_device(options.device).type
    places, first = Places(options.output, model.resolve().name), os.environ.get("RANK", "0") == "0"
    how: dict[str, Any] = {
        "seed": options.seed,
        "gradient_cache": options.gradient_cache,
        "autocast_bfloat16": (options.dtype or ("bfloat16" if device == "cuda" else "float32")) == "bfloat16",
        "device": device,
        "attention": options.attention,
    }
    fingerprint(model)  # refuses what is no model, before minutes of reading
    paths = find_local(options.data_dir, keys, skip_missing=options.skip_missing)
    if first and len(paths) < len(keys):
        print(f"without {', '.join(sorted(set(keys) - set(paths)))}: no data")
    pairs = {key: load_pairs(key, config.datasets[key], path, limit=options.limit) for key, path in paths.items()}
    settings = {
        "model": fingerprint(model),
        **asdict(training),
        **how,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "datasets": {key: asdict(config.datasets[key]) for key in pairs},
        "rows": {key: len(rows) for key, rows in pairs.items()},
        "texts": {key: digest_of(rows, ("query", "positive", "negatives")) for key, rows in pairs.items()},
    }
    with open_ledger(places.ledger, device) if first else nullcontext(Ledger(places.ledger)) as ledger:
        done = ledger.find(settings)
        if done is not None and places.final.exists() and fingerprint(places.final) == done["fingerprint"]:
            print(f"{places.final} is there already")
            return
        if first:
            prepare_folder(places, ledger, settings, resume=options.resume)
        run = Training(places=places, settings=training, resume=options.resume, **how)
        results = train(model, pairs, config.datasets, run)
        if results is None:
            return
        for key, share in results["datasets"].items():
            batches = f"{share['batches']} batches of {share['pairs_per_batch']} pairs from {share['rows']:,}"
            print(f"{key}: {batches}, p = {share['probability']:.3f}")
        losses = f"{results['first_loss_nats']:.3f} -> {results['last_loss_nats']:.3f} nats"
        print(f"loss {losses} in {results['seconds_of_this_start']:.0f} s; wrote {results['folder']}")
        ledger.add(settings, results)
        lines = [ledger.lines[key_of(settings)]]
        record = places.file(".json")
        write_record(record, "contrastive", folder=model, settings=settings, results=results, lines=lines)


@dataclass(frozen=True)
class Places:
    """Paths of a run."""

    output: Path
    name: str

    @property
    def ledger(self) -> Path:
        return self.output / self.name / "contrastive"

    @property
    def checkpoints(self) -> Path:
        return self.output / self.name / "checkpoints"

    @property
    def final(self) -> Path:
        return self.output / self.name / f"{self.name}-contrastive"

    def file(self, ending: str) -> Path:
        """Return the path of .json (the record), _loss.csv or _loss.png."""
        return self.output / self.name / f"contrastive{ending}"


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of the recipe, and of this run."""

    places: Places
    settings: TrainingSettings
    seed: int = 0
    gradient_cache: int | None = None  # texts that are computed at once; None: all, without caching
    autocast_bfloat16: bool = False
    device: str | None = None  # cpu or cuda; None: a GPU where there is one
    attention: str | None = None
    resume: bool = False


def prepare_folder(places: Places, ledger: Ledger, settings: Unit, *, resume: bool) -> None:
    """Create the folder to train in, without checkpoints that were cut off.

    The ledger has a unit for the start of a training; the checkpoints are of the one that was started last.

    Raises:
        OutputError: The output holds checkpoints or a model, and `resume` is not set.
        ConfigError: The checkpoints or the model were made with other settings or data.
    """
    there = places.final if places.final.exists() else newest_checkpoint(places.checkpoints)
    starts = [line["unit"]["started"] for line in ledger.lines.values() if "started" in line["unit"]]
    started: dict[str, Any] = starts[-1] if starts else {}
    if there is not None and not resume:
        raise OutputError(f"{there} is there already; resume with --resume, or name another --output.")
    if there is not None and key_of(started) != key_of(settings):
        now = parse_json(json.dumps(settings))
        changed = sorted(name for name in {*started, *now} if started.get(name) != now.get(name))
        raise ConfigError(
            f"{there} was made with other settings or data ({', '.join(changed)}); use those, or name another --output."
        )
    for path in places.checkpoints.glob("checkpoint-*"):
        if not _steps(path):
            shutil.rmtree(path)
    places.checkpoints.mkdir(parents=True, exist_ok=True)
    ledger.add({"started": settings}, {})


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint with the most steps."""
    complete = {_steps(path): path for path in folder.glob("checkpoint-*") if _steps(path)}
    return complete[max(complete)] if complete else None


def _steps(checkpoint: Path) -> int:
    """Return the number of its last step; 0 if it was cut off."""
    try:
        state = parse_json((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return 0
    return int(state["global_step"])


class ProgressLine(TrainerCallback):
    """Prints a line per interval where there is no terminal for the trainer's bar."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if args.disable_tqdm and state.is_world_process_zero and logs and "loss" in logs:
            line = f"step {state.global_step}/{state.max_steps} | loss {logs['loss']:.4f} nats"
            print(f"{line} | lr {logs['learning_rate']:.1e} | grad norm {logs['grad_norm']:.2f}", flush=True)


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


def train(
    model_folder: Path, pairs: Mapping[str, datasets.Dataset], sources: Mapping[str, DatasetSource], run: Training
) -> dict[str, Any] | None:
    """Train, write the final folder and return results for the record; None on ranks that write none.

    Collective: all processes of a torchrun.
    """
    training, places = run.settings, run.places
    transformers.set_seed(run.seed)  # before the model: a pooler that the folder lacks is drawn
    arguments = _build_arguments(run)
    # AdamW's steps are smaller than what bfloat16 tells apart: float32, whichever type the folder holds.
    loading = LoadOptions(attention=run.attention)
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
        seed=run.seed,
    )
    arguments.multi_dataset_batch_sampler = partial(TaskBatchSampler, plan=plan)
    arguments.prompts = by_column
    trainer = _Trainer(
        model=model,
        args=arguments,
        train_dataset=datasets.DatasetDict(pairs),
        loss=build_loss(model, training.temperature, run.gradient_cache),
        data_collator=PairCollator(preprocess_fn=model.preprocess, prompts=by_column),
        callbacks=[ProgressLine()],
    )
    trainer.remove_callback(PrinterCallback)
    started = time.monotonic()
    checkpoint = newest_checkpoint(places.checkpoints) if run.resume else None
    if checkpoint is not None and trainer.is_world_process_zero():
        print(f"resuming from {checkpoint}", flush=True)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    seconds = time.monotonic() - started
    if not trainer.is_world_process_zero():
        return None
    # The history travels with the checkpoints, so that no step is there twice. A loss is the mean since the entry
    # before it; where a run resumed in the middle of an interval, since the checkpoint.
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    replace_file(places.file("_loss.csv"), to_csv(("step", "loss", "learning_rate", "grad_norm"), entries))
    curve = Curve(places.final.name, [entry["step"] for entry in entries], [entry["loss"] for entry in entries])
    title = "contrastive fine-tuning"
    plot_curves(places.file("_loss.png"), [curve], x_label="step", y_label="InfoNCE (nats)", title=title)
    save_final(trainer.model, model_folder, places.final)
    return {
        "folder": str(places.final),
        "fingerprint": fingerprint(places.final),
        "first_loss_nats": entries[0]["loss"],
        "last_loss_nats": entries[-1]["loss"],
        "seconds_of_this_start": round(seconds, 1),
        "started_from": None if checkpoint is None else checkpoint.name,
        "datasets": plan.describe(),
    }


def save_final(model: SentenceTransformer, source: Path, final: Path) -> None:
    """Write the folder whole or not at all, in place of what an earlier start has left there."""
    temporary = own_name(final)
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


def _build_arguments(run: Training) -> SentenceTransformerTrainingArguments:
    training = run.settings
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(run.places.checkpoints),
        max_steps=training.steps,
        per_device_train_batch_size=training.batch_size,  # of the sampler's plan; see there what each dataset gets
        learning_rate=training.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=round(training.warmup_ratio * training.steps),
        weight_decay=training.weight_decay,
        max_grad_norm=training.clip_grad,
        bf16=run.autocast_bfloat16,
        use_cpu=run.device == "cpu",
        logging_steps=min(training.log_interval, training.steps),
        save_steps=training.save_interval,
        save_total_limit=2,
        dataloader_drop_last=True,  # the plan has a batch for every process at every step
        seed=run.seed,
        report_to="none",
        disable_tqdm=not sys.stderr.isatty(),
    )
    if arguments.n_gpu > 1:
        raise ConfigError(
            f"{arguments.n_gpu} GPUs are visible to one process, which would share out single batches; start with "
            f"torchrun --nproc-per-node {arguments.n_gpu}, or show it one with CUDA_VISIBLE_DEVICES=0."
        )
    return arguments
