"""All settings of a run, as one frozen dataclass per section of the YAML file.

`cli.py` turns every field into a flag of the same name, which is Megatron-LM's name if Megatron has the setting.
`rules.py` checks which values can be combined. Standard library only, so that `--help` takes milliseconds.
"""

import json
import re
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from megatron_neobert.cli import flag_of
from megatron_neobert.cli import option as setting

VOCABULARY_MULTIPLE = 128  # Megatron's default for the rows of a tensor-parallel rank


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the encoder. The defaults are NeoBERT's 28 x 768.

    Source: chandar-lab/NeoBERT@ed75b68 conf/model/250M-opt.yaml and conf/model/neobert.yaml.
    """

    num_layers: int = setting(28, "transformer layers", minimum=1)
    hidden_size: int = setting(768, "width of the residual stream", minimum=1)
    num_attention_heads: int = setting(12, "attention heads", minimum=1)
    swiglu: bool = setting(True, "SwiGLU feed-forward; off: GELU, as in BERT")
    ffn_hidden_size: int | None = setting(
        None, "feed-forward width; default: 8/3 x hidden size with SwiGLU, 4 x without", minimum=1
    )
    normalization: Literal["RMSNorm", "LayerNorm"] = setting("RMSNorm", "normalization layers")
    position_embedding_type: Literal["rope", "learned_absolute"] = setting("rope", "position embeddings")
    max_position_embeddings: int = setting(4096, "context length of the exported model, in tokens", minimum=1)
    rotary_base: int = setting(10000, "base frequency of rotary embeddings", minimum=2)
    norm_epsilon: float = setting(1e-5, "epsilon of the normalization layers", minimum=0.0)
    init_method_range: float = setting(0.02, "initial weights are uniform in [-X, X)", minimum=0.0)

    @property
    def ffn_width(self) -> int:
        """Width of the feed-forward layer. Default for hidden size 768: 2,048 with SwiGLU, 3,072 without."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        full_width = 4 * self.hidden_size
        return 8 * -(-int(2 * full_width / 3) // 8) if self.swiglu else full_width

    @property
    def position_rows(self) -> int:
        """Row count of the learned position table: positions, and row 0 for padding. 0 with rotary embeddings."""
        return self.max_position_embeddings + 1 if self.position_embedding_type == "learned_absolute" else 0

    def padded_vocab_size(self, vocab_size: int, *, tensor_parallel: int) -> int:
        """Return the vocabulary size with Megatron's padding, which is the row count of embedding and decoder."""
        multiple = VOCABULARY_MULTIPLE * tensor_parallel
        return -(-vocab_size // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallel layout. The data-parallel size is the number of ranks divided by the product of the other sizes."""

    tensor_model_parallel_size: int = setting(1, "ranks that share each layer", minimum=1)
    pipeline_model_parallel_size: int = setting(1, "pipeline stages of consecutive layers", minimum=1)
    context_parallel_size: int = setting(1, "ranks that share the tokens of a micro-batch", minimum=1)
    overlap_grad_reduce: bool | None = setting(
        None, "overlap data-parallel communication with computation; default: on CUDA only"
    )
    ddp_bucket_size: int | None = setting(None, "parameters per gradient bucket; default: 40 million", minimum=1)
    distributed_timeout_minutes: float = setting(
        10.0, "stop the run if a rank makes no progress for X minutes", minimum=0.01
    )

    @property
    def bucket_parameters(self) -> int:
        """Parameter count of a full gradient bucket."""
        # Megatron's default grows with the replicas, max(40 M, 1 M x replicas). From 245 replicas on, that is one
        # bucket for the whole model of 245 M parameters, and nothing overlaps.
        return self.ddp_bucket_size or 40_000_000

    @property
    def ranks_per_model(self) -> int:
        """Number of ranks of one replica of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """Kernels and precision. These settings change speed and rounding, but not the model."""

    transformer_impl: Literal["auto", "transformer_engine", "local"] = setting(
        "auto",
        "layers of Transformer Engine or torch (local); auto: Transformer Engine on CUDA if it is installed",
    )
    attention_backend: Literal["auto", "flash", "fused"] = setting(
        "auto",
        "attention kernel of Transformer Engine: FlashAttention, cuDNN (fused), or its choice (auto)",
    )
    recompute_granularity: Literal["full", "selective"] | None = setting(
        None, "recompute activations of whole layers (full) or of attention only (selective)"
    )
    fp8_format: Literal["hybrid", "e4m3"] | None = setting(
        None, "FP8 matrix products: E4M3, or E4M3 forward and E5M2 backward (hybrid)"
    )
    fp8_recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] = setting("tensorwise", "scaling of FP8 tensors")
    cuda_graph_impl: Literal["auto", "none", "full_iteration"] = setting(
        "auto",
        "full_iteration: launch forward and backward of a step as one CUDA graph, faster with few tokens per GPU; "
        "auto: on CUDA in bfloat16 or FP8, with one pipeline stage",
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Corpora, tokenizer, masking, and packing of documents into sequences."""

    data_path: tuple[str, ...] = setting(
        (),
        "corpus prefix that neobert preprocess printed, or a blend: weight, prefix, weight, prefix, ...; "
        "PREFIX:min=N:max=M:where=EXPRESSION:drop=FILE selects documents",
        is_path=True,
    )
    valid_data_path: tuple[str, ...] | None = setting(
        None, "validation corpora, one curve each, instead of the validation part of --split", is_path=True
    )
    tokenizer_model: str | None = setting(
        None, "tokenizer: folder, tokenizer.json, vocab.txt, tokenizer.model, or [OWNER/]NAME of the Hub", is_path=True
    )
    split: str = setting("99,1", "shares of documents for training and validation, spread evenly over the corpus")
    seq_length: int = setting(1024, "tokens per packed sequence, and maximum per document", minimum=8)
    long_documents: Literal["truncate", "chunk"] = setting(
        "truncate", "truncate documents longer than --seq-length, or divide them"
    )
    batch_layout: Literal["packed", "concatenated"] = setting(
        "packed", "attention within each document, or across documents (concatenated, the paper's M6)"
    )
    document_block_size: int = setting(
        1, "shuffle blocks of N consecutive documents; above 1 for slow storage", minimum=1
    )
    objective: Literal["mlm", "clm"] = setting(
        "mlm", "predict masked tokens (mlm), or every next token with causal attention (clm); for --phases"
    )
    mask_prob: float = setting(0.2, "share of the tokens that the model predicts")
    mask_replacement: Literal["all_mask", "bert"] = setting(
        "all_mask", "replace predicted tokens by [MASK], or as BERT: 80 % [MASK], 10 % random, 10 % unchanged"
    )
    object_storage_cache_path: str | None = setting(
        None, "local cache folder for corpora at URLs in --data-path", is_path=True
    )
    dataloader_type: Literal["torch", "dali"] = setting("torch", "data loader of torch or NVIDIA DALI")
    num_workers: int = setting(1, "data loader processes; 0: load in the training process", minimum=0)

    @property
    def predicted_share(self) -> float:
        """Share of the tokens that the model predicts. 1.0 for "clm", although the last token has no target."""
        return 1.0 if self.objective == "clm" else self.mask_prob

    @property
    def share_of_data_path(self) -> str:
        """--split, or "100" (all for training) if --valid-data-path is given."""
        return "100" if self.valid_data_path else self.split


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and learning-rate schedule. The defaults are the paper's.

    Source: arXiv 2502.19587 section 3.3 (the released configuration has lr 1e-4 and weight decay 0.01 instead).
    """

    optimizer: Literal["adamw", "adam", "muon"] = setting(
        "adamw",
        "adamw; adam: weight decay as part of the gradient; muon: for the matrices of the layers, AdamW for the rest",
    )
    lr: float = setting(6e-4, "peak learning rate", minimum=0.0)
    min_lr: float = setting(6e-5, "learning rate after the decay", minimum=0.0)
    lr_decay_style: Literal["cosine", "linear", "constant", "inverse-square-root", "WSD"] = setting(
        "cosine", "learning-rate decay; WSD: constant until the last --lr-wsd-decay-iters"
    )
    lr_warmup_iters: int = setting(2000, "iterations of linear warm-up from 0", minimum=0)
    lr_decay_iters: int | None = setting(
        None,
        "iteration that reaches --min-lr; default: 90 % of --train-iters, 100 % for WSD and inverse-square-root",
        minimum=1,
    )
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = setting(
        "exponential", "curve of the WSD decay"
    )
    lr_wsd_decay_iters: int | None = setting(None, "iterations of the WSD decay", minimum=1)
    weight_decay: float = setting(0.1, "weight decay", minimum=0.0)
    weight_decay_scope: Literal["all", "matrices"] = setting(
        "all", "decay all parameters (as the paper's code), or matrices only"
    )
    adam_beta1: float = setting(0.9, "decay rate of the first moment", minimum=0.0)
    adam_beta2: float = setting(0.95, "decay rate of the second moment", minimum=0.0)
    adam_eps: float = setting(1e-8, "added to the root of the second moment", minimum=0.0)
    clip_grad: float = setting(1.0, "clip gradients to this norm; 0: no clipping", minimum=0.0)


@dataclass(frozen=True, kw_only=True, repr=False)
class PhaseChange:
    """Entry of --phases: settings that change after `after_iters` iterations. None keeps the previous value."""

    after_iters: int
    data_path: tuple[str, ...] | None = None
    seq_length: int | None = None
    objective: str | None = None
    mask_prob: float | None = None
    mask_replacement: str | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None

    @property
    def values(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None and name != "after_iters"}

    @property
    def flags(self) -> str:
        """The changed settings as command-line flags, for log lines."""
        lists = {name: value if isinstance(value, tuple) else (value,) for name, value in self.values.items()}
        return " ".join(f"{flag_of(name)} {' '.join(map(str, value))}" for name, value in lists.items())

    def __repr__(self) -> str:
        """Return the entry as YAML on one line."""
        entry = {"after_iters": self.after_iters, **self.values}
        return f"{{{', '.join(f'{name}: {json.dumps(value)}' for name, value in entry.items())}}}"


PHASE_SETTINGS = tuple(item.name for item in fields(PhaseChange))


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Batches, length and precision of the run."""

    micro_batch_size: int = setting(
        64, "most packed sequences per forward pass and rank; lowered to divide the batch of a rank", minimum=1
    )
    global_batch_size: int = setting(2048, "packed sequences per iteration, over all ranks", minimum=1)
    train_iters: int = setting(1_000_000, "iterations of the whole run", minimum=1)
    phases: tuple[PhaseChange, ...] = setting(
        (),
        "settings that change during the run, as YAML: [{after_iters: N, mask_prob: X}, ...]; also objective, "
        "seq_length, global_batch_size, micro_batch_size, mask_replacement, data_path",
    )
    seed: int = setting(0, "random seed of weights, document order and masks", minimum=0)
    bf16: bool = setting(False, "compute in bfloat16, with float32 main weights")
    loss_normalization: Literal["global", "micro_batch"] = setting(
        "global",
        "mean loss over the masked tokens of the global batch, or mean of micro-batch means (as the paper's code)",
    )
    eval_interval: int = setting(1000, "iterations between validations", minimum=1)
    eval_iters: int = setting(10, "global batches per validation of each corpus; 0: no validation", minimum=0)
    exit_interval: int | None = setting(
        None, "save and stop at multiples of N iterations, with exit code 75", minimum=1
    )
    exit_duration_in_mins: float | None = setting(None, "save and stop after X minutes", minimum=0.0)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Folders that a run saves to and loads from."""

    save: str | None = setting(None, "folder to save checkpoints and logs to", is_path=True)
    load: str | None = setting(None, "folder to resume from; may be empty if it is also --save", is_path=True)
    continue_from: str | None = setting(
        None,
        "while --load is empty, start from weights, optimizer and iteration of a run or checkpoint "
        "(RUN/iter_0001000), and from its position in the data if these are the same",
        is_path=True,
    )
    save_interval: int = setting(1000, "iterations between checkpoints", minimum=1)
    async_save: bool = setting(False, "write checkpoints while training continues")
    keep_last: int | None = setting(None, "keep only the newest N checkpoints; default: keep all", minimum=2)
    keep_every: int | None = setting(None, "with --keep-last: also keep multiples of N iterations", minimum=1)

    @property
    def loads_save(self) -> bool:
        """True if --load and --save are the same folder, so that the same command resumes after a stop."""
        if self.load is None or self.save is None:
            return False
        return Path(self.load).resolve() == Path(self.save).resolve()


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logging and profiling."""

    log_interval: int = setting(100, "iterations between log lines", minimum=1)
    profile: str | None = setting(None, "iterations to trace on rank 0, such as 10-12; written to SAVE/profile")
    wandb_project: str | None = setting(
        None, "also log to this Weights & Biases project; its environment variables apply (WANDB_MODE, ...)"
    )

    @property
    def profiled_iterations(self) -> tuple[int, int] | None:
        """First and last iteration to profile; None if --profile is not given or not a range."""
        match = re.fullmatch(r"([0-9]{1,18})-([0-9]{1,18})", self.profile or "")
        return (int(match[1]), int(match[2])) if match else None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run; each field is a section of the YAML file."""

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
        """Token capacity of a global batch."""
        return self.training.global_batch_size * self.data.seq_length

    @property
    def use_distributed_optimizer(self) -> bool:
        """True if data-parallel ranks share optimizer state (ZeRO-1). False for Muon, which needs whole matrices."""
        return self.optimizer.optimizer != "muon"

    @property
    def lr_decay_end(self) -> int:
        """Iteration at which the learning rate reaches min_lr. The paper's cosine ends at 90 % of the run."""
        share = 1.0 if self.optimizer.lr_decay_style in ("inverse-square-root", "WSD") else 0.9
        return self.optimizer.lr_decay_iters or max(1, round(share * self.training.train_iters))

    @property
    def layers_per_stage(self) -> int:
        return self.model.num_layers // self.parallel.pipeline_model_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        return world_size // self.parallel.ranks_per_model

    def micro_batches_per_rank(self, world_size: int) -> int:
        return self.training.global_batch_size // (self.training.micro_batch_size * self.data_parallel_size(world_size))

    @property
    def tokens_per_micro_batch(self) -> int:
        """Token capacity of a micro-batch."""
        return self.training.micro_batch_size * self.data.seq_length

    def with_section(self, name: str, **changes: Any) -> "Settings":
        """Return a copy with the given fields of one section changed."""
        return replace(self, **{name: replace(getattr(self, name), **changes)})
