"""The settings of a run: frozen dataclasses, one per subject, and the checks that need more than one of them.

Standard library only, so that `--help` and a refused start cost milliseconds. `flags.py` turns every field into a
flag of the same name; the names are Megatron-LM's wherever Megatron has the notion.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any


def setting(default: Any, help: str, *, choices: tuple[str, ...] | None = None, minimum: float | None = None) -> Any:
    """A field with its help text and, where one value alone can be judged, its legal values."""
    return field(default=default, metadata={"help": help, "choices": choices, "minimum": minimum})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the encoder. The defaults are NeoBERT's 28 x 768.

    Source: chandar-lab/NeoBERT@ed75b68 conf/model/250M-opt.yaml and conf/model/neobert.yaml.
    """

    num_layers: int = setting(28, "transformer layers", minimum=1)
    hidden_size: int = setting(768, "width of the residual stream", minimum=1)
    num_attention_heads: int = setting(12, "attention heads", minimum=1)
    ffn_hidden_size: int | None = setting(
        None, "width of the SwiGLU; default two thirds of 4 x hidden size, rounded up to a multiple of 8", minimum=1
    )
    max_position_embeddings: int = setting(4096, "longest document the exported model accepts, in tokens", minimum=1)
    rotary_base: int = setting(10000, "base of the rotary frequencies", minimum=2)
    norm_epsilon: float = setting(1e-5, "epsilon of every RMSNorm", minimum=0.0)
    init_method_range: float = setting(0.02, "weights start uniform in [-range, range)", minimum=0.0)
    make_vocab_size_divisible_by: int = setting(128, "the vocabulary is padded to a multiple of this x TP", minimum=1)

    @property
    def swiglu_width(self) -> int:
        """Width of the gated hidden layer, the 2/3 rule applied where no width is given (768 -> 2,048)."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return 8 * -(-int(2 * 4 * self.hidden_size / 3) // 8)

    def padded_vocab_size(self, vocab_size: int, *, tensor_parallel: int) -> int:
        """Rows of the embedding and columns of the decoder as Megatron allocates them."""
        multiple = self.make_vocab_size_divisible_by * tensor_parallel
        return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the ranks share the work. What tensor parallelism leaves over is data parallelism."""

    tensor_model_parallel_size: int = setting(1, "ranks that share every layer", minimum=1)
    use_distributed_optimizer: bool = setting(True, "split the optimizer state over the data-parallel ranks")
    overlap_grad_reduce: bool = setting(False, "reduce gradients while the backward pass still runs")
    overlap_param_gather: bool = setting(False, "gather updated weights while the next forward pass runs")
    ddp_bucket_size: int | None = setting(None, "parameters per gradient bucket; default Megatron's", minimum=1)
    distributed_timeout_minutes: int = setting(10, "a collective that waits longer ends the run", minimum=1)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which documents are read and what a row of tokens is made of."""

    data_path: str | None = setting(None, "corpus prefix, as written by tools/preprocess_data.py")
    valid_data_path: str | None = setting(
        None, "corpus for validation, as --split-validation of tools/preprocess_data.py holds it out; replaces --split"
    )
    tokenizer_model: str | None = setting(
        None, "tokenizer of these corpora: folder, tokenizer.json, vocab.txt or SentencePiece's tokenizer.model"
    )
    tokenizer_type: str = setting(
        "auto",
        "what that file is; auto goes by its content",
        choices=(
            "auto",
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "HuggingFaceTokenizer",
            "SentencePieceTokenizer",
        ),
    )
    split: str = setting("99,1", "shares of the documents for training and validation, in this order")
    seq_length: int = setting(1024, "tokens of a row, and of the longest document", minimum=8)
    long_documents: str = setting(
        "truncate", "documents longer than a row: keep the start, or cut into several", choices=("truncate", "chunk")
    )
    mask_prob: float = setting(0.2, "share of the tokens that is predicted")
    mask_replacement: str = setting(
        "all_mask",
        "what predicted tokens become: always [MASK], or BERT's 80 %% [MASK], 10 %% random, 10 %% unchanged",
        choices=("all_mask", "bert"),
    )
    num_workers: int = setting(1, "processes that prepare batches; 0 prepares them in the training process", minimum=0)

    @property
    def share_of_data_path(self) -> str:
        """--split, or all for training where validation has a corpus of its own."""
        return self.split if self.valid_data_path is None else "100"


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule. The defaults are the paper's.

    Source: arXiv 2502.19587 section 3.3 (the released configuration has lr 1e-4 and weight decay 0.01 instead).
    """

    optimizer: str = setting("adamw", "decoupled weight decay, or the decay in the gradient", choices=("adamw", "adam"))
    lr: float = setting(6e-4, "peak learning rate", minimum=0.0)
    min_lr: float = setting(6e-5, "learning rate after the decay", minimum=0.0)
    lr_decay_style: str = setting("cosine", "shape of the decay", choices=("cosine", "linear", "constant"))
    lr_warmup_iters: int = setting(2000, "iterations of linear warm-up from 0", minimum=0)
    lr_decay_iters: int | None = setting(
        None, "iteration at which min-lr is reached; default 90 %% of train-iters", minimum=1
    )
    weight_decay: float = setting(0.1, "weight decay", minimum=0.0)
    weight_decay_scope: str = setting(
        "all", "what is decayed: every parameter (as the paper's code), or matrices only", choices=("all", "matrices")
    )
    adam_beta1: float = setting(0.9, "decay of the first moment", minimum=0.0)
    adam_beta2: float = setting(0.95, "decay of the second moment", minimum=0.0)
    adam_eps: float = setting(1e-8, "added to the root of the second moment", minimum=0.0)
    clip_grad: float = setting(1.0, "largest gradient norm; 0 does not clip", minimum=0.0)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Batches, length and precision of the run."""

    micro_batch_size: int = setting(64, "rows per forward pass and rank", minimum=1)
    global_batch_size: int = setting(2048, "rows per iteration over all ranks", minimum=1)
    train_iters: int = setting(1_000_000, "iterations of the whole run", minimum=1)
    seed: int = setting(0, "seed of weights, document order and masks", minimum=0)
    bf16: bool = setting(False, "compute in bfloat16 with float32 main weights")
    loss_normalization: str = setting(
        "global",
        "mean over all masked tokens of the batch, or mean of the micro-batches' means (as the paper's code)",
        choices=("global", "micro_batch"),
    )
    eval_interval: int = setting(1000, "iterations between validations", minimum=1)
    eval_iters: int = setting(10, "global batches per validation; 0 does not validate", minimum=0)
    exit_interval: int | None = setting(
        None, "save and stop at each iteration that is a multiple of this, with exit code 75", minimum=1
    )
    exit_duration_in_mins: float | None = setting(None, "save and stop after so many minutes", minimum=0.0)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where a run is saved and what it continues from."""

    save: str | None = setting(None, "folder for checkpoints")
    load: str | None = setting(
        None, "folder to continue from: its newest checkpoint; if it is also --save it may still be empty"
    )
    save_interval: int = setting(1000, "iterations between checkpoints", minimum=1)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What the run says and where."""

    log_interval: int = setting(100, "iterations between log lines", minimum=1)
    tensorboard_dir: str | None = setting(None, "folder for TensorBoard; default SAVE/tensorboard")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything a run is started with; each field is a section of the YAML file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def tokens_per_iteration(self) -> int:
        """Slots of one global batch, the few unused ones included."""
        return self.training.global_batch_size * self.data.seq_length

    @property
    def lr_decay_end(self) -> int:
        """Iteration at which the learning rate has fallen to min_lr; the paper's cosine ends at 90 % of the run."""
        return self.optimizer.lr_decay_iters or max(1, round(0.9 * self.training.train_iters))

    def data_parallel_size(self, world_size: int) -> int:
        return world_size // self.parallel.tensor_model_parallel_size

    def with_section(self, name: str, **changes: Any) -> "Settings":
        """A copy in which some fields of one section differ."""
        return replace(self, **{name: replace(getattr(self, name), **changes)})


def flag_of(name: str) -> str:
    """`global_batch_size` as the user types it."""
    return "--" + name.replace("_", "-")


def find_problems(settings: Settings, *, world_size: int) -> list[str]:
    """Every reason why these settings cannot train on `world_size` ranks; empty if they can."""
    problems = _value_problems(settings)
    if problems:  # the arithmetic below needs legal values
        return problems
    return (
        _model_problems(settings)
        + _layout_problems(settings, world_size)
        + _data_problems(settings.data)
        + _schedule_problems(settings)
    )


def _value_problems(settings: Settings) -> list[str]:
    problems = []
    for section in fields(settings):
        config = getattr(settings, section.name)
        for item in fields(config):
            value, rules = getattr(config, item.name), item.metadata
            if rules["choices"] and value not in rules["choices"]:
                problems.append(f"{flag_of(item.name)} {value} is not one of {', '.join(rules['choices'])}.")
            if rules["minimum"] is not None and value is not None and not value >= rules["minimum"]:  # NaN fails too
                problems.append(f"{flag_of(item.name)} {value} is below {rules['minimum']}, its smallest legal value.")
    return problems


def _model_problems(settings: Settings) -> list[str]:
    model, data = settings.model, settings.data
    problems = []
    heads = model.num_attention_heads
    if model.hidden_size % heads:
        problems.append(
            f"--hidden-size {model.hidden_size} is not a multiple of --num-attention-heads {heads}; every head needs "
            f"the same width. Use {_neighbours(model.hidden_size, heads)} heads."
        )
    elif (model.hidden_size // heads) % 2:
        problems.append(
            f"--hidden-size {model.hidden_size} over --num-attention-heads {heads} gives heads of width "
            f"{model.hidden_size // heads}; rotary embeddings rotate pairs and need an even width."
        )
    if data.seq_length > model.max_position_embeddings:
        problems.append(
            f"--seq-length {data.seq_length} exceeds --max-position-embeddings {model.max_position_embeddings}; "
            f"raise the latter to {data.seq_length}."
        )
    return problems


def _neighbours(size: int, heads: int) -> str:
    """The nearest head counts below and above that divide `size` into even widths."""
    fitting = [n for n in range(1, size + 1) if size % n == 0 and (size // n) % 2 == 0]
    below, above = [n for n in fitting if n < heads][-1:], [n for n in fitting if n > heads][:1]
    return " or ".join(str(n) for n in below + above) or "an even hidden size and other"


def _layout_problems(settings: Settings, world_size: int) -> list[str]:
    parallel, training, model = settings.parallel, settings.training, settings.model
    tp = parallel.tensor_model_parallel_size
    problems = [
        f"--tensor-model-parallel-size {tp} does not divide {what} {size}; every rank needs an equal share."
        for what, size in (
            ("--num-attention-heads", model.num_attention_heads),
            ("the SwiGLU width (--ffn-hidden-size)", model.swiglu_width),
        )
        if size % tp
    ]
    if world_size % tp:
        problems.append(
            f"{world_size} ranks cannot be divided into groups of --tensor-model-parallel-size {tp}; start a multiple "
            f"of {tp} ranks or lower it."
        )
    else:
        dp = settings.data_parallel_size(world_size)
        rows = training.micro_batch_size * dp
        if training.global_batch_size % rows:
            problems.append(
                f"--global-batch-size {training.global_batch_size} is not a multiple of --micro-batch-size "
                f"{training.micro_batch_size} x {dp} data-parallel ranks = {rows} rows. "
                f"Use {max(rows, round(training.global_batch_size / rows) * rows)}."
            )
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
    if data.data_path is None:
        problems.append("--data-path is missing: name the corpus prefix that tools/preprocess_data.py printed.")
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
    for name in ("exit_interval", "exit_duration_in_mins"):
        limit = getattr(training, name)
        if limit is not None and settings.checkpoint.save is None:
            problems.append(f"{flag_of(name)} {limit} stops a run that could not go on; add --save DIR.")
    return problems
