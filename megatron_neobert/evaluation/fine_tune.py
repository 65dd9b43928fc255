"""One fine-tuning run with the paper's protocol, on transformers' Trainer; several runs in parallel processes.

AdamW has betas 0.9 and 0.95; gradients are not clipped, and biases and norms are not decayed. The learning rate warms
up over 6 % of the steps, falls linearly to a tenth of its peak at 90 % of the steps, and stays there. The model is
evaluated every min(500, batches // 10) steps. The run ends after 15 evaluations without improvement and keeps the best
weights.

Source: arXiv 2502.19587 appendix C. Learning rates and betas are from chandar-lab/NeoBERT glue/train.py. There the
linear decay ends above the floor, and the rate then drops to the floor; here the decay ends at the floor.
"""

import dataclasses
import multiprocessing
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, TypeVar

import torch
import transformers
from datasets import Dataset
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers.modeling_layers import GenericForSequenceClassification

from megatron_neobert.errors import ConfigError, ConversionError, print_warnings_as_sentences, short_reason
from megatron_neobert.evaluation.data import Rows
from megatron_neobert.evaluation.models import choose_device, load_model, load_tokenizer, longest_input
from megatron_neobert.evaluation.options import ComputeOptions, FineTuneOptions
from megatron_neobert.huggingface.folder_files import restore_files
from megatron_neobert.runtime.atomic_files import saving_weights
from megatron_neobert.runtime.jobs import JobOptions, JobRunner, progress_bar
from megatron_neobert.runtime.own_files import create_folder
from megatron_neobert.text import visible

WARMUP, DECAYED, FLOOR = 0.06, 0.9, 0.1  # two shares of the steps, and a share of the peak rate
PATIENCE = 15  # evaluations
_PREDICTION_BATCH = 32  # rows; scores do not depend on it
WEIGHTS = "model"  # subfolder of a run's folder with the best weights
_SEQUENCE_CLASS = "AutoModelForSequenceClassification"

Options = TypeVar("Options", bound=FineTuneOptions)
Scores = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Point:
    """Hyperparameters of one run, and the seed of its head, data order and dropout."""

    batch_size: int
    learning_rate: float
    weight_decay: float
    seed: int

    @property
    def name(self) -> str:
        return f"batch{self.batch_size}_lr{self.learning_rate:g}_wd{self.weight_decay:g}_seed{self.seed}"


@dataclass(frozen=True)
class Task(ABC):
    """Task to fine-tune on: classification or, without labels, regression. Instances can be pickled.

    Rows are texts or pairs of texts; subclasses may override `encode` for other rows. transformers chooses the head by
    model type. Our exports have a dense layer on the first token or on the mean of the tokens, then tanh and dropout
    (neobert) or GELU without dropout (eurobert), then the output layer.
    """

    name: str
    splits: tuple[str, ...]  # training set, validation set, and optionally a set that only measures the best weights
    metrics: tuple[str, ...]  # averaged for the tables; the first one selects the best weights
    labels: tuple[str, ...]  # names of the classes; empty for a regression

    kind: ClassVar[str]  # of the record: glue, ner or classify
    auto_class: ClassVar[str] = _SEQUENCE_CLASS
    collator: ClassVar[Any] = transformers.DataCollatorWithPadding
    changes: ClassVar[dict[str, Any]] = {}  # of the settings in config.json, as in `load_model`
    eval_strategy: ClassVar[str] = "epoch"
    last_split_pattern: ClassVar[str] = "test_{}"  # turns the name of a metric into its name for the third split

    @abstractmethod
    def read_rows(self, split: str, data_dir: Path) -> Rows:
        """Return all rows of a split. The labels are class indices, scores, or the tags of sentences."""

    @abstractmethod
    def score(self, prediction: Any, encoded: Dataset) -> Scores:
        """Return {metric: score}, in fractions of 1. `prediction` is transformers' EvalPrediction for `encoded`."""

    def load(self, folder: Path, attention: str | None = None) -> Any:
        """Return the model in a folder, in evaluation mode, with a head for this task. A missing head is random.

        Raises ConversionError if the head reads only the last token.
        """
        changes = {**self.changes, "num_labels": len(self.labels) or 1}
        if self.labels:
            changes["id2label"] = dict(enumerate(self.labels))
            changes["label2id"] = {label: number for number, label in enumerate(self.labels)}
        if self.auto_class == _SEQUENCE_CLASS:
            # Explicit, because the config of a fine-tuned folder may name another type.
            changes["problem_type"] = "single_label_classification" if self.labels else "regression"
        options = ComputeOptions(device="cpu", attention=attention)
        model = load_model(folder, self.auto_class, options, **changes)
        if isinstance(model, GenericForSequenceClassification):
            raise ConversionError(
                f"{folder}: {type(model).__name__} classifies by the last token, as causal models do, which does not "
                "suit an encoder; evaluate the eurobert or neobert export of the same checkpoint."
            )
        return model

    def encode(self, split: str, options: FineTuneOptions, tokenizer: Any, length: int) -> Dataset:
        """Return a tokenized split: at most `options.limit` evenly spaced rows, each truncated to `length` tokens.

        Splits other than train are sorted by length.
        """
        rows = self.read_rows(split, options.data_dir).select(options.limit)
        encoding = tokenizer(*rows.texts, truncation=True, max_length=length)
        dataset = Dataset.from_dict({**encoding, "labels": rows.labels})
        if split != "train":  # less padding; the order does not change scores
            lengths = list(map(len, dataset["input_ids"]))
            dataset = dataset.select(sorted(range(len(lengths)), key=lengths.__getitem__))
        return dataset


@dataclass(frozen=True)
class Run:
    """One fine-tuning run: a task with one choice of hyperparameters. Instances can be pickled."""

    task: Task
    point: Point
    start: Path  # folder of the initial weights
    folder: Path  # output folder, replaced if it exists
    options: FineTuneOptions
    number: int = 1  # of `count` runs of the task, for the progress bar
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Scores of the best weights of a run, as fractions of 1."""

    scores: Scores
    average: float  # of the task's metrics
    best_step: int
    steps: int  # until the run ended
    seconds: float


def fine_tune(run: Run) -> Outcome:
    """Fine-tune, write the best weights and the tokenizer to `run.folder / WEIGHTS`, and return these weights' scores.

    A folder `run.folder` of a killed run is deleted first.
    """
    start = time.monotonic()
    create_folder(run.folder)
    trainer = PaperTrainer(run)
    with saving_weights(run.folder):
        trainer.train()
    best_step, checkpoint = trainer.state.best_global_step, trainer.state.best_model_checkpoint
    assert best_step is not None and checkpoint is not None, "no evaluation has set a best step"
    scores = dict(trainer.scores_by_step[best_step])
    trainer.compute_metrics = None
    for split in run.task.splits[2:]:
        encoded = trainer.splits[split]
        last_scores = run.task.score(trainer.predict(encoded), encoded)
        scores |= {run.task.last_split_pattern.format(name): score for name, score in last_scores.items()}
    # A model folder needs no pickle, and no state of the trainer, which has the paths of this machine.
    for name in ("training_args.bin", "trainer_state.json"):
        (Path(checkpoint) / name).unlink()
    restore_files(Path(checkpoint), run.start)
    Path(checkpoint).rename(run.folder / WEIGHTS)
    return Outcome(
        scores=scores,
        average=fmean(scores[name] for name in run.task.metrics),
        best_step=best_step,
        steps=trainer.state.global_step,
        seconds=time.monotonic() - start,
    )


class ProgressBar(transformers.TrainerCallback):
    """Progress bar over a run's steps, with the time that all runs of the task may still take."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run = self.run
        name, position = f"{visible(run.task.name)} {run.number}/{run.count}", (run.number - 1) % run.options.jobs
        self.bar = progress_bar(desc=name, total=state.max_steps, unit="step", position=position)
        self.start = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        left = seconds_left(self.run, time.monotonic() - self.start, done=state.global_step / state.max_steps)
        self.bar.set_postfix_str(f"all runs at most {timedelta(seconds=round(left))}", refresh=False)
        self.bar.update()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.close()


def seconds_left(run: Run, elapsed_seconds: float, *, done: float) -> float:
    """Return the seconds until a task's last run ends, if all runs are as fast as `run` and no run stops early.

    `done` is the finished share of the run's steps.
    """
    return elapsed_seconds / done * (1 - done + -(-(run.count - run.number) // run.options.jobs))


class PaperTrainer(transformers.Trainer):
    """Trainer with the paper's optimizer, learning-rate schedule, evaluations and early stopping.

    `splits` contains the task's encoded splits, and `scores_by_step` maps steps to scores on the validation set.
    """

    def __init__(self, run: Run) -> None:
        """Load model and data. The point's seed initializes the head."""
        task, options = run.task, run.options
        transformers.set_seed(run.point.seed)
        model, tokenizer = task.load(run.start, options.attention), load_tokenizer(run.start)
        length = longest_input(model, tokenizer, at_most=options.max_length)
        self.splits = {split: task.encode(split, options, tokenizer, length) for split in task.splits}
        self.scores_by_step = dict[int, Scores]()
        train, validation = (self.splits[split] for split in task.splits[:2])

        def compute(prediction: Any) -> Scores:
            scores = task.score(prediction, validation)
            self.scores_by_step[self.state.global_step] = scores
            return dict(scores)

        super().__init__(
            model=model,
            args=_arguments(run, interval=evaluation_interval(-(-len(train) // run.point.batch_size))),
            train_dataset=train,
            eval_dataset=validation,
            processing_class=tokenizer,
            data_collator=task.collator(tokenizer),
            compute_metrics=compute,
            callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=PATIENCE), ProgressBar(run)],
        )
        self.remove_callback(transformers.PrinterCallback)
        assert self.args.n_gpu <= 1, f"{self.args.n_gpu} GPUs would multiply the batch"

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LambdaLR:
        """Return the schedule of `rate_factor`, created at the first call for `optimizer` (default: the trainer's)."""
        if self.lr_scheduler is None:
            optimizer = optimizer or self.optimizer
            assert optimizer is not None, "Trainer creates the optimizer first"
            self.lr_scheduler = LambdaLR(optimizer, partial(rate_factor, total=num_training_steps))
        return self.lr_scheduler


def rate_factor(step: int, *, total: int) -> float:
    """Return the learning rate at a 0-based step, as a fraction of the peak: linear warm-up, linear decay to FLOOR."""
    warmup, decayed = round(WARMUP * total), round(DECAYED * total)
    if step < warmup:
        return step / warmup
    if step >= decayed:
        return FLOOR
    return 1 - (1 - FLOOR) * (step - warmup) / (decayed - warmup)


def evaluation_interval(batches: int) -> int:
    """Return the number of steps between two evaluations, given the batches per epoch."""
    return max(1, min(500, batches // 10))


def _arguments(run: Run, *, interval: int) -> transformers.TrainingArguments:
    options, point = run.options, run.point
    on_cpu = options.device != "cuda"
    return transformers.TrainingArguments(
        output_dir=str(run.folder),
        num_train_epochs=options.epochs,
        per_device_train_batch_size=point.batch_size,
        per_device_eval_batch_size=_PREDICTION_BATCH,
        learning_rate=point.learning_rate,
        weight_decay=point.weight_decay,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        max_grad_norm=0.0,
        seed=point.seed,
        eval_strategy=run.task.eval_strategy,
        eval_steps=interval,
        save_strategy="best",
        save_total_limit=1,
        save_only_model=True,
        load_best_model_at_end=True,
        metric_for_best_model=run.task.metrics[0],
        greater_is_better=True,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=options.dtype == "bfloat16",
        fp16=options.dtype == "float16",
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
    )


# --- devices and processes


def resolve_device(options: Options) -> Options:
    """Return a copy of the options with `device` "cuda" or "cpu". None becomes "cuda" if there is a GPU, else "cpu".

    CUDA is not initialized. Raises ConfigError if the device is cuda without a GPU, or the dtype is float16 on a CPU.
    """
    device: Any = choose_device(options.device).type
    if options.dtype == "float16" and device == "cpu":
        raise ConfigError("--dtype float16 needs a GPU; on a CPU use float32 or bfloat16.")
    return dataclasses.replace(options, device=device)


def run_all(runs: Sequence[Run], *, jobs: int) -> Iterator[tuple[Run, Outcome]]:
    """Execute the runs, and yield each run with its outcome when the run ends.

    With several runs and `jobs` > 1, up to `jobs` worker processes execute them, each on one GPU. Otherwise, this
    process executes the runs. If a run fails or the generator is closed, all workers are killed. Raises
    ChildProcessError if a worker died, most often because memory ran out.
    """
    try:
        with JobRunner(JobOptions(workers=jobs)) as runner:
            yield from runner.run(_fine_tune_on_gpu, runs)  # type: ignore[type-var]  # only a Run is needed
    except ChildProcessError as error:
        reason = short_reason(error).partition(";")[0]
        raise ChildProcessError(f"{reason}; if memory ran out, use fewer --jobs.") from error


def _fine_tune_on_gpu(run: Run) -> Outcome:
    """Set CUDA_VISIBLE_DEVICES to one GPU, chosen by the number of this worker process, and return `fine_tune(run)`."""
    print_warnings_as_sentences()
    if count := torch.cuda.device_count():
        worker = re.search(r"\d+$", multiprocessing.current_process().name)
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
        # Trainer would multiply the batch size by the number of visible GPUs. This must precede the first use of CUDA.
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(worker[0]) % count if worker else 0]
    return fine_tune(run)
