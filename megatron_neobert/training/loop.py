"""The story of a run: read a batch, train on it, say so, validate, save, stop."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from megatron_neobert import distributed
from megatron_neobert.config import Settings
from megatron_neobert.data.batches import StepBatches
from megatron_neobert.data.dali import build_dali_loader
from megatron_neobert.data.loader import build_loader
from megatron_neobert.errors import EXIT_INTERRUPTED, EXIT_STOPPED_EARLY
from megatron_neobert.model.kernels import choose_kernels
from megatron_neobert.training.build import build_run
from megatron_neobert.training.checkpoint import load_checkpoint, save_checkpoint
from megatron_neobert.training.checkpoint_files import check_folders
from megatron_neobert.training.flops import count_parameters
from megatron_neobert.training.metrics import Averages, Monitor
from megatron_neobert.training.run import Progress, Run
from megatron_neobert.training.step import train_step, validation_step
from megatron_neobert.training.stopping import reason_to_stop, stop_code_of_this_rank


def run_training(settings: Settings) -> int:
    """Builds a run, continues it from --load if there is something to continue, and trains.

    Returns:
        The exit code, see `train`.

    Collective: all ranks.
    """
    check_folders(settings.checkpoint)
    run = build_run(settings)
    loaded = load_checkpoint(run)
    monitor = Monitor(settings, iteration=run.progress.iteration)
    monitor.say(_opening_line(run, loaded))
    monitor.say(choose_kernels(settings).summary)
    with monitor.running():
        code = train(run, monitor)
    distributed.shut_down()
    return code


def train(run: Run, monitor: Monitor) -> int:
    """Trains from `run.progress` to the last iteration, or until somebody wants the run to stop.

    Returns:
        The exit code: 0 at the end of training, 75 if the run can go on later, 130 if it was stopped unsaved.

    Collective: all ranks.
    """
    training, checkpoint = run.settings.training, run.settings.checkpoint
    if run.progress.iteration >= training.train_iters:
        monitor.say(f"nothing to do: iteration {run.progress.iteration} of {training.train_iters} is saved already")
        return 0
    for batches in _training_batches(run):
        learning_rate = run.optimizer.param_groups[0]["lr"]
        report = train_step(run, batches)
        run.progress = _advance(run, batches)
        monitor.add(report)
        iteration = run.progress.iteration
        reason = _agree_to_stop(run)
        last = iteration == training.train_iters or reason is not None
        saves = checkpoint.save is not None and (last or _due(iteration, checkpoint.save_interval))
        validates = run.validation_stream is not None and (
            iteration == training.train_iters or _due(iteration, training.eval_interval)
        )
        if last or saves or validates or _due(iteration, run.settings.logging.log_interval):
            run.progress = monitor.close_interval(run.progress, lr=learning_rate, grad_norm=report.grad_norm)
        if validates:
            monitor.report_validation(run.progress, validate(run))
        if saves:
            monitor.say(f"saved {save_checkpoint(run)}")
        if last:
            break
        if saves or validates:
            monitor.restart_clock()
    if reason is None:
        return 0
    saved = "" if checkpoint.save is not None else "; nothing was saved, there is no --save"
    monitor.say(f"stopped after iteration {iteration} of {training.train_iters}: {reason}{saved}")
    return EXIT_STOPPED_EARLY if checkpoint.save is not None else EXIT_INTERRUPTED


def validate(run: Run) -> Averages:
    """Loss over the first `eval_iters` batches of the held-out documents, the same at every call.

    Collective: all ranks.
    """
    assert run.validation_stream is not None
    for model in run.models:
        model.eval()
    sums: torch.Tensor | None = None
    for _, batches in zip(range(run.settings.training.eval_iters), run.validation_stream.steps(), strict=False):
        report = validation_step(run, batches)
        sums = report.sums if sums is None else sums + report.sums
    for model in run.models:
        model.train()
    assert sums is not None
    return Averages.of(sums)


def _training_batches(run: Run) -> Iterable[StepBatches]:
    stream, data = replace(run.training_stream, cursor=run.progress.cursor), run.settings.data
    if data.dataloader_type == "dali":
        return build_dali_loader(stream, num_workers=data.num_workers, device=run.device)
    return build_loader(stream, num_workers=data.num_workers)


def _opening_line(run: Run, loaded: Path | None) -> str:
    settings = run.settings
    parameters = count_parameters(settings.model, vocab_size=run.tokenizer.vocab_size).total
    start = f"from {loaded}" if loaded else f"from fresh weights of seed {settings.training.seed}"
    return (
        f"training {parameters:,} parameters {start} on {torch.distributed.get_world_size()} x {run.device.type}, "
        f"{settings.tokens_per_iteration:,} tokens per iteration"
    )


def _advance(run: Run, batches: StepBatches) -> Progress:
    return replace(
        run.progress,
        iteration=run.progress.iteration + 1,
        cursor=batches.cursor_after,
        consumed_samples=run.progress.consumed_samples + run.settings.training.global_batch_size,
    )


def _agree_to_stop(run: Run) -> str | None:
    training = run.settings.training
    code = distributed.largest_over_all_ranks(stop_code_of_this_rank(training), run.device)  # collective: all ranks
    return reason_to_stop(training, iteration=run.progress.iteration, agreed_code=code)


def _due(iteration: int, interval: int) -> bool:
    return iteration % interval == 0
