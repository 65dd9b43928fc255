"""Rules between the settings of a run. All violations are reported together, before any process is started.

Each message states the values, the rule and the remedy. Standard library only.
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from megatron_neobert.cli import flag_of, option_fields, value_problems
from megatron_neobert.config.data_path import parse_data_path
from megatron_neobert.config.phases import resolve_phases
from megatron_neobert.config.schema import DataConfig, ModelConfig, Settings
from megatron_neobert.errors import ConfigError

# FP8 kernels need whole blocks, so the tokens of a rank and both sides of each matrix must be multiples of these sizes.
# Source: TransformerEngine 2.11 pytorch/utils.py assert_dim_for_fp8_exec, and the block lengths in
# pytorch/tensor/mxfp8_tensor.py and float8_blockwise_tensor.py. Tokens of sequence-parallel ranks also need 128.
FP8_BLOCK = {"tensorwise": 16, "delayed": 16, "mxfp8": 128, "blockwise": 128}
HEAD_WIDTH_MULTIPLE = 8  # of the fused attention kernels of FlashAttention, torch and Transformer Engine
LARGEST_DOCUMENT_BLOCK = 4096  # documents that data/batches/windows.py packs together


class Requirement(NamedTuple):
    """A rule: the setting `name` requires the setting `required`."""

    name: str
    required: str
    reason: str = "without it the setting has no effect"
    value: Any = None  # value of `name` that has the requirement; None: every value except the default
    required_value: Any = None  # None: every value except the default


_RESUMABLE = "a run that stops early must be able to resume"
_WAITS_FOR_LENGTHS = "in float32 the host waits for the lengths of the documents"
_ONE_STAGE = "a graph holds no exchange between stages"
_WHOLE_MATRICES = "Muon orthogonalizes whole matrices"
REQUIREMENTS = (
    Requirement("rotary_base", "position_embedding_type", required_value="rope"),
    Requirement(
        "transformer_impl", "bf16", "its packed attention kernels do not support float32", value="transformer_engine"
    ),
    Requirement("attention_backend", "bf16", "the kernel does not support float32"),
    Requirement("fp8_format", "bf16", "operations other than matrix products use bfloat16"),
    Requirement("fp8_recipe", "fp8_format"),
    Requirement("cuda_graph_impl", "bf16", _WAITS_FOR_LENGTHS, value="full_iteration"),
    Requirement(
        "cuda_graph_impl", "pipeline_model_parallel_size", _ONE_STAGE, value="full_iteration", required_value=1
    ),
    Requirement("optimizer", "tensor_model_parallel_size", _WHOLE_MATRICES, value="muon", required_value=1),
    Requirement("lr_decay_style", "lr_wsd_decay_iters", "it sets the length of the decay", value="WSD"),
    Requirement("lr_wsd_decay_iters", "lr_decay_style", required_value="WSD"),
    Requirement("lr_wsd_decay_style", "lr_decay_style", required_value="WSD"),
    Requirement("async_save", "save"),
    Requirement("profile", "save", "the trace is written there"),
    Requirement("exit_interval", "save", _RESUMABLE),
    Requirement("exit_duration_in_mins", "save", _RESUMABLE),
    Requirement("keep_every", "keep_last", "all checkpoints are kept without it"),
)


def find_problems(settings: Settings, *, world_size: int, needs_data: bool = True) -> list[str]:
    """Return error messages for a run on `world_size` ranks. If a value is invalid by itself, report only such values.

    Args:
        needs_data: False for a plan, which may assume a corpus and a vocabulary.
    """
    if problems := list(invalid_values(settings)):  # the rules below compute with the values
        return problems
    if settings.training.phases:
        return list(phase_problems(settings, world_size=world_size, needs_data=needs_data))
    layout_problems = [*division_problems(settings), *batch_problems(settings, world_size)]
    return [
        *requirement_problems(settings),
        *model_problems(settings),
        *layout_problems,
        *([] if layout_problems else kernel_problems(settings)),  # divides by sizes of the layout
        *data_problems(settings.data, needs_data=needs_data),
        *schedule_problems(settings),
        *folder_problems(settings),
    ]


def graph_obstacle(settings: Settings, *, on_cuda: bool) -> str | None:
    """Return the reason why a step is not launched as a single CUDA graph, or None if a graph is used."""
    if settings.compute.cuda_graph_impl == "none":
        return "--cuda-graph-impl none"
    if not on_cuda:
        return "no CUDA device"
    if not settings.training.bf16:
        return _WAITS_FOR_LENGTHS
    return None if settings.parallel.pipeline_model_parallel_size == 1 else _ONE_STAGE


def find_record_problems(settings: Settings) -> list[str]:
    """Return the problems in a saved run's settings that no version would accept: the record is damaged or forged."""
    return list(invalid_values(settings)) or list(head_problems(settings.model))


def invalid_values(settings: Settings) -> Iterator[str]:
    """Yield an error message for each value that is invalid by itself: too small, not finite or not a choice."""
    for section in option_fields(Settings):
        config = getattr(settings, section.name)
        for item in option_fields(type(config)):
            yield from value_problems(item, getattr(config, item.name), source=flag_of(item.name))


def phase_problems(settings: Settings, *, world_size: int, needs_data: bool) -> Iterator[str]:
    """Yield distinct error messages about --phases and each phase's settings. `settings` must have phases."""
    counts = [phase.after_iters for phase in settings.training.phases]
    if counts != sorted(set(counts)) or counts[0] < 1:
        yield (
            f"--phases start after {', '.join(map(str, counts))} iterations; these numbers must increase from 1 or "
            "more. Sort the phases, and merge those with the same number."
        )
    if (last := max(counts)) >= settings.training.train_iters:
        yield (
            f"--phases: the phase after {last} iterations would start after the end of the run, --train-iters "
            f"{settings.training.train_iters}; remove it, or train longer."
        )
    reported: list[str] = []
    for phase in resolve_phases(settings):
        for problem in find_problems(phase.settings, world_size=world_size, needs_data=needs_data):
            if problem not in reported:
                reported.append(problem)
                prefix = f"phase {phase.number} (after {phase.first - 1} iterations): " if phase.number else ""
                yield f"{prefix}{problem}"


def requirement_problems(settings: Settings) -> Iterator[str]:
    """Yield an error message for each setting in REQUIREMENTS whose required setting is missing."""
    values, defaults = (
        {name: value for section in asdict(config).values() for name, value in section.items()}
        for config in (settings, Settings())
    )
    for name, required, reason, value, required_value in REQUIREMENTS:
        applies = values[name] != defaults[name] if value is None else values[name] == value
        is_met = (
            values[required] != defaults[required] if required_value is None else values[required] == required_value
        )
        if applies and not is_met:
            setting = flag_of(name) if values[name] is True else f"{flag_of(name)} {values[name]}"
            needed = flag_of(required) + ("" if required_value is None else f" {required_value}")
            yield f"{setting} needs {needed}: {reason}; add {needed}, or remove {flag_of(name)}."


def head_problems(model: ModelConfig) -> Iterator[str]:
    """Yield an error message if the heads do not divide the hidden size, or if rotary heads have an odd width."""
    heads = model.num_attention_heads
    if model.hidden_size % heads:
        yield (
            f"--hidden-size {model.hidden_size} is not a multiple of --num-attention-heads {heads}; all heads need "
            "the same width. Change one of them."
        )
    elif model.position_embedding_type == "rope" and (model.hidden_size // heads) % 2:
        yield (
            f"--hidden-size {model.hidden_size} / --num-attention-heads {heads} gives heads of width "
            f"{model.hidden_size // heads}; rotary embeddings rotate pairs and need an even width. Change one of them."
        )


def model_problems(settings: Settings) -> Iterator[str]:
    model, data = settings.model, settings.data
    yield from head_problems(model)
    if data.seq_length > model.max_position_embeddings:
        yield (
            f"--seq-length {data.seq_length} exceeds --max-position-embeddings {model.max_position_embeddings}; "
            f"raise --max-position-embeddings to {data.seq_length}."
        )


def division_problems(settings: Settings) -> Iterator[str]:
    """Yield error messages if tensor, context or pipeline parallelism does not fit the model's sizes or the loss."""
    parallel, model = settings.parallel, settings.model
    tp, cp, heads = parallel.tensor_model_parallel_size, parallel.context_parallel_size, model.num_attention_heads
    pp, layers = parallel.pipeline_model_parallel_size, model.num_layers
    for dimension, size in (
        ("--num-attention-heads", heads),
        ("the feed-forward width (--ffn-hidden-size)", model.ffn_width),
    ):
        if size % tp:
            yield (
                f"--tensor-model-parallel-size {tp} does not divide {dimension} {size}; all ranks need equal shares. "
                "Change one of them."
            )
    if cp > 1 and heads % (tp * cp):
        yield (
            f"--context-parallel-size {cp} x --tensor-model-parallel-size {tp} does not divide "
            f"--num-attention-heads {heads}; these ranks share the heads. Lower one of the sizes."
        )
    if cp > 1 and settings.training.loss_normalization == "micro_batch":
        yield (
            f"--loss-normalization micro_batch needs each micro-batch on one rank, and --context-parallel-size {cp} "
            "divides it; use global, or --context-parallel-size 1."
        )
    if layers % pp:
        yield (
            f"--num-layers {layers} is not a multiple of --pipeline-model-parallel-size {pp}; all stages need the "
            "same number of layers. Change one of them."
        )


def batch_problems(settings: Settings, world_size: int) -> Iterator[str]:
    """Yield error messages if a micro-batch's tokens, the ranks or a global batch cannot be divided evenly."""
    parallel, training = settings.parallel, settings.training
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if settings.tokens_per_micro_batch % (cp * tp):
        yield (
            f"--micro-batch-size {training.micro_batch_size} x --seq-length {settings.data.seq_length} = "
            f"{settings.tokens_per_micro_batch} tokens cannot be divided among --context-parallel-size {cp} x "
            f"--tensor-model-parallel-size {tp} = {cp * tp} ranks; all ranks need the same number. Use --seq-length "
            f"{_round_up(settings.data.seq_length, cp * tp)}."
        )
    group = parallel.ranks_per_model
    if world_size % group:
        yield (
            f"{world_size} ranks cannot be divided into groups of --tensor-model-parallel-size {tp} x "
            f"--pipeline-model-parallel-size {parallel.pipeline_model_parallel_size} x --context-parallel-size {cp} = "
            f"{group}; start a multiple of {group} ranks."
        )
        return
    dp = settings.data_parallel_size(world_size)
    # With the default loss normalization, the command line has chosen a micro-batch that divides the batch of a rank.
    is_fixed = training.loss_normalization == "micro_batch"
    step = training.micro_batch_size * dp if is_fixed else dp
    if training.global_batch_size % step:
        micro_batch = f"--micro-batch-size {training.micro_batch_size} x " if is_fixed else ""
        yield (
            f"--global-batch-size {training.global_batch_size} is not a multiple of {micro_batch}{dp} data-parallel "
            f"ranks{f' = {step} packed sequences' if is_fixed else ''}. "
            f"Use {max(step, round(training.global_batch_size / step) * step)}."
        )


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def kernel_problems(settings: Settings) -> Iterator[str]:
    """Yield error messages if the chosen kernels are not compatible, or do not support the head or matrix widths.

    For FP8, the hidden size, feed-forward width and tokens per micro-batch must be multiples of the recipe's block on
    each rank. All other dimensions are multiples of these three.
    """
    compute, model, parallel = settings.compute, settings.model, settings.parallel
    if compute.transformer_impl == "local":
        if compute.attention_backend != "auto":
            yield (
                f"--attention-backend {compute.attention_backend} chooses a kernel of Transformer Engine, and "
                "--transformer-impl is local; use --transformer-impl transformer_engine or --attention-backend auto."
            )
        if compute.fp8_format is not None:
            yield (
                f"--fp8-format {compute.fp8_format} needs Transformer Engine, and --transformer-impl is local; use "
                "--transformer-impl transformer_engine."
            )
    width = model.hidden_size // model.num_attention_heads
    if compute.attention_backend != "auto" and width % HEAD_WIDTH_MULTIPLE:
        yield (
            f"--attention-backend {compute.attention_backend} needs heads whose width is a multiple of "
            f"{HEAD_WIDTH_MULTIPLE}, and --hidden-size / --num-attention-heads = {width}; use --attention-backend auto."
        )
    if compute.fp8_format is None:
        return
    tp, block = parallel.tensor_model_parallel_size, FP8_BLOCK[compute.fp8_recipe]
    for dimension, size, ranks in (
        ("--hidden-size", model.hidden_size, tp),
        ("the feed-forward width (--ffn-hidden-size)", model.ffn_width, tp),
        ("--micro-batch-size x --seq-length", settings.tokens_per_micro_batch, tp * parallel.context_parallel_size),
    ):
        if size % (block * ranks):
            share = f" / {ranks} tensor- and context-parallel ranks = {size / ranks:g}" if ranks > 1 else ""
            alternative = " or --fp8-recipe tensorwise" if block > 16 else ""
            yield (
                f"--fp8-recipe {compute.fp8_recipe} needs matrix dimensions that are multiples of {block} per rank; "
                f"{dimension} {size}{share} is not. Use {_round_up(size, block * ranks)}{alternative}."
            )


def data_problems(data: DataConfig, *, needs_data: bool) -> Iterator[str]:
    validation = data.valid_data_path or ()
    paths = [("--data-path", data.data_path)] if needs_data or data.data_path else []
    paths += [("--valid-data-path", (entry,)) for entry in validation]
    for flag, entries in paths:
        try:
            prefixes = [component.prefix for component in parse_data_path(entries, flag=flag)]
        except ConfigError as error:
            yield from error.problems
            continue
        remote = [prefix for prefix in prefixes if "://" in prefix]
        if remote and data.object_storage_cache_path is None:
            yield f"{flag} {remote[0]} needs a local cache folder; give one with --object-storage-cache-path."
    if len(set(validation)) < len(validation):
        yield f"--valid-data-path {' '.join(validation)} names a corpus twice; name each corpus once."
    for entry in validation:
        if entry.replace(".", "", 1).isdigit():
            yield f"--valid-data-path {entry} is a weight, and each corpus has its own curve; remove the weights."
    if data.document_block_size > LARGEST_DOCUMENT_BLOCK:
        yield (
            f"--document-block-size {data.document_block_size} exceeds {LARGEST_DOCUMENT_BLOCK}, the number of "
            "documents that are packed together. Use 256."
        )
    if data.tokenizer_model is None and needs_data:
        yield "--tokenizer-model is missing: give the tokenizer that the corpus was written with."
    if not 2**-16 <= data.mask_prob < 1.0:  # draws have 16 bits
        yield f"--mask-prob {data.mask_prob} is not between 1/65,536 and 1; use 0.2, as NeoBERT does."


def schedule_problems(settings: Settings) -> Iterator[str]:
    optimizer, training = settings.optimizer, settings.training
    end = settings.lr_decay_end
    if optimizer.lr_warmup_iters >= end:
        yield (
            f"--lr-warmup-iters {optimizer.lr_warmup_iters} is not below {end}, the end of the decay "
            f"(--lr-decay-iters, or a share of --train-iters {training.train_iters}). Use for example "
            f"{min(end - 1, max(1, end // 50))}."
        )
    elif (optimizer.lr_wsd_decay_iters or 0) > (longest := end - optimizer.lr_warmup_iters):
        yield (
            f"--lr-wsd-decay-iters {optimizer.lr_wsd_decay_iters} exceeds {longest}, the iterations between the end of "
            f"the warm-up, {optimizer.lr_warmup_iters}, and of the decay, {end}. Use about {-(-longest // 10)}."
        )
    if optimizer.min_lr > optimizer.lr:
        yield f"--min-lr {optimizer.min_lr} is above --lr {optimizer.lr}; use {optimizer.lr / 10:g}."
    for name in ("adam_beta1", "adam_beta2"):
        beta = getattr(optimizer, name)
        if not beta < 1.0:
            yield f"{flag_of(name)} {beta} is not below 1; use a value such as 0.95."
    if settings.data.valid_data_path and not training.eval_iters:
        yield (
            f"--valid-data-path {' '.join(settings.data.valid_data_path)} is never used, because --eval-iters 0 "
            "switches validation off; remove one of the two."
        )


def folder_problems(settings: Settings) -> Iterator[str]:
    checkpoint, logging, last = settings.checkpoint, settings.logging, settings.training.train_iters
    if checkpoint.continue_from is not None and checkpoint.save is not None and not checkpoint.loads_save:
        yield (
            f"--continue-from {checkpoint.continue_from} with --save {checkpoint.save} needs --load {checkpoint.save}, "
            "so that the same command resumes after a stop; add it."
        )
    first, end = logging.profiled_iterations or (0, 0)
    if logging.profile is not None and not 1 <= first <= min(end, last):
        yield (
            f"--profile {logging.profile} is not a range of iterations between 1 and --train-iters {last}; give the "
            "first and the last iteration, such as 10-12."
        )
