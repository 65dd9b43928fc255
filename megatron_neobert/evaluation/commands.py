"""Evaluation commands. Each command checks its folders before it imports torch, which takes seconds.

`fetch mteb` writes each task whole or not at all, and keeps an existing one. The same command therefore resumes an
interrupted download. If one download fails, the command continues with the next one.
"""

import os
import sys
from dataclasses import replace
from importlib import import_module
from typing import TypeVar

from megatron_neobert.errors import MissingInputError, OutputError, short_reason
from megatron_neobert.evaluation.options import (
    FETCH_GLUE,
    ClassifyOptions,
    EmbedderOptions,
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
from megatron_neobert.runtime.atomic_files import require_folder
from megatron_neobert.text import counted

_Options = TypeVar("_Options", bound=FineTuneOptions | MtebOptions | EmbedderOptions)


def evaluate_glue(options: GlueOptions) -> None:
    """Fine-tune and evaluate an encoder on GLUE with the paper's protocol, from local files.

    Write OUTPUT/MODEL/glue.json and glue.md, and print glue.md.
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
    """
    options = replace(options, model=tuple(find_models(options.model).values()))
    go_offline()
    from megatron_neobert.evaluation.pseudo_perplexity import run_perplexity

    run_perplexity(options)


def evaluate_throughput(options: ThroughputOptions) -> None:
    """Measure the tokens per second of encoders as a function of document length and batch size.

    Write OUTPUT/MODEL/throughput.json for each model, and OUTPUT/throughput.md and .png for all models. Print the .md.
    """
    options = replace(options, model=tuple(find_models(options.model).values()))
    go_offline()
    from megatron_neobert.evaluation.throughput import run_throughput

    run_throughput(options)


def evaluate_mteb(options: MtebOptions) -> None:
    """Evaluate an encoder on MTEB, without network access."""
    options = _prepare(options, "on a machine with network: neobert fetch mteb --output DIR")
    from megatron_neobert.evaluation.mteb import run_mteb

    run_mteb(options)


def train_embedder(options: EmbedderOptions) -> None:
    """Fine-tune an encoder for embeddings with a contrastive loss, as NeoBERT's paper does before MTEB."""
    options = _prepare(options, "create it, with KEY.parquet or KEY.jsonl for each dataset")
    from megatron_neobert.evaluation.embed import run_contrastive

    run_contrastive(options)


def report(options: ReportOptions) -> None:
    """Write one page with all results, next to the paper's numbers.

    Write OUTPUT/report.md and its figures.
    """
    for folder in options.results:
        require_folder("--results", folder, remedy="name the --output of an evaluation")
    from megatron_neobert.evaluation.report import write_report

    records = write_report(options.results, options.output)
    print(f"wrote {options.output / 'report.md'} from {counted(len(records), 'record')}")


def fetch_mteb(options: FetchMtebOptions) -> None:
    """Download the data of MTEB tasks, for machines without network access.

    Write OUTPUT/NAME/REVISION, unless it exists, and print a line for each task. REVISION is that of the installed
    mteb.

    Raises:
        MissingInputError: A download failed. The other tasks were still fetched.
        OutputError: The folder cannot be created.
    """
    from megatron_neobert.evaluation.mteb_tasks import choose_tasks, flatten, folder_of, store_task

    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
    chosen = flatten(choose_tasks(options.benchmark, options.tasks, options.languages))
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{options.output}: cannot be created ({error.strerror}); name another folder.") from error
    failed = []
    for number, task in enumerate(chosen, start=1):
        name, state = task.metadata.name, "already fetched"
        if not folder_of(options.output, task).is_dir():
            try:
                store_task(options.output, task)
                state = "fetched"
            except Exception as error:  # several libraries raise errors of their own
                state = f"failed ({short_reason(error)})"
                failed.append(name)
        print(f"{number}/{len(chosen)} {name}: {state}", flush=True)
    if failed:
        raise MissingInputError(
            f"{options.output}: {len(failed)} of {len(chosen)} could not be fetched ({', '.join(failed)}). The reasons "
            "are above; run the same command again on a machine with network."
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
    module = import_module(f"megatron_neobert.evaluation.{kind}")
    folder = getattr(module, f"run_{kind}")(options)
    print((folder / f"{kind}.md").read_text(encoding="utf-8"))
    print(f"wrote {folder / kind}.json and .md")


def go_offline() -> None:
    """Set HF_HUB_OFFLINE and HF_DATASETS_OFFLINE. Hugging Face libraries, even if imported, then stay offline."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    # These modules read the variables only once, when they are imported.
    for name in ("huggingface_hub.constants", "datasets.config"):
        if name in sys.modules:
            sys.modules[name].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
