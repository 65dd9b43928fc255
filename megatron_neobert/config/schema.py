"""The settings of a run: frozen dataclasses, one per subject.

Standard library only, so that `--help` and a refused start cost milliseconds. `cli.py` turns every field into a
flag of the same name; the names are Megatron-LM's wherever Megatron has the notion. What values can stand together is
checked in `rules.py`.
"""

import json
import re
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from megatron_neobert.cli import flag_of
from megatron_neobert.cli import option as setting

# Megatron's names for what a tokenizer file can be; "auto" goes by its content.
TOKENIZER_TYPES = (
    "auto",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
)


def path_setting(default: Any, help: str) -> Any:
    """Return a field for files or folders of the user's machines, which published reports leave out."""
    return setting(default, help, is_path=True)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the encoder. The defaults are NeoBERT's 28 x 768.

    Source: chandar-lab/NeoBERT@ed75b68 conf/model/250M-opt.yaml and conf/model/neobert.yaml.
    """

    num_layers: int = setting(28, "number of transformer layers", minimum=1)
    hidden_size: int = setting(768, "hidden size: width of the residual stream", minimum=1)
    num_attention_heads: int = setting(12, "number of attention heads", minimum=1)
    swiglu: bool = setting(True, "SwiGLU feed-forward; without it two layers with GELU between, as in BERT")
    ffn_hidden_size: int | None = setting(
        None, "feed-forward width; default 4 x hidden size, or 8/3 x with SwiGLU", minimum=1
    )
    normalization: str = setting("RMSNorm", "normalization layers", choices=("RMSNorm", "LayerNorm"))
    position_embedding_type: str = setting("rope", "rotary or learned positions", choices=("rope", "learned_absolute"))
    max_position_embeddings: int = setting(4096, "context length of the exported model, in tokens", minimum=1)
    rotary_base: int = setting(10000, "RoPE base frequency (theta)", minimum=2)
    norm_epsilon: float = setting(1e-5, "normalization epsilon", minimum=0.0)
    init_method_range: float = setting(0.02, "initialization: weights uniform in [-range, range)", minimum=0.0)
    make_vocab_size_divisible_by: int = setting(128, "vocabulary padding: multiple of this x TP", minimum=1)

    @property
    def ffn_width(self) -> int:
        """Width of the feed-forward's hidden layer; without a given width 768 -> 2,048, or 3,072 without SwiGLU."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        full = 4 * self.hidden_size
        return 8 * -(-int(2 * full / 3) // 8) if self.swiglu else full

    @property
    def position_rows(self) -> int:
        """Rows of the table of learned positions: one for each, and row 0 for padding, as in the released ablation."""
        return self.max_position_embeddings + 1 if self.position_embedding_type == "learned_absolute" else 0

    @property
    def is_neobert(self) -> bool:
        """True if the layers are NeoBERT's and not an ablation's: the published formats can express the model."""
        return self.swiglu and self.normalization == "RMSNorm" and self.position_embedding_type == "rope"

    def padded_vocab_size(self, vocab_size: int, *, tensor_parallel: int) -> int:
        """Rows of the embedding and columns of the decoder as Megatron allocates them."""
        multiple = self.make_vocab_size_divisible_by * tensor_parallel
        return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallel layout. Ranks that the other dimensions leave over are data parallel."""

    tensor_model_parallel_size: int = setting(1, "tensor-parallel size: GPUs that share layers and tokens", minimum=1)
    pipeline_model_parallel_size: int = setting(1, "pipeline-parallel size: stages of consecutive layers", minimum=1)
    context_parallel_size: int = setting(1, "context-parallel size: GPUs that share a micro-batch's tokens", minimum=1)
    use_distributed_optimizer: bool = setting(True, "distributed optimizer: state sharded over DP ranks (ZeRO-1)")
    overlap_grad_reduce: bool | None = setting(None, "overlap DP communication with computation; default: on CUDA")
    ddp_bucket_size: int | None = setting(None, "gradient bucket size in parameters; default Megatron's", minimum=1)
    distributed_timeout_minutes: float = setting(10.0, "hang timeout: longest time without progress", minimum=0.01)

    @property
    def sequence_parallel(self) -> bool:
        """True if tensor-parallel ranks also divide the tokens between the matrix products."""
        return self.tensor_model_parallel_size > 1

    @property
    def ranks_per_model(self) -> int:
        """Ranks that one replica of the model takes."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """Kernels and precision of a rank. These settings do not change the function that is computed."""

    transformer_impl: str = setting(
        "auto",
        "layer implementation: Transformer Engine or torch; auto: the former where it and CUDA are present",
        choices=("auto", "transformer_engine", "local"),
    )
    attention_backend: str = setting(
        "auto",
        "attention kernel on CUDA: Transformer Engine's choice or torch's (auto), flash-attn, or cuDNN (fused)",
        choices=("auto", "flash", "fused"),
    )
    recompute_granularity: str | None = setting(
        None, "activation recomputation: whole layers or attention only", choices=("full", "selective")
    )
    fp8_format: str | None = setting(None, "FP8: E4M3 forward, E5M2 or E4M3 backward", choices=("hybrid", "e4m3"))
    fp8_recipe: str = setting("tensorwise", "FP8 scaling", choices=("tensorwise", "delayed", "blockwise", "mxfp8"))


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Documents that are read, and the composition of packed sequences."""

    data_path: tuple[str, ...] = path_setting(
        (),
        "corpus prefix as written by neobert preprocess; or several, each after its share of the documents; "
        "PREFIX:min=N:max=M:where=EXPRESSION:drop=FILE reads less of it, by tokens, attributes and a drop list",
    )
    valid_data_path: tuple[str, ...] | None = path_setting(
        None, "corpora for validation, each with its own curve; not --split"
    )
    tokenizer_model: str | None = path_setting(None, "tokenizer: folder, tokenizer.json, vocab.txt or tokenizer.model")
    tokenizer_type: str = setting("auto", "tokenizer type; auto goes by the file's content", choices=TOKENIZER_TYPES)
    split: str = setting("99,1", "split: shares of the documents for training and validation")
    seq_length: int = setting(1024, "sequence length in tokens, of documents and packed sequences", minimum=8)
    long_documents: str = setting("truncate", "long documents: truncated or chunked", choices=("truncate", "chunk"))
    batch_layout: str = setting(
        "packed",
        "attention within each document, or across all that share a packed sequence (concatenated, the paper's M6)",
        choices=("packed", "concatenated"),
    )
    document_block_size: int = setting(1, "shuffling granularity in documents; above 1 for slow storage", minimum=1)
    mask_prob: float = setting(0.2, "masking rate: share of the tokens that is predicted")
    mask_replacement: str = setting(
        "all_mask", "always [MASK], or BERT's 80 % [MASK], 10 % random, 10 % unchanged", choices=("all_mask", "bert")
    )
    object_storage_cache_path: str | None = path_setting(None, "local folder that URLs in --data-path are read through")
    dataloader_type: str = setting("torch", "data loader: torch or NVIDIA DALI", choices=("torch", "dali"))
    num_workers: int = setting(1, "data loader processes; 0 prepares batches in the training process", minimum=0)

    @property
    def share_of_data_path(self) -> str:
        """--split, or all for training where validation has a corpus of its own."""
        return "100" if self.valid_data_path else self.split


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule. The defaults are the paper's.

    Source: arXiv 2502.19587 section 3.3 (the released configuration has lr 1e-4 and weight decay 0.01 instead).
    """

    optimizer: str = setting(
        "adamw",
        "optimizer: AdamW, weight decay in the gradient (adam), or Muon for the layers' matrices, AdamW for the rest",
        choices=("adamw", "adam", "muon"),
    )
    lr: float = setting(6e-4, "peak learning rate", minimum=0.0)
    min_lr: float = setting(6e-5, "minimum learning rate, after the decay", minimum=0.0)
    lr_decay_style: str = setting(
        "cosine",
        "learning-rate decay; WSD: constant (stable) until the last iterations, the decay",
        choices=("cosine", "linear", "constant", "inverse-square-root", "WSD"),
    )
    lr_warmup_iters: int = setting(2000, "warm-up iterations, linear from 0", minimum=0)
    lr_decay_iters: int | None = setting(
        None, "where --min-lr is reached; default 90 % of --train-iters, all for WSD, inverse-square-root", minimum=1
    )
    lr_wsd_decay_style: str = setting(
        "exponential", "WSD decay", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = setting(None, "WSD decay: the last so many of --lr-decay-iters", minimum=1)
    weight_decay: float = setting(0.1, "weight decay", minimum=0.0)
    weight_decay_scope: str = setting(
        "all", "weight decay of every parameter (as the paper's code), or of matrices only", choices=("all", "matrices")
    )
    adam_beta1: float = setting(0.9, "Adam beta1, decay of the first moment", minimum=0.0)
    adam_beta2: float = setting(0.95, "Adam beta2, decay of the second moment", minimum=0.0)
    adam_eps: float = setting(1e-8, "Adam epsilon, added to the root of the second moment", minimum=0.0)
    clip_grad: float = setting(1.0, "gradient clipping: largest norm; 0 does not clip", minimum=0.0)


@dataclass(frozen=True, kw_only=True, repr=False)
class PhaseChange:
    """An entry of --phases: settings that change after `after_iters` iterations; None leaves a setting as it was."""

    after_iters: int
    data_path: tuple[str, ...] | None = None
    seq_length: int | None = None
    mask_prob: float | None = None
    mask_replacement: str | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None

    @property
    def values(self) -> dict[str, Any]:
        given = {name: value for name, value in asdict(self).items() if value is not None}
        del given["after_iters"]
        return given

    @property
    def flags(self) -> str:
        """The changed settings as command-line flags, for log lines."""
        given = {name: value if isinstance(value, tuple) else (value,) for name, value in self.values.items()}
        return " ".join(f"{flag_of(name)} {' '.join(map(str, value))}" for name, value in given.items())

    def __repr__(self) -> str:
        """Format the entry as YAML on one line."""
        given = {"after_iters": self.after_iters, **self.values}
        return f"{{{', '.join(f'{name}: {json.dumps(value)}' for name, value in given.items())}}}"


PHASE_SETTINGS = tuple(item.name for item in fields(PhaseChange))


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Batches, length and precision of the run."""

    micro_batch_size: int = setting(64, "micro-batch size: packed sequences per forward pass and rank", minimum=1)
    global_batch_size: int = setting(2048, "global batch size: packed sequences per iteration", minimum=1)
    train_iters: int = setting(1_000_000, "training iterations of the whole run", minimum=1)
    phases: tuple[PhaseChange, ...] = setting(
        (),
        "settings that change while the run trains, as YAML: [{after_iters: N, mask_prob: X}, ...]; also seq_length, "
        "global_batch_size, micro_batch_size, mask_replacement, data_path",
    )
    seed: int = setting(0, "random seed of weights, document order and masks", minimum=0)
    bf16: bool = setting(False, "bfloat16 with float32 main weights")
    loss_normalization: str = setting(
        "global",
        "loss: mean over all masked tokens of the batch, or mean of the micro-batches' means (as the paper's code)",
        choices=("global", "micro_batch"),
    )
    eval_interval: int = setting(1000, "validation interval in iterations", minimum=1)
    eval_iters: int = setting(10, "validation length in global batches of each corpus; 0 does not validate", minimum=0)
    exit_interval: int | None = setting(None, "save and stop every so many iterations, with exit code 75", minimum=1)
    exit_duration_in_mins: float | None = setting(None, "save and stop after so many minutes", minimum=0.0)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Folders that a run saves to and continues from."""

    save: str | None = path_setting(None, "checkpoint folder to write to")
    load: str | None = path_setting(None, "checkpoint folder to resume from; may be empty if it is also --save")
    continue_from: str | None = path_setting(
        None,
        "folder of another run, or one of its checkpoints (RUN/iter_0001000), used while --load is empty: weights, "
        "optimizer state, iteration and, in the same data, the position are taken; other data begin at their start",
    )
    save_interval: int = setting(1000, "checkpoint interval in iterations", minimum=1)
    async_save: bool = setting(False, "asynchronous checkpoints: written from host memory while training continues")
    keep_last: int | None = setting(None, "delete all but the newest N checkpoints; default: keep all", minimum=2)
    keep_every: int | None = setting(None, "with --keep-last: also keep multiples of so many iterations", minimum=1)

    @property
    def loads_save(self) -> bool:
        """True if --load is the folder of --save, so that the same command resumes after a stop."""
        if self.load is None or self.save is None:
            return False
        return Path(self.load).resolve() == Path(self.save).resolve()


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logging of a run."""

    log_interval: int = setting(100, "log interval in iterations", minimum=1)
    profile: str | None = setting(None, "iterations to profile on rank 0, as 10-12: a trace in SAVE/profile")
    wandb_project: str | None = setting(None, "Weights & Biases project to log to as well; WANDB_MODE etc. hold")

    @property
    def profiled_iterations(self) -> tuple[int, int] | None:
        """First and last iteration of the profile; None if there is none, or --profile is malformed."""
        match = re.fullmatch(r"([0-9]{1,18})-([0-9]{1,18})", self.profile or "")
        return (int(match[1]), int(match[2])) if match else None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything a run is started with; each field is a section of the YAML file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def tokens_per_iteration(self) -> int:
        """Token capacity of one global batch."""
        return self.training.global_batch_size * self.data.seq_length

    @property
    def lr_decay_end(self) -> int:
        """Iteration at which the learning rate has fallen to min_lr; the paper's cosine ends at 90 % of the run."""
        share = 1.0 if self.optimizer.lr_decay_style in ("inverse-square-root", "WSD") else 0.9
        return self.optimizer.lr_decay_iters or max(1, round(share * self.training.train_iters))

    @property
    def layers_per_stage(self) -> int:
        """Layers of each pipeline stage."""
        return self.model.num_layers // self.parallel.pipeline_model_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        return world_size // self.parallel.ranks_per_model

    def micro_batches_per_rank(self, world_size: int) -> int:
        return self.training.global_batch_size // (self.training.micro_batch_size * self.data_parallel_size(world_size))

    @property
    def tokens_per_micro_batch(self) -> int:
        """Token capacity of one forward pass."""
        return self.training.micro_batch_size * self.data.seq_length

    def with_section(self, name: str, **changes: Any) -> "Settings":
        """A copy in which some fields of one section differ."""
        return replace(self, **{name: replace(getattr(self, name), **changes)})
