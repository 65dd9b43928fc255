"""The command lines of all evaluations: one dataclass of options each. Imports neither torch nor datasets."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_neobert.cli import option
from megatron_neobert.errors import ConfigError
from megatron_neobert.evaluation.paper import MTEB_PAPER

Dtype = Literal["float32", "bfloat16", "float16"]
GLUE_TASKS = ("mnli", "qnli", "qqp", "rte", "sst2", "mrpc", "cola", "stsb")
FETCH_GLUE = "on a machine with network: hf download nyu-mll/glue --repo-type dataset --local-dir DIR"
LENGTHS = (512, 1024, 2048, 4096, 8192)
BATCH_SIZES = tuple(2**power for power in range(10))

_MODEL = "Hugging Face folder of an encoder"
_OUTPUT = "folder for the results"
_ATTENTION = "transformers' attn_implementation, such as sdpa; without it transformers' choice"


def choose_glue_tasks(names: Sequence[str]) -> list[str]:
    """Return the tasks of these names, as GLUE_TASKS spells them.

    Raises:
        ConfigError: There is no such task.
    """
    chosen = list(dict.fromkeys(name.lower().replace("-", "") for name in names))
    if unknown := [name for name in chosen if name not in GLUE_TASKS]:
        raise ConfigError(f"--tasks {' '.join(unknown)}: GLUE's tasks are {', '.join(GLUE_TASKS)}.")
    return chosen


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """Precision, device and attention of a model that is only read."""

    dtype: Dtype = option("float32", "of weights and activations, without autocast")
    device: str | None = option(None, "such as cpu or cuda:1; without it the GPU where there is one", metavar="NAME")
    attention: str | None = option(None, _ATTENTION, metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class FineTuneOptions:
    """Model, data, grid and protocol of fine-tunings."""

    model: Path = option(help=_MODEL, metavar="DIR")
    data_dir: Path = option(help="a folder per task, of text files or parquet", metavar="DIR")
    output: Path = option(help=_OUTPUT, metavar="DIR")
    tasks: tuple[str, ...] = option((), "tasks or data sets; without it all", metavar="NAME")
    batch_size: tuple[int, ...] = option((), "replaces the grid's", minimum=1)
    learning_rate: tuple[float, ...] = option((), "replaces the grid's", minimum=0)
    weight_decay: tuple[float, ...] = option((), "replaces the grid's", minimum=0)
    seeds: tuple[int, ...] = option((0,), "of head, order and dropout", minimum=0)
    epochs: int = option(10, "at most", minimum=1)
    max_length: int = option(1024, "truncate inputs after N tokens", minimum=1)
    limit: int | None = option(None, "only N rows of every split, for a quick look", minimum=1)
    jobs: int = option(1, "runs at a time, on one GPU each", minimum=1)
    dtype: Dtype = option("float32", "of the passes; weights stay float32; the paper's code took float16")
    device: Literal["cpu", "cuda"] | None = option(None, "without it cuda where there is one")
    attention: str | None = option(None, _ATTENTION, metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class GlueOptions(FineTuneOptions):
    """The command line of `neobert evaluate glue`."""

    grid: Literal["paper", "small", "best"] = option(
        "best", "paper: 60 points; small: the 6 of its ablations; best: the one that it found best for its model"
    )
    no_transfer: bool = option(False, "start RTE, MRPC, STS-B and QNLI from --model, not from the best MNLI model")


@dataclass(frozen=True, kw_only=True)
class NerOptions(FineTuneOptions):
    """The command line of `neobert evaluate ner`."""

    grid: Literal["paper", "small"] = option("small", "paper: GLUE's 60 points; small: the 6 of its ablations")


@dataclass(frozen=True, kw_only=True)
class PerplexityOptions(ComputeOptions):
    """The command line of `neobert evaluate ppl`."""

    model: tuple[Path, ...] = option(help="Hugging Face folders", metavar="DIR")
    data: tuple[str, ...] = option(help="parquet, Arrow, JSON or text; globs and folders as well", metavar="FILE")
    text_key: str = option("content", "column or key of the text", metavar="KEY")
    output: Path = option(help=_OUTPUT, metavar="DIR")
    positions_per_doc: int | None = option(None, "mask N drawn tokens of each document; without it all", minimum=1)
    max_length: int | None = option(
        None, "truncate documents after N tokens; without it after the model's longest input", minimum=1
    )
    min_length: int = option(16, "leave out documents with fewer tokens", minimum=1)
    limit: int | None = option(None, "only the first N documents", minimum=1)
    seed: int = option(0, "of --positions-per-doc")
    batch_tokens: int = option(8192, "of one batch, at most", minimum=1)


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(ComputeOptions):
    """The command line of `neobert evaluate throughput`."""

    model: tuple[Path, ...] = option(help="Hugging Face folders of encoders", metavar="DIR")
    output: Path = option(help=_OUTPUT, metavar="DIR")
    lengths: tuple[int, ...] = option(LENGTHS, "tokens of a document", minimum=1)
    batch_sizes: tuple[int, ...] = option(BATCH_SIZES, "documents of a batch", minimum=1)
    steps: int = option(20, "timed, of each", minimum=1)
    warmup: int = option(3, "steps before, not timed", minimum=1)


@dataclass(frozen=True, kw_only=True)
class MtebOptions(ComputeOptions):
    """The command line of `neobert evaluate mteb`."""

    model: Path = option(help=_MODEL, metavar="DIR")
    output: Path = option(help=_OUTPUT, metavar="DIR")
    data_dir: Path = option(help="what neobert fetch mteb wrote, and folders of local tasks", metavar="DIR")
    benchmark: str = option(MTEB_PAPER, "any benchmark of mteb, with all its tasks", metavar="NAME")
    tasks: tuple[str, ...] = option(
        (), "these tasks instead; local:NAME reads the files of DATA_DIR/NAME", metavar="NAME"
    )
    languages: tuple[str, ...] = option(("eng",), "of --tasks, as ISO 639-3 codes", metavar="CODE")
    skip_missing: bool = option(False, "evaluate the tasks whose data is there; the others are named")
    instructions: str = option(
        "none", "YAML with a text per task or type, or a recipe, evaluation/mteb_instructions", metavar="FILE"
    )
    prompt_style: Literal["prefix", "paper"] = option(
        "prefix",
        "prefix: instruction, space, text; not before documents. paper: instruction [SEP] [CLS] text, before documents "
        "too",
    )
    max_length: int = option(1024, "truncate texts after N tokens", minimum=1)
    batch_size: int = option(32, "texts at once", minimum=1)


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """The command line of `neobert finetune`."""

    model: Path = option(help=_MODEL, metavar="DIR")
    config: str = option(help="settings and datasets, or a recipe: evaluation/contrastive", metavar="FILE")
    data_dir: Path = option(help="KEY.parquet or KEY.jsonl for each dataset", metavar="DIR")
    output: Path = option(help=_OUTPUT, metavar="DIR")
    steps: int | None = option(None, "instead of the file's", minimum=1)
    batch_size: int | None = option(None, "instead of the file's: pairs per process, before divisors", minimum=1)
    limit: int | None = option(None, "first N pairs of each dataset: a quick look", minimum=1)
    gradient_cache: int | None = option(
        None,
        "compute N texts at a time and cache gradients: large batches in little memory, about half as fast",
        minimum=1,
    )
    seed: int = option(0, "of head, order and dropout")
    dtype: Literal["float32", "bfloat16"] | None = option(
        None, "to compute in; weights stay float32; without it bfloat16 on GPUs, else float32"
    )
    device: Literal["cpu", "cuda"] | None = option(None, "without it a GPU if there is one")
    attention: str | None = option(None, _ATTENTION, metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class FetchContrastiveOptions:
    """The command line of `neobert fetch contrastive`."""

    config: str = option(help="as for neobert finetune", metavar="FILE")
    data_dir: Path = option(help="folder to write to", metavar="DIR")
    datasets: tuple[str, ...] = option((), "without it all but those with default: false", metavar="KEY")


@dataclass(frozen=True, kw_only=True)
class FetchMtebOptions:
    """The command line of `neobert fetch mteb`."""

    output: Path = option(help="folder to fill", metavar="DIR")
    benchmark: str = option(MTEB_PAPER, "any benchmark of mteb, with all its tasks", metavar="NAME")
    tasks: tuple[str, ...] = option((), "these tasks of mteb instead", metavar="NAME")
    languages: tuple[str, ...] = option(("eng",), "of --tasks, as ISO 639-3 codes", metavar="CODE")


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The command line of `neobert report`."""

    results: tuple[Path, ...] = option(help="--output of evaluations", metavar="DIR")
    output: Path = option(help="folder to write to; may exist", metavar="DIR")
