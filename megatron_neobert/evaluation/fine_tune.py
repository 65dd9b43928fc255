"""One fine-tuning by the paper's protocol on transformers' Trainer; several at a time in processes of their own.

AdamW with betas 0.9 and 0.95, no clipping; 6 % of the steps warm up, the rate falls linearly to a tenth at 90 % of them
and stays. The model is evaluated min(500, batches // 10) steps apart, and the run ends after 15 evaluations without a
better one, whose weights are kept. Weight decay leaves out biases and norms.
Source: arXiv 2502.19587 appendix C; rates and betas are those of chandar-lab/NeoBERT glue/train.py, whose linear part
ends above the floor and then drops; here it ends at the floor.
"""

import dataclasses
import multiprocessing
import os
import re
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import transformers
from datasets import Dataset
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from megatron_neobert.errors import ConfigError, print_warnings_as_sentences, short_reason
from megatron_neobert.evaluation.models import LoadOptions, load_tokenizer, longest_input
from megatron_neobert.evaluation.options import FineTuneOptions
from megatron_neobert.runtime.jobs import run_jobs

WARMUP, DECAYED, FLOOR = 0.06, 0.9, 0.1  # shares of the steps, and of the peak
PATIENCE = 15  # evaluations
_PREDICTION_BATCH = 32  # rows; no score depends on it
WEIGHTS = "model"  # folder of the best weights within the folder of a run

Options = TypeVar("Options", bound=FineTuneOptions)
Scores = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Point:
    """Hyperparameters of one run, and the seed of head, order and dropout."""

    batch_size: int
    learning_rate: float
    weight_decay: float
    seed: int

    @property
    def name(self) -> str:
        return f"batch{self.batch_size}_lr{self.learning_rate:g}_wd{self.weight_decay:g}_seed{self.seed}"


class Rows(NamedTuple):
    """One split as the model takes it."""

    data: Dataset
    score: Callable[[Any], Scores]  # of transformers' predictions for these rows


@dataclass(frozen=True)
class Task(ABC):
    """Task on which models are fine-tuned; can be sent to another process."""

    name: str
    splits: tuple[str, ...]  # training set, the validation set that chooses weights, perhaps one that is only measured
    metrics: tuple[str, ...]  # their mean is the run's number in the table; the first one chooses weights
    collator: ClassVar[Any]
    eval_strategy: ClassVar[str]
    name_in_last_split: ClassVar[str]  # pattern of the names of metrics

    @abstractmethod
    def load(self, folder: Path, options: LoadOptions) -> Any:
        """Return the model of a folder; layers that the folder lacks are drawn from torch's generator."""

    @abstractmethod
    def encode(self, split: str, options: FineTuneOptions, tokenizer: Any, length: int) -> Rows:
        """Return a split, truncated after `length` tokens."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One point on one task; can be sent to another process."""

    task: Task
    point: Point
    start: Path  # folder of the weights that the run starts from
    folder: Path  # to create
    options: FineTuneOptions

    @property
    def loading(self) -> LoadOptions:
        return LoadOptions(device=self.options.device or "cpu", attention=self.options.attention)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Scores of the evaluation that won, as fractions of 1."""

    scores: Scores
    average: float
    best_step: int
    steps: int  # until the run ended
    seconds: float


def fine_tune(run: Run) -> Outcome:
    """Train, and leave the best weights with their tokenizer in `run.folder / WEIGHTS`."""
    started = time.monotonic()
    shutil.rmtree(run.folder, ignore_errors=True)  # of a run that was killed
    trainer = PaperTrainer(run)
    trainer.train()
    best_step, checkpoint = trainer.state.best_global_step, trainer.state.best_model_checkpoint
    assert best_step is not None and checkpoint is not None, "the first evaluation is better than none"
    best = next(entry for entry in trainer.state.log_history if entry["step"] == best_step)
    scores = {name.removeprefix("eval_"): value for name, value in best.items() if name.startswith("eval_")}
    names = trainer.metric_names
    scores = {name: scores[name] for name in names}
    for split in run.task.splits[2:]:
        rows = trainer.rows[split]
        trainer.compute_metrics = rows.score
        found = trainer.predict(rows.data, metric_key_prefix="last").metrics or {}
        for name in names:
            scores[run.task.name_in_last_split.format(name)] = found[f"last_{name}"]
    (Path(checkpoint) / "training_args.bin").unlink()  # a pickle, which a model folder does not need
    Path(checkpoint).rename(run.folder / WEIGHTS)
    return Outcome(
        scores=scores,
        average=fmean(scores[name] for name in run.task.metrics),
        best_step=best_step,
        steps=trainer.state.global_step,
        seconds=time.monotonic() - started,
    )


class PaperTrainer(transformers.Trainer):
    """Trainer with the paper's optimizer, learning rates, evaluations and early stop."""

    def __init__(self, run: Run) -> None:
        """Build everything that the run needs before its first step; the head is drawn from the point's seed."""
        task, options = run.task, run.options
        transformers.set_seed(run.point.seed)  # of the head
        model, tokenizer = task.load(run.start, run.loading), load_tokenizer(run.start)
        length = longest_input(model, tokenizer, at_most=options.max_length)
        self.rows = {split: task.encode(split, options, tokenizer, length) for split in task.splits}
        self.metric_names = list[str]()
        train, validation = (self.rows[split] for split in task.splits[:2])

        def compute(evaluated: Any) -> Scores:
            scores = validation.score(evaluated)
            self.metric_names = list(scores)
            return scores

        interval = evaluation_interval(-(-len(train.data) // run.point.batch_size))
        super().__init__(
            model=model,
            args=_arguments(run, interval=interval),
            train_dataset=train.data,
            eval_dataset=validation.data,
            processing_class=tokenizer,
            data_collator=task.collator(tokenizer),
            compute_metrics=compute,
            callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=PATIENCE)],
        )
        self.remove_callback(transformers.PrinterCallback)
        assert self.args.n_gpu <= 1, f"{self.args.n_gpu} GPUs would multiply the batch"

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LambdaLR:
        """Return the schedule of the rate, as a factor of the peak."""
        if self.lr_scheduler is None:
            optimizer = optimizer or self.optimizer
            assert optimizer is not None, "Trainer has created it before"
            self.lr_scheduler = LambdaLR(optimizer, partial(rate_factor, total=num_training_steps))
        return self.lr_scheduler


def rate_factor(step: int, *, total: int) -> float:
    """Return the rate at a step counted from 0, as a factor of the peak."""
    warmup, decayed = round(WARMUP * total), round(DECAYED * total)
    if step < warmup:
        return step / warmup
    if step >= decayed:
        return FLOOR
    return 1 - (1 - FLOOR) * (step - warmup) / (decayed - warmup)


def evaluation_interval(batches: int) -> int:
    """Return the steps between two evaluations, from the batches of an epoch."""
    return max(1, min(500, batches // 10))


def shortest_first(rows: Dataset) -> Dataset:
    """Return the same rows in an order that needs little padding; no score depends on it."""
    lengths = list(map(len, rows["input_ids"]))
    return rows.select(sorted(range(len(lengths)), key=lengths.__getitem__))


def _arguments(run: Run, *, interval: int) -> transformers.TrainingArguments:
    options, point = run.options, run.point
    on_cpu = run.loading.device == "cpu"
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
    """Return the options with the device that runs use, a GPU where there is one; CUDA is not started.

    Raises:
        ConfigError: There is no such device, or it cannot compute in --dtype.
    """
    gpus = visible_gpus()  # choose_device would start CUDA, and a run could not choose its GPU any more
    if options.device == "cuda" and not gpus:
        raise ConfigError("--device cuda: torch sees no GPU here; give cpu, or run where there is one.")
    device = options.device or ("cuda" if gpus else "cpu")
    if options.dtype == "float16" and device == "cpu":
        raise ConfigError("--dtype float16 needs a GPU; on a CPU take float32 or bfloat16.")
    return dataclasses.replace(options, device=device)


def visible_gpus() -> list[str]:
    """Return the names of this process's GPUs, as CUDA_VISIBLE_DEVICES takes them; CUDA is not started."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ([str(number) for number in range(count)] if named is None else named.split(","))[:count]


def run_all(runs: Sequence[Run], *, jobs: int) -> Iterator[tuple[Run, Outcome]]:
    """Yield every run with its outcome, as they finish, `jobs` at a time in processes of their own.

    transformers' Trainer would spread one run over every GPU it sees and multiply its batch; a process therefore sees
    one. If a run fails, those that are running are stopped; they start anew with the next command.
    """
    if min(jobs, len(runs)) <= 1:
        _choose_gpu(0)
        for run in runs:
            yield run, fine_tune(run)
        return
    try:
        yield from run_jobs(_fine_tune_in_worker, runs, workers=jobs)  # type: ignore[type-var]  # only a Run is needed
    except ChildProcessError as error:
        reason = short_reason(error).partition(";")[0]
        raise ChildProcessError(f"{reason}; if memory ran out, use fewer --jobs.") from error


def _fine_tune_in_worker(run: Run) -> Outcome:
    print_warnings_as_sentences()
    _choose_gpu(int(re.split("[-:]", multiprocessing.current_process().name)[-1]))  # counted by the parent
    return fine_tune(run)


def _choose_gpu(number: int) -> None:
    """Choose the GPU of this process, before CUDA is used: later calls change nothing."""
    if devices := visible_gpus():
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[number % len(devices)]
