"""Whether the settings of a run can stand together: every reason why not, at once, before anything is started.

Standard library only. Each message names the values, the rule and the remedy.
"""

import math
from dataclasses import fields

from megatron_neobert.config.compute_rules import compute_problems
from megatron_neobert.config.data_path import parse_data_path
from megatron_neobert.config.resume_rules import ALLOWABLE
from megatron_neobert.config.schema import (
    DataConfig,
    LoggingConfig,
    ModelConfig,
    ParallelConfig,
    Settings,
    TrainingConfig,
    flag_of,
)
from megatron_neobert.errors import ConfigError

_SUGGESTED = 1024  # the largest number of heads or stages that a message suggests
_NOT_IN_A_PROJECT = "/\\#?%:"
LARGEST_DOCUMENT_BLOCK = 4096  # data/batches/rows.py packs windows of so many documents


def find_problems(settings: Settings, *, world_size: int) -> list[str]:
    """Every reason why these settings cannot train on `world_size` ranks; empty if they can."""
    problems = _value_problems(settings)
    if problems:  # the arithmetic below needs legal values
        return problems
    layout_problems = _layout_problems(settings, world_size)
    return (
        _model_problems(settings)
        + layout_problems
        + ([] if layout_problems else compute_problems(settings))  # which divides by the layout's sizes
        + _data_problems(settings.data)
        + _schedule_problems(settings)
        + _checkpoint_problems(settings)
        + _logging_problems(settings.logging)
    )


def find_record_problems(settings: Settings) -> list[str]:
    """What no run can have been started with, whatever its version; a record of one is damaged or made up."""
    return _value_problems(settings) or _head_problems(settings.model)


def _value_problems(settings: Settings) -> list[str]:
    problems = []
    for section in fields(settings):
        config = getattr(settings, section.name)
        for item in fields(config):
            value, rules = getattr(config, item.name), item.metadata
            if rules["choices"] and value is not None and value not in rules["choices"]:
                problems.append(f"{flag_of(item.name)} {value} is not one of {', '.join(rules['choices'])}.")
            if rules["minimum"] is not None and value is not None and not value >= rules["minimum"]:  # NaN fails too
                problems.append(f"{flag_of(item.name)} {value} is below {rules['minimum']}, its smallest legal value.")
            elif value == math.inf:
                problems.append(f"{flag_of(item.name)} {value} is infinite; give a finite value.")
    return problems


def _head_problems(model: ModelConfig) -> list[str]:
    problems = []
    heads = model.num_attention_heads
    if model.hidden_size % heads:
        problems.append(
            f"--hidden-size {model.hidden_size} is not a multiple of --num-attention-heads {heads}; every head needs "
            f"the same width. Use {_neighbours(model.hidden_size, heads)} heads."
        )
    elif model.position_embedding_type == "rope" and (model.hidden_size // heads) % 2:
        problems.append(
            f"--hidden-size {model.hidden_size} over --num-attention-heads {heads} gives heads of width "
            f"{model.hidden_size // heads}; rotary embeddings rotate pairs and need an even width."
        )
    return problems


def _model_problems(settings: Settings) -> list[str]:
    model, data = settings.model, settings.data
    problems = _head_problems(model)
    if model.position_embedding_type != "rope" and model.rotary_base != ModelConfig().rotary_base:
        problems.append(
            f"--rotary-base {model.rotary_base} does nothing with --position-embedding-type "
            f"{model.position_embedding_type}; leave it out."
        )
    if data.seq_length > model.max_position_embeddings:
        problems.append(
            f"--seq-length {data.seq_length} exceeds --max-position-embeddings {model.max_position_embeddings}; "
            f"raise the latter to {data.seq_length}."
        )
    return problems


def _neighbours(size: int, heads: int) -> str:
    """The nearest head counts below and above that divide `size` into even widths."""
    fitting = [n for n in range(1, min(size, _SUGGESTED) + 1) if size % n == 0 and (size // n) % 2 == 0]
    below, above = [n for n in fitting if n < heads][-1:], [n for n in fitting if n > heads][:1]
    return " or ".join(str(n) for n in below + above) or "an even hidden size and other"


def _layout_problems(settings: Settings, world_size: int) -> list[str]:
    return (
        _tensor_parallel_problems(settings)
        + _pipeline_problems(settings)
        + _context_parallel_problems(settings)
        + _rank_problems(settings, world_size)
        + _overlap_problems(settings.parallel)
    )


def _tensor_parallel_problems(settings: Settings) -> list[str]:
    parallel, model = settings.parallel, settings.model
    tp = parallel.tensor_model_parallel_size
    problems = [
        f"--tensor-model-parallel-size {tp} does not divide {what} {size}; every rank needs an equal share."
        for what, size in (
            ("--num-attention-heads", model.num_attention_heads),
            ("the width of the feed-forward (--ffn-hidden-size)", model.ffn_width),
        )
        if size % tp
    ]
    if parallel.sequence_parallel and tp == 1:
        problems.append("--sequence-parallel does nothing with --tensor-model-parallel-size 1; leave it out.")
    return problems


def _pipeline_problems(settings: Settings) -> list[str]:
    pp, layers = settings.parallel.pipeline_model_parallel_size, settings.model.num_layers
    piece = settings.parallel.num_layers_per_virtual_pipeline_stage
    if piece is None:
        if layers % pp:
            return [
                f"--num-layers {layers} is not a multiple of --pipeline-model-parallel-size {pp}; every stage holds "
                f"the same number of layers. Use {_divisors(layers)} stages."
            ]
        return []
    if pp == 1:
        return [
            f"--num-layers-per-virtual-pipeline-stage {piece} interleaves the stages of a pipeline, but "
            "--pipeline-model-parallel-size is 1; raise that, or leave it out."
        ]
    if layers % (pp * piece):
        return [
            f"--num-layers {layers} is not a multiple of --pipeline-model-parallel-size {pp} x "
            f"--num-layers-per-virtual-pipeline-stage {piece} = {pp * piece}; every rank holds the same number of "
            "pieces. Change one of the three."
        ]
    if layers == pp * piece:
        return [
            f"--num-layers-per-virtual-pipeline-stage {piece} leaves each of {pp} stages one piece of --num-layers "
            f"{layers}, which is a plain pipeline; leave it out, or use a divisor of {piece} below it."
        ]
    return []


def _context_parallel_problems(settings: Settings) -> list[str]:
    parallel, model = settings.parallel, settings.model
    cp, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    problems = []
    heads = model.num_attention_heads
    if cp > 1 and heads % (tp * cp):
        problems.append(
            f"--context-parallel-size {cp} x --tensor-model-parallel-size {tp} does not divide "
            f"--num-attention-heads {heads}; attention shares the heads among these ranks. Lower one of them."
        )
    slots = settings.slots_per_micro_batch
    share = cp * (tp if parallel.sequence_parallel else 1)
    if slots % share:
        problems.append(
            f"--micro-batch-size {settings.training.micro_batch_size} x --seq-length {settings.data.seq_length} = "
            f"{slots} tokens cannot be shared by {share} ranks (--context-parallel-size {cp}"
            + (f" x --tensor-model-parallel-size {tp}, for --sequence-parallel" if parallel.sequence_parallel else "")
            + "); every rank needs the same number. Change the batch or the row."
        )
    if cp > 1 and settings.training.loss_normalization == "micro_batch":
        problems.append(
            f"--loss-normalization micro_batch needs a micro-batch on one rank, but --context-parallel-size {cp} "
            "shares it; use global, or --context-parallel-size 1."
        )
    return problems


def _divisors(number: int) -> str:
    divisors = [candidate for candidate in range(1, min(number, _SUGGESTED) + 1) if number % candidate == 0]
    return " or ".join([", ".join(map(str, divisors[:-1])), str(divisors[-1])]) if len(divisors) > 1 else "1"


def _rank_problems(settings: Settings, world_size: int) -> list[str]:
    parallel, training = settings.parallel, settings.training
    group = parallel.ranks_per_model
    if world_size % group:
        sizes = {
            "--tensor-model-parallel-size": parallel.tensor_model_parallel_size,
            "--pipeline-model-parallel-size": parallel.pipeline_model_parallel_size,
            "--context-parallel-size": parallel.context_parallel_size,
        }
        product = " x ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)
        return [
            f"{world_size} ranks cannot be divided into groups of {product}"
            f"{f' = {group}' if ' x ' in product else ''}; start a multiple of {group} ranks or lower it."
        ]
    dp = settings.data_parallel_size(world_size)
    rows = training.micro_batch_size * dp
    if training.global_batch_size % rows:
        return [
            f"--global-batch-size {training.global_batch_size} is not a multiple of --micro-batch-size "
            f"{training.micro_batch_size} x {dp} data-parallel ranks = {rows} rows. "
            f"Use {max(rows, round(training.global_batch_size / rows) * rows)}."
        ]
    micro_batches, pp = settings.micro_batches_per_rank(world_size), parallel.pipeline_model_parallel_size
    if settings.virtual_stages_per_rank > 1 and micro_batches % pp:
        return [
            f"{micro_batches} micro-batches per rank (--global-batch-size {training.global_batch_size} / {rows} rows) "
            f"are not a multiple of --pipeline-model-parallel-size {pp}, as an interleaved pipeline needs. Use "
            f"--global-batch-size {max(pp, round(micro_batches / pp) * pp) * rows}."
        ]
    return []


def _overlap_problems(parallel: ParallelConfig) -> list[str]:
    problems = []
    if parallel.ddp_bucket_size is not None and not parallel.overlap_grad_reduce:
        problems.append(
            f"--ddp-bucket-size {parallel.ddp_bucket_size} does nothing without --overlap-grad-reduce; add that, or "
            "leave it out."
        )
    if parallel.overlap_param_gather and not (parallel.use_distributed_optimizer and parallel.overlap_grad_reduce):
        problems.append(
            "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce; add them, or leave it "
            "out."
        )
    return problems


def _data_problems(data: DataConfig) -> list[str]:
    problems = []
    paths = {"--data-path": data.data_path}
    if data.valid_data_path is not None:
        paths["--valid-data-path"] = (data.valid_data_path,)
    for flag, entries in paths.items():
        try:
            parse_data_path(entries, flag=flag)
        except ConfigError as error:
            problems += error.problems
    if data.document_block_size > LARGEST_DOCUMENT_BLOCK:
        problems.append(
            f"--document-block-size {data.document_block_size} exceeds {LARGEST_DOCUMENT_BLOCK}, the documents "
            "that are packed together; they would all be neighbours. Use 256."
        )
    if data.tokenizer_model is None:
        problems.append("--tokenizer-model is missing: name the tokenizer that the corpus was written with.")
    if not 0.0 < data.mask_prob < 1.0:
        problems.append(f"--mask-prob {data.mask_prob} is not between 0 and 1; NeoBERT predicts 0.2 of the tokens.")
    return problems


def _schedule_problems(settings: Settings) -> list[str]:
    optimizer, training = settings.optimizer, settings.training
    problems = []
    end = settings.lr_decay_end
    if optimizer.lr_warmup_iters >= end:
        problems.append(
            f"--lr-warmup-iters {optimizer.lr_warmup_iters} is not below {end}, where the decay ends "
            f"(--lr-decay-iters, or 90 % of --train-iters {training.train_iters}). Use about {max(end // 50, 0)}."
        )
    if optimizer.min_lr > optimizer.lr:
        problems.append(f"--min-lr {optimizer.min_lr} is above --lr {optimizer.lr}; use {optimizer.lr / 10:g}.")
    for name in ("adam_beta1", "adam_beta2"):
        beta = getattr(optimizer, name)
        if not beta < 1.0:
            problems.append(f"{flag_of(name)} {beta} is not below 1; a running mean needs a decay.")
    if training.seed >= 2**63:
        problems.append(f"--seed {training.seed} does not fit 63 bits; use one below {2**63}.")
    if training.loss_spike_sigma is None and training.loss_spike_window != TrainingConfig().loss_spike_window:
        problems.append(
            f"--loss-spike-window {training.loss_spike_window} does nothing without --loss-spike-sigma; add that, or "
            "leave it out."
        )
    return problems


def _checkpoint_problems(settings: Settings) -> list[str]:
    checkpoint, training = settings.checkpoint, settings.training
    problems = []
    if checkpoint.continue_from is not None and checkpoint.save is not None and not checkpoint.loads_save:
        problems.append(
            f"--continue-from {checkpoint.continue_from} with --save {checkpoint.save} needs --load {checkpoint.save} "
            "as well, so that the same command goes on after a stop; add that."
        )
    for name in ("exit_interval", "exit_duration_in_mins"):
        limit = getattr(training, name)
        if limit is not None and checkpoint.save is None:
            problems.append(f"{flag_of(name)} {limit} stops a run that could not go on; add --save DIR.")
    if checkpoint.keep_every is not None and checkpoint.keep_last is None:
        problems.append(
            f"--keep-every {checkpoint.keep_every} does nothing without --keep-last, since all checkpoints are kept; "
            "add --keep-last 2, or leave it out."
        )
    if checkpoint.resume == "must" and checkpoint.load is None:
        problems.append("--resume must needs --load DIR, the folder of the run to continue; add that.")
    unknown = sorted(checkpoint.changes_allowed - set(ALLOWABLE))
    if unknown:
        problems.append(
            f"--allow-changed {','.join(unknown)} cannot be allowed: either the weights would not fit, or the setting "
            f"may change anyway. It takes {', '.join(ALLOWABLE)}."
        )
    return problems


def _logging_problems(logging: LoggingConfig) -> list[str]:
    project, problems = logging.wandb_project, []
    if project is not None and (wrong := sorted(set(project) & set(_NOT_IN_A_PROJECT))):
        problems.append(
            f"--wandb-project {project} contains {' '.join(wrong)}, which no project's name at Weights & Biases may; "
            "use letters, digits, - and _, and WANDB_ENTITY for its owner."
        )
    if project is None and logging.wandb_exp_name is not None:
        problems.append(
            f"--wandb-exp-name {logging.wandb_exp_name} names a run of Weights & Biases, but none is wanted; add "
            "--wandb-project NAME, or leave it out."
        )
    return problems
