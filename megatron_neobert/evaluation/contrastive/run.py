"""Contrastive fine-tuning of any encoder, with the trainer and the losses of sentence-transformers.

InfoNCE over cosine similarities: every query of a batch against the positives and hard negatives of all pairs. A pair
may have any number of negatives. Checkpoints hold all that a resumed run needs to end with the same weights; the
trainer writes them file by file, `trainer_state.json` last: without a readable one a checkpoint is incomplete. The
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
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from megatron_neobert.errors import ConfigError, OutputError
from megatron_neobert.evaluation.contrastive.config import DatasetSource, TrainingSettings
from megatron_neobert.evaluation.contrastive.data import digest_of
from megatron_neobert.evaluation.contrastive.sampling import PairCollator, SamplingPlan, TaskBatchSampler
from megatron_neobert.evaluation.encoders import (
    LoadOptions,
    fingerprint,
    fingerprint_modules,
    load_sentence_transformer,
)
from megatron_neobert.evaluation.pages import to_csv
from megatron_neobert.evaluation.plots import Curve, plot_curves
from megatron_neobert.evaluation.records import refuse_changed_settings
from megatron_neobert.runtime.atomic_files import own_name, replace_file

_SETTINGS = "settings.json"


def newest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint with the most steps."""
    complete = {_steps(path): path for path in folder.glob("checkpoint-*") if _steps(path)}
    return complete[max(complete)] if complete else None


def _steps(checkpoint: Path) -> int:
    """How far it got; 0 if it was cut off."""
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return 0
    return int(state["global_step"])


def prepare_folder(folder: Path, settings: dict[str, Any], *, resume: bool) -> None:
    """Leaves a folder to train in, without checkpoints that were cut off.

    Raises:
        OutputError: It holds checkpoints and `resume` is not set.
        ConfigError: They were made with other settings.
    """
    if newest_checkpoint(folder) is not None:
        if not resume:
            raise OutputError(f"{folder} holds checkpoints; resume with --resume, or name another --output.")
        refuse_changed_settings(folder, json.loads((folder / _SETTINGS).read_text(encoding="utf-8")), settings)
    for path in folder.glob("checkpoint-*"):
        if not _steps(path):
            shutil.rmtree(path)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / _SETTINGS, json.dumps(settings, indent=2) + "\n")


class ProgressLine(TrainerCallback):
    """A line per interval where there is no terminal for the trainer's bar."""

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


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What belongs to this run rather than to the recipe."""

    seed: int = 0
    gradient_cache: int | None = None  # texts that are computed at once; None: all, without caching
    autocast_bfloat16: bool = False
    device: str | None = None  # cpu or cuda; None: a GPU where there is one
    attention: str | None = None
    resume: bool = False


@dataclass(frozen=True)
class Places:
    """Where a run writes; the record comes last, so that a run that has one is complete."""

    output: Path
    name: str

    @property
    def checkpoints(self) -> Path:
        return self.output / self.name / "checkpoints"

    @property
    def final(self) -> Path:
        return self.output / self.name / f"{self.name}-contrastive"

    def file(self, ending: str) -> Path:
        """.json (the record), .lock, _loss.csv or _loss.png."""
        return self.output / self.name / f"contrastive{ending}"


class _Trainer(SentenceTransformerTrainer):
    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """No card: it would quote texts of the datasets and the paths of this machine."""


def build_prompts(sources: Mapping[str, DatasetSource], training: TrainingSettings) -> dict[str, dict[str, str]]:
    """Dataset -> column -> what stands before its texts, the separator included; nothing without instructions."""
    columns = {"none": (), "query": ("query",), "both": ("query", "document")}[training.instructions]
    prompts = {key: source.instruction + training.separator for key, source in sources.items()}
    return {key: dict.fromkeys(columns, prompt) for key, prompt in prompts.items() if columns}


def build_loss(model: SentenceTransformer, temperature: float, gradient_cache: int | None) -> torch.nn.Module:
    if gradient_cache is None:
        return MultipleNegativesRankingLoss(model, scale=1 / temperature)
    return CachedMultipleNegativesRankingLoss(model, scale=1 / temperature, mini_batch_size=gradient_cache)


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
        callbacks=[ProgressLine()],
    )
    trainer.remove_callback(PrinterCallback)
    started = time.monotonic()
    checkpoint = newest_checkpoint(places.checkpoints) if options.resume else None
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
        "modules": fingerprint_modules(model_folder),
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
