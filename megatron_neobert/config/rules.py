"""Rules between the settings of a run. All violations are reported together, before anything is started.

Standard library only. Each message names the values, the rule and the remedy.
"""

from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any, NamedTuple

from megatron_neobert.cli import flag_of, typed_fields, value_problem
from megatron_neobert.config.data_path import parse_data_path
from megatron_neobert.config.phases import resolve_phases
from megatron_neobert.config.schema import DataConfig, ModelConfig, Settings
from megatron_neobert.errors import ConfigError

# Tokens of a rank and both sides of every matrix must be multiples of this, so that no FP8 kernel gets a part of its
# block. Source: TransformerEngine 2.11 pytorch/utils.py assert_dim_for_fp8_exec, and the block lengths in
# pytorch/tensor/mxfp8_tensor.py and float8_blockwise_tensor.py; tokens of sequence-parallel ranks also need 128.
FP8_BLOCK = {"tensorwise": 16, "delayed": 16, "mxfp8": 128, "blockwise": 128}
HEAD_WIDTH_MULTIPLE = 8  # of fused attention kernels: FlashAttention's, torch's and Transformer Engine's
_SUGGESTED = 1024  # the largest number of heads or stages that a message suggests
LARGEST_DOCUMENT_BLOCK = 4096  # data/batches/windows.py packs windows of so many documents


class Need(NamedTuple):
    """A setting that makes sense only with another one."""

    name: str
    needs: str
    why: str = "alone it does nothing"
    value: Any = None  # the one that needs the other; None: any but the default
    wanted: Any = None  # what the other must be; None: anything but its default


_RESUMABLE = "a run that stops early must be able to resume"
_WHOLE_MATRICES = "it orthogonalizes whole matrices"
NEEDS = (
    Need("rotary_base", "position_embedding_type", wanted="rope"),
    Need("transformer_impl", "bf16", "its packed attention kernels know no float32", value="transformer_engine"),
    Need("attention_backend", "bf16", "the kernel knows no float32"),
    Need("fp8_format", "bf16", "what is not a matrix product is computed in bfloat16"),
    Need("fp8_recipe", "fp8_format"),
    Need("optimizer", "use_distributed_optimizer", _WHOLE_MATRICES, value="muon", wanted=False),
    Need("optimizer", "tensor_model_parallel_size", _WHOLE_MATRICES, value="muon", wanted=1),
    Need("lr_decay_style", "lr_wsd_decay_iters", "how many of the last iterations decay", value="WSD"),
    Need("lr_wsd_decay_iters", "lr_decay_style", wanted="WSD"),
    Need("lr_wsd_decay_style", "lr_decay_style", wanted="WSD"),
    Need("async_save", "save"),
    Need("profile", "save", "the trace goes there"),
    Need("exit_interval", "save", _RESUMABLE),
    Need("exit_duration_in_mins", "save", _RESUMABLE),
    Need("keep_every", "keep_last", "alone it does nothing, because all checkpoints are kept"),
)


def find_problems(settings: Settings, *, world_size: int) -> list[str]:
    """Every reason why these settings cannot train on `world_size` ranks; empty if they can."""
    if problems := list(value_problems(settings)):  # the arithmetic below needs legal values
        return problems
    if settings.training.phases:
        return list(phase_problems(settings, world_size=world_size))
    layout_problems = [
        *tensor_parallel_problems(settings),
        *pipeline_problems(settings),
        *batch_problems(settings, world_size),
    ]
    return [
        *need_problems(settings),
        *model_problems(settings),
        *layout_problems,
        *([] if layout_problems else kernel_problems(settings)),
        *([] if layout_problems else fp8_problems(settings)),  # which divides by the layout's sizes
        *data_problems(settings.data),
        *schedule_problems(settings),
        *folder_problems(settings),
    ]


def find_record_problems(settings: Settings) -> list[str]:
    """Return the problems that no version would have accepted; a record that has one is damaged or forged."""
    return list(value_problems(settings)) or list(head_problems(settings.model))


def value_problems(settings: Settings) -> Iterator[str]:
    """Yield what is wrong with each value alone."""
    for section in fields(settings):
        config = getattr(settings, section.name)
        for item, wanted in typed_fields(type(config)):
            value = getattr(config, item.name)
            if problem := value_problem(item, wanted, value, source=flag_of(item.name)):
                yield problem


def phase_problems(settings: Settings, *, world_size: int) -> Iterator[str]:
    """Yield the problems of the run before its first phase, then the further problems of each phase."""
    counts = [phase.after_iters for phase in settings.training.phases]
    if counts != sorted(set(counts)) or counts[0] < 1:
        yield (
            f"--phases begin after {', '.join(map(str, counts))} iterations; each must begin after more than the one "
            "before, the first after 1 at least. Sort them, and merge those of one iteration."
        )
    if (last := max(counts)) >= settings.training.train_iters:
        yield (
            f"--phases: the one after {last} iterations would begin behind --train-iters "
            f"{settings.training.train_iters}; leave it out, or train longer."
        )
    known: list[str] = []
    for phase in resolve_phases(settings):
        for problem in find_problems(phase.settings, world_size=world_size):
            if problem not in known:
                known.append(problem)
                place = f"phase {phase.number} (after {phase.first - 1} iterations): " if phase.number else ""
                yield f"{place}{problem}"


def need_problems(settings: Settings) -> Iterator[str]:
    """Every setting whose companion is missing."""
    values, defaults = (
        {name: value for section in asdict(one).values() for name, value in section.items()}
        for one in (settings, Settings())
    )
    for name, needs, why, value, wanted in NEEDS:
        applies = values[name] != defaults[name] if value is None else values[name] == value
        is_met = values[needs] != defaults[needs] if wanted is None else values[needs] == wanted
        if applies and not is_met:
            given = flag_of(name) if values[name] is True else f"{flag_of(name)} {values[name]}"
            other = flag_of(needs)
            if wanted is False:
                other = other.replace("--", "--no-")
            elif wanted not in (None, True):
                other += f" {wanted}"
            elif type(defaults[needs]) is int:
                other += f" above {defaults[needs]}"
            yield f"{given} needs {other}: {why}; add that, or leave it out."


def head_problems(model: ModelConfig) -> Iterator[str]:
    heads = model.num_attention_heads
    if model.hidden_size % heads:
        yield (
            f"--hidden-size {model.hidden_size} is not a multiple of --num-attention-heads {heads}; every head needs "
            f"the same width. Use {_neighbours(model.hidden_size, heads)} heads."
        )
    elif model.position_embedding_type == "rope" and (model.hidden_size // heads) % 2:
        yield (
            f"--hidden-size {model.hidden_size} over --num-attention-heads {heads} gives heads of width "
            f"{model.hidden_size // heads}; rotary embeddings rotate pairs and need an even width."
        )


def model_problems(settings: Settings) -> Iterator[str]:
    model, data = settings.model, settings.data
    yield from head_problems(model)
    if data.seq_length > model.max_position_embeddings:
        yield (
            f"--seq-length {data.seq_length} exceeds --max-position-embeddings {model.max_position_embeddings}; "
            f"raise the latter to {data.seq_length}."
        )


def _neighbours(size: int, heads: int) -> str:
    """The nearest head counts below and above that divide `size` into even widths."""
    fitting = [n for n in range(1, min(size, _SUGGESTED) + 1) if size % n == 0 and (size // n) % 2 == 0]
    below, above = [n for n in fitting if n < heads][-1:], [n for n in fitting if n > heads][:1]
    return " or ".join(str(n) for n in below + above) or "an even hidden size and other"


def tensor_parallel_problems(settings: Settings) -> Iterator[str]:
    parallel, model = settings.parallel, settings.model
    tp, cp, heads = parallel.tensor_model_parallel_size, parallel.context_parallel_size, model.num_attention_heads
    for what, size in (
        ("--num-attention-heads", heads),
        ("the width of the feed-forward (--ffn-hidden-size)", model.ffn_width),
    ):
        if size % tp:
            yield f"--tensor-model-parallel-size {tp} does not divide {what} {size}; every rank needs an equal share."
    if cp > 1 and heads % (tp * cp):
        yield (
            f"--context-parallel-size {cp} x --tensor-model-parallel-size {tp} does not divide "
            f"--num-attention-heads {heads}; attention shares the heads among these ranks. Lower one of them."
        )
    if cp > 1 and settings.training.loss_normalization == "micro_batch":
        yield (
            f"--loss-normalization micro_batch needs a micro-batch on one rank, but --context-parallel-size {cp} "
            "shares it; use global, or --context-parallel-size 1."
        )


def pipeline_problems(settings: Settings) -> Iterator[str]:
    pp, layers = settings.parallel.pipeline_model_parallel_size, settings.model.num_layers
    if layers % pp:
        fitting = [str(stages) for stages in range(1, min(layers, _SUGGESTED) + 1) if layers % stages == 0]
        yield (
            f"--num-layers {layers} is not a multiple of --pipeline-model-parallel-size {pp}; every stage holds the "
            f"same number of layers. Use {' or '.join(fitting)} stages."
        )


def batch_problems(settings: Settings, world_size: int) -> Iterator[str]:
    """Yield problems with the division of a global batch among ranks, and of tokens within a micro-batch."""
    parallel, training = settings.parallel, settings.training
    tp, pp, cp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    if settings.tokens_per_micro_batch % (cp * tp):
        yield (
            f"--micro-batch-size {training.micro_batch_size} x --seq-length {settings.data.seq_length} = "
            f"{settings.tokens_per_micro_batch} tokens cannot be shared by --context-parallel-size {cp} x "
            f"--tensor-model-parallel-size {tp} = {cp * tp} ranks; every rank needs the same number. Use --seq-length "
            f"{-(-settings.data.seq_length // (cp * tp)) * cp * tp}."
        )
    group = parallel.ranks_per_model
    if world_size % group:
        yield (
            f"{world_size} ranks cannot be divided into groups of --tensor-model-parallel-size {tp} x "
            f"--pipeline-model-parallel-size {pp} x --context-parallel-size {cp} = {group}; start a multiple."
        )
        return
    dp = settings.data_parallel_size(world_size)
    rows = training.micro_batch_size * dp
    if training.global_batch_size % rows:
        yield (
            f"--global-batch-size {training.global_batch_size} is not a multiple of --micro-batch-size "
            f"{training.micro_batch_size} x {dp} data-parallel ranks = {rows} packed sequences. "
            f"Use {max(rows, round(training.global_batch_size / rows) * rows)}."
        )


def kernel_problems(settings: Settings) -> Iterator[str]:
    compute, model = settings.compute, settings.model
    if compute.transformer_impl == "local":
        if compute.attention_backend == "fused":
            yield (
                "--attention-backend fused is cuDNN through Transformer Engine, not with --transformer-impl local; use "
                "--transformer-impl transformer_engine or --attention-backend auto."
            )
        if compute.fp8_format is not None:
            yield (
                f"--fp8-format {compute.fp8_format} is Transformer Engine's, not with --transformer-impl local; use "
                "--transformer-impl transformer_engine."
            )
    width = model.hidden_size // model.num_attention_heads
    if compute.attention_backend == "fused" and width % HEAD_WIDTH_MULTIPLE:
        yield (
            f"--attention-backend fused needs heads of a width divisible by {HEAD_WIDTH_MULTIPLE}, not --hidden-size / "
            f"--num-attention-heads = {width}; use --attention-backend auto."
        )


def fp8_problems(settings: Settings) -> Iterator[str]:
    """Yield a problem for each side of a matrix of which a rank's share does not fill FP8 blocks.

    Sides are multiples of the hidden size, of the feed-forward width, or the tokens of a micro-batch.
    """
    model, parallel, compute = settings.model, settings.parallel, settings.compute
    if compute.fp8_format is None:
        return
    tp, block = parallel.tensor_model_parallel_size, FP8_BLOCK[compute.fp8_recipe]
    for what, size, ranks in (
        ("--hidden-size", model.hidden_size, tp),
        ("the feed-forward width (--ffn-hidden-size)", model.ffn_width, tp),
        ("--micro-batch-size x --seq-length", settings.tokens_per_micro_batch, tp * parallel.context_parallel_size),
    ):
        if size % (block * ranks):
            shared = f" over {ranks} tensor- and context-parallel ranks = {size / ranks:g}" if ranks > 1 else ""
            coarser = " or --fp8-recipe tensorwise" if block > 16 else ""
            yield (
                f"--fp8-recipe {compute.fp8_recipe} needs matrices whose sides are multiples of {block} on each rank: "
                f"{what} {size}{shared} is not. Use {-(-size // (block * ranks)) * block * ranks}{coarser}."
            )


def data_problems(data: DataConfig) -> Iterator[str]:
    validation = data.valid_data_path or ()
    paths = [("--data-path", data.data_path), *(("--valid-data-path", (entry,)) for entry in validation)]
    for flag, entries in paths:
        try:
            remote = [component.prefix for component in parse_data_path(entries, flag=flag) if component.is_remote]
        except ConfigError as error:
            yield from error.problems
            continue
        if remote and data.object_storage_cache_path is None:
            yield (
                f"{flag} {remote[0]} is read through a folder on a local disk; name one: --object-storage-cache-path."
            )
    if len(set(validation)) < len(validation):
        yield (f"--valid-data-path {' '.join(validation)} names a corpus twice; name each once.")
    for entry in validation:
        if entry.replace(".", "", 1).isdigit():
            yield (f"--valid-data-path {entry} is a weight, and each corpus has a curve of its own; leave weights out.")
    if data.document_block_size > LARGEST_DOCUMENT_BLOCK:
        yield (
            f"--document-block-size {data.document_block_size} exceeds {LARGEST_DOCUMENT_BLOCK}, documents that are "
            "packed together. Use 256."
        )
    if data.tokenizer_model is None:
        yield ("--tokenizer-model is missing: name the tokenizer that the corpus was written with.")
    if not 0.0 < data.mask_prob < 1.0:
        yield (f"--mask-prob {data.mask_prob} is not between 0 and 1; NeoBERT predicts 0.2 of the tokens.")


def schedule_problems(settings: Settings) -> Iterator[str]:
    optimizer, training = settings.optimizer, settings.training
    end = settings.lr_decay_end
    if optimizer.lr_warmup_iters >= end:
        yield (
            f"--lr-warmup-iters {optimizer.lr_warmup_iters} is not below {end}, the decay's end (--lr-decay-iters, by "
            f"default a share of --train-iters {training.train_iters}). Use about {end // 50}."
        )
    elif (optimizer.lr_wsd_decay_iters or 0) > (longest := end - optimizer.lr_warmup_iters):
        yield (
            f"--lr-wsd-decay-iters {optimizer.lr_wsd_decay_iters} exceeds {longest}, the iterations from the warm-up's "
            f"end, {optimizer.lr_warmup_iters}, to the decay's, {end}. Use about {-(-longest // 10)}."
        )
    if optimizer.min_lr > optimizer.lr:
        yield (f"--min-lr {optimizer.min_lr} is above --lr {optimizer.lr}; use {optimizer.lr / 10:g}.")
    for name in ("adam_beta1", "adam_beta2"):
        beta = getattr(optimizer, name)
        if not beta < 1.0:
            yield (f"{flag_of(name)} {beta} is not below 1; a running mean needs a decay.")
    if settings.data.valid_data_path and not training.eval_iters:
        yield (
            f"--valid-data-path {' '.join(settings.data.valid_data_path)} is measured at validations, of which "
            "--eval-iters 0 makes none; leave one of the two out."
        )


def folder_problems(settings: Settings) -> Iterator[str]:
    checkpoint, logging, last = settings.checkpoint, settings.logging, settings.training.train_iters
    if checkpoint.continue_from is not None and checkpoint.save is not None and not checkpoint.loads_save:
        yield (
            f"--continue-from {checkpoint.continue_from} with --save {checkpoint.save} needs --load {checkpoint.save} "
            "as well, so that the same command resumes after a stop; add that."
        )
    first, end = logging.profiled_iterations or (0, 0)
    if logging.profile is not None and not 1 <= first <= min(end, last):
        yield (
            f"--profile {logging.profile} is not a range of iterations between 1 and --train-iters {last}; give the "
            "first and the last one, such as 10-12."
        )
