"""Settings of the evaluations, which are also their command lines. Imports neither torch nor datasets."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from megatron_neobert.cli import option
from megatron_neobert.evaluation.paper import MTEB_PAPER, THROUGHPUT_LENGTHS
from megatron_neobert.huggingface.hub import find_model, go_offline
from megatron_neobert.runtime.atomic_files import require_folder

Dtype = Literal["float32", "bfloat16", "float16"]
# A tokenizer does not truncate to fewer tokens than it adds, up to four for a pair of texts.
SHORTEST_INPUT = 4
GLUE_TASKS = ("mnli", "qnli", "qqp", "rte", "sst2", "mrpc", "cola", "stsb")
FETCH_GLUE = "on a machine with network: hf download nyu-mll/glue --repo-type dataset --local-dir DIR"

_MODEL = "encoder: Hugging Face folder, or [OWNER/]NAME[@REVISION] of the Hub"
_OUTPUT = "folder for the results"
_ATTENTION = "attn_implementation of transformers, for example sdpa (default: chosen by transformers)"


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """Precision, device and attention of a model that is used for inference only."""

    dtype: Dtype = option("float32", "dtype of weights and activations, without autocast")
    device: str | None = option(None, "torch device, such as cuda:1 (default: a GPU if there is one)", metavar="NAME")
    attention: str | None = option(None, _ATTENTION, metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class FineTuneOptions:
    """Model, data, grid and protocol of the fine-tuning runs of GLUE, NER and classification."""

    model: Path = option(help=_MODEL, metavar="DIR")
    data_dir: Path = option(help="folder with a folder of data files for each task", metavar="DIR")
    output: Path = option(help=_OUTPUT, metavar="DIR")
    tasks: tuple[str, ...] = option((), "datasets to run (default: all)", metavar="NAME")
    batch_size: tuple[int, ...] = option((), "batch sizes to try, instead of the grid's", minimum=1)
    learning_rate: tuple[float, ...] = option((), "learning rates to try, instead of the grid's", minimum=0)
    weight_decay: tuple[float, ...] = option((), "weight decays to try, instead of the grid's", minimum=0)
    seeds: tuple[int, ...] = option((0,), "random seeds of the head, the data order and dropout", minimum=0)
    epochs: int = option(10, "maximum number of epochs", minimum=1)
    max_length: int = option(1024, "truncate inputs to N tokens", minimum=SHORTEST_INPUT)
    limit: int | None = option(None, "use only N rows of every split, for a quick look", minimum=1)
    jobs: int = option(1, "number of runs in parallel, one GPU each", minimum=1)
    dtype: Dtype = option("float32", "autocast dtype; weights stay float32; the paper's code uses float16")
    device: Literal["cpu", "cuda"] | None = option(None, "device (default: cuda if there is a GPU)")
    attention: str | None = option(None, _ATTENTION, metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class GlueOptions(FineTuneOptions):
    tasks: tuple[str, ...] = option((), "tasks to run (default: all)", choices=GLUE_TASKS, metavar="NAME")
    grid: Literal["paper", "small", "best"] = option(
        "best", "paper: the paper's 60 points; small: the 6 points of its ablations; best: NeoBERT's best point"
    )
    no_transfer: bool = option(False, "start RTE, MRPC, STS-B and QNLI from --model, not from the best MNLI model")


@dataclass(frozen=True, kw_only=True)
class NerOptions(FineTuneOptions):
    grid: Literal["paper", "small"] = option("small", "paper: GLUE's 60 points; small: the 6 points of its ablations")


@dataclass(frozen=True, kw_only=True)
class ClassifyOptions(NerOptions):
    data_dir: Path = option(
        help="folder with NAME.csv, .jsonl or .parquet (columns text and label) or a folder NAME with train.csv for "
        "each dataset",
        metavar="DIR",
    )


@dataclass(frozen=True, kw_only=True)
class PerplexityOptions(ComputeOptions):
    model: tuple[Path, ...] = option(help=_MODEL, metavar="DIR")
    data: tuple[str, ...] = option(
        help="Parquet, Arrow, JSON lines or text files; folders and globs, too", metavar="FILE"
    )
    text_key: str = option("content", "column or JSON key of the text", metavar="KEY")
    output: Path = option(help=_OUTPUT, metavar="DIR")
    positions_per_doc: int | None = option(None, "mask N random tokens of each document (default: all)", minimum=1)
    max_length: int | None = option(
        None, "truncate documents to N tokens (default: the model's limit)", minimum=SHORTEST_INPUT
    )
    min_length: int = option(16, "skip documents with fewer tokens", minimum=1)
    limit: int | None = option(None, "use only the first N documents", minimum=1)
    seed: int = option(0, "random seed of --positions-per-doc")
    batch_tokens: int = option(8192, "maximum number of tokens per batch", minimum=1)


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(ComputeOptions):
    model: tuple[Path, ...] = option(help=_MODEL, metavar="DIR")
    output: Path = option(help=_OUTPUT, metavar="DIR")
    lengths: tuple[int, ...] = option(THROUGHPUT_LENGTHS, "document lengths in tokens", minimum=1)
    batch_sizes: tuple[int, ...] = option(tuple(2**power for power in range(10)), "batch sizes in documents", minimum=1)
    steps: int = option(20, "timed steps per length and batch size", minimum=1)
    warmup: int = option(3, "untimed steps before the timed steps", minimum=1)


@dataclass(frozen=True, kw_only=True)
class MtebTasks:
    """Options that choose mteb's tasks."""

    benchmark: str = option(MTEB_PAPER, "benchmark of mteb; all its tasks are used", metavar="NAME")
    tasks: tuple[str, ...] = option((), "tasks of mteb instead of a benchmark", metavar="NAME")
    languages: tuple[str, ...] = option(("eng",), "languages of --tasks as ISO 639-3 codes", metavar="CODE")


@dataclass(frozen=True, kw_only=True)
class MtebOptions(MtebTasks, ComputeOptions):
    model: Path = option(help=_MODEL, metavar="DIR")
    output: Path = option(help=_OUTPUT, metavar="DIR")
    data_dir: Path = option(help="output folder of neobert fetch mteb", metavar="DIR")
    skip_missing: bool = option(False, "skip tasks without data and list them in the table")
    instructions: str = option(
        "none", "YAML file of instructions, or the recipe evaluation/mteb_instructions", metavar="FILE"
    )
    prompt_style: Literal["prefix", "paper"] = option(
        "prefix",
        "prefix: instruction, space, text (not for documents); paper: instruction [SEP] [CLS] text, for documents too",
    )
    max_length: int = option(1024, "truncate texts to N tokens", minimum=SHORTEST_INPUT)
    batch_size: int = option(32, "texts per batch", minimum=1)


@dataclass(frozen=True, kw_only=True)
class EmbedderOptions:
    model: Path = option(help=_MODEL, metavar="DIR")
    data_dir: Path = option(
        help="folder with KEY.parquet or KEY.jsonl (columns query, positive, negatives) for each dataset", metavar="DIR"
    )
    config: str | None = option(
        None,
        "YAML file of settings and datasets, or the recipe evaluation/contrastive (default: all files)",
        metavar="FILE",
    )
    output: Path = option(help=_OUTPUT, metavar="DIR")
    steps: int | None = option(None, "number of training steps, instead of the value in FILE", minimum=1)
    batch_size: int | None = option(None, "pairs per process before divisors, instead of the value in FILE", minimum=1)
    limit: int | None = option(None, "use only the first N pairs of each dataset, for a quick look", minimum=1)
    gradient_cache: int | None = option(
        None,
        "compute N texts at a time and cache gradients: large batches in little memory, about half as fast",
        minimum=1,
    )
    seed: int = option(0, "random seed of new layers, the data order and dropout")
    dtype: Literal["float32", "bfloat16"] | None = option(
        None, "compute dtype; weights stay float32 (default: bfloat16 on GPUs, float32 on CPUs)"
    )
    device: Literal["cpu", "cuda"] | None = option(None, "device (default: cuda if there is a GPU)")
    attention: str | None = option(None, _ATTENTION, metavar="NAME")


Options = TypeVar("Options", bound=FineTuneOptions | MtebOptions | EmbedderOptions)


def with_local_model(options: Options, remedy: str) -> Options:
    """Return the options with `model` replaced by a local folder, which may be in the Hub's cache. Go offline.

    Raise MissingInputError if the model or --data-dir does not exist. `remedy` is part of the message for --data-dir.
    """
    require_folder("--data-dir", options.data_dir, remedy=remedy)
    options = replace(options, model=find_model("--model", options.model))
    go_offline()
    return options
