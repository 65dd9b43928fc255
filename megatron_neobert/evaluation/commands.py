"""Evaluation commands. Each command checks its folders before it imports torch, which takes seconds.

A command that fetches data writes each dataset or task whole or not at all, and keeps an existing one. The same command
therefore resumes an interrupted download. If one download fails, the command continues with the next one.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from megatron_neobert.config.recipes import find_config
from megatron_neobert.errors import ConfigError, MissingInputError, OutputError, short_reason
from megatron_neobert.evaluation.options import (
    FETCH_GLUE,
    ClassifyOptions,
    ContrastiveOptions,
    FetchContrastiveOptions,
    FetchMtebOptions,
    FineTuneOptions,
    GlueOptions,
    MtebOptions,
    NerOptions,
    PerplexityOptions,
    ReportOptions,
    ThroughputOptions,
)
from megatron_neobert.huggingface.hub import find_model, find_models
from megatron_neobert.runtime.atomic_files import replacing, require_folder
from megatron_neobert.text import counted

_Options = TypeVar("_Options", bound=FineTuneOptions | MtebOptions | ContrastiveOptions)

_FETCH = "on a machine with network: neobert fetch"


def evaluate_glue(options: GlueOptions) -> None:
    """Fine-tune and evaluate an encoder on GLUE with the paper's protocol, from local files.

    Write OUTPUT/MODEL/glue.json and glue.md, and print glue.md. Raises a NeoBERTError if an input cannot be used.
    """
    _fine_tune(options, "glue", FETCH_GLUE)


def evaluate_ner(options: NerOptions) -> None:
    """Fine-tune and evaluate an encoder on named-entity recognition, from CoNLL files or the Hub's."""
    _fine_tune(options, "ner", "create it, with one folder per dataset")


def evaluate_classify(options: ClassifyOptions) -> None:
    """Fine-tune and evaluate an encoder on your own texts and labels, from CSV, JSON lines or Parquet files."""
    _fine_tune(options, "classify", "create it, with NAME.csv for each dataset")


def evaluate_ppl(options: PerplexityOptions) -> None:
    """Measure the pseudo-perplexity of encoders as a function of document length.

    Write OUTPUT/MODEL/pseudo_perplexity.json for each model, and OUTPUT/pseudo_perplexity.md and .png for all models.
    Raises a NeoBERTError if an input cannot be used.
    """
    options = replace(options, model=tuple(find_models(options.model).values()))
    go_offline()
    from megatron_neobert.evaluation.pseudo_perplexity import evaluate

    evaluate(options)


def evaluate_throughput(options: ThroughputOptions) -> None:
    """Measure the tokens per second of encoders as a function of document length and batch size.

    Write OUTPUT/MODEL/throughput.json for each model, and OUTPUT/throughput.md and .png for all models. Print the .md.
    Raises a NeoBERTError if an input cannot be used.
    """
    options = replace(options, model=tuple(find_models(options.model).values()))
    go_offline()
    from megatron_neobert.evaluation.throughput import evaluate

    evaluate(options)


def evaluate_mteb(options: MtebOptions) -> None:
    """Evaluate an encoder on MTEB, without network access."""
    options = _prepare(options, f"{_FETCH} mteb --output DIR")
    from megatron_neobert.evaluation import mteb

    mteb.evaluate_mteb(options)


def finetune(options: ContrastiveOptions) -> None:
    """Fine-tune an encoder for embeddings with a contrastive loss, as NeoBERT's paper does before MTEB."""
    options = _prepare(options, f"{_FETCH} contrastive --data-dir DIR")
    from megatron_neobert.evaluation.embed import finetune

    finetune(options)


def report(options: ReportOptions) -> None:
    """Write one page with all results, next to the paper's numbers.

    Write OUTPUT/report.md and its figures. Raises MissingInputError if a folder does not exist or there are no records,
    and DataError if a record is invalid.
    """
    for folder in options.results:
        require_folder("--results", folder, remedy="name the --output of an evaluation")
    from megatron_neobert.evaluation.report import write_report

    records = write_report(options.results, options.output)
    print(f"wrote {options.output / 'report.md'} from {counted(len(records), 'record')}")


def fetch_contrastive(options: FetchContrastiveOptions) -> None:
    """Download the datasets of contrastive fine-tuning as Parquet files, for machines without network access.

    Write DATA_DIR/KEY.parquet, unless it exists, and print a line for each of `options.datasets`. If the option
    is empty, all datasets whose `default` in the YAML file is true are fetched.

    Raises:
        ConfigError: The YAML file is invalid, lacks a requested dataset, or has no `hub` for a dataset.
        MissingInputError: There is no YAML file; or a download failed, and the others were still fetched.
        OutputError: The folder cannot be created.
    """
    from megatron_neobert.evaluation.embed_data import fetch_pairs, read_config

    config = read_config(find_config(options.config))
    keys = options.datasets or [key for key, source in config.datasets.items() if source.default]
    if without_hub := [key for key in keys if key not in config.datasets or config.datasets[key].hub is None]:
        raise ConfigError(
            f"{options.config} has no hub for {', '.join(without_hub)}; add one, or write KEY.parquet yourself with "
            "the columns query, positive and negatives."
        )

    def fetch(key: str) -> str:
        path, source = options.data_dir / f"{key}.parquet", config.datasets[key]
        if path.exists():
            return f"kept {path}"
        pairs = fetch_pairs(key, source)
        with replacing(path) as temporary:
            pairs.to_parquet(str(temporary))
        return f"wrote {path}, {len(pairs):,} pairs from {source.hub}"

    fetch_all(options.data_dir, keys, fetch)


def fetch_mteb(options: FetchMtebOptions) -> None:
    """Download the data of MTEB tasks, for machines without network access.

    Write OUTPUT/NAME/REVISION, unless it exists, and print a line for each task. REVISION is that of the installed
    mteb.

    Raises:
        ConfigError: A task is repeated, or mteb has no such task, benchmark or language.
        MissingInputError: A download failed. The other tasks were still fetched.
        OutputError: The folder cannot be created.
    """
    from megatron_neobert.evaluation.mteb_tasks import choose_tasks, flatten, folder_of, store_task

    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
    chosen = flatten(choose_tasks(options.benchmark, options.tasks, options.languages))
    tasks = {task.metadata.name: task for task in chosen}

    def fetch(name: str) -> str:
        if folder_of(options.output, tasks[name]).is_dir():
            return "already fetched"
        store_task(options.output, tasks[name])
        return "fetched"

    fetch_all(options.output, list(tasks), fetch)


def fetch_all(output: Path, names: Sequence[str], fetch: Callable[[str], str]) -> None:
    """Call `fetch` for every name, and print one line per name. After a failure, the remaining names are still fetched.

    Args:
        output: Folder to create. It may exist.
        fetch: Downloads one dataset or task, and returns the text to print. Any exception is a failed download.

    Raises:
        OutputError: The folder cannot be created.
        MissingInputError: A download failed. Raised after the last name; the reasons were printed.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{output}: cannot be created ({error.strerror}); name another folder.") from error
    failed = []
    for number, name in enumerate(names, start=1):
        try:
            print(f"{number}/{len(names)} {name}: {fetch(name)}", flush=True)
        except Exception as error:  # a dozen libraries raise errors of their own
            print(f"{number}/{len(names)} {name}: failed ({short_reason(error)})", flush=True)
            failed.append(name)
    if failed:
        raise MissingInputError(
            f"{output}: {len(failed)} of {len(names)} could not be fetched ({', '.join(failed)}). The reasons are "
            "above; run the same command again on a machine with network."
        )


def _prepare(options: _Options, remedy: str) -> _Options:
    """Return the options with a local folder as model, after checking that it and --data-dir exist. Go offline."""
    require_folder("--data-dir", options.data_dir, remedy=remedy)
    options = replace(options, model=find_model("--model", options.model))
    go_offline()
    return options


def _fine_tune(options: FineTuneOptions, kind: str, remedy: str) -> None:
    """Run the evaluation in the module `kind`; print its page, and the names of the files that it wrote."""
    options = _prepare(options, remedy)
    folder = import_module(f"megatron_neobert.evaluation.{kind}").evaluate(options)
    print((folder / f"{kind}.md").read_text(encoding="utf-8"))
    print(f"wrote {folder / kind}.json and .md")


def go_offline() -> None:
    """Set HF_HUB_OFFLINE and HF_DATASETS_OFFLINE. Hugging Face libraries, even if imported, then stay offline."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    # These modules read the variables only once, when they are imported.
    for name in ("huggingface_hub.constants", "datasets.config"):
        if name in sys.modules:
            sys.modules[name].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
