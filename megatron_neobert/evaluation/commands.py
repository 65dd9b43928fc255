"""Evaluation commands. Each command checks its folders before it imports torch, which takes seconds."""

import os
import sys
from pathlib import Path

from megatron_neobert.evaluation.options import (
    FETCH_GLUE,
    ContrastiveOptions,
    GlueOptions,
    MtebOptions,
    NerOptions,
    PerplexityOptions,
    ReportOptions,
    ThroughputOptions,
)
from megatron_neobert.runtime.atomic_files import name_models, require_folder
from megatron_neobert.text import counted

_FETCH = "on a machine with network: neobert fetch"


def evaluate_glue(options: GlueOptions) -> None:
    """Fine-tune and evaluate an encoder on GLUE with the paper's protocol, from local files.

    Write OUTPUT/MODEL/glue.json and glue.md, and print glue.md. Raises a NeoBERTError if an input cannot be used.
    """
    _prepare(options.model, options.data_dir, FETCH_GLUE)
    from megatron_neobert.evaluation.glue import evaluate

    _print_page(evaluate(options), "glue")


def evaluate_ner(options: NerOptions) -> None:
    """Fine-tune and evaluate an encoder on named-entity recognition, from CoNLL files or the Hub's."""
    _prepare(options.model, options.data_dir, "create it, with one folder per dataset")
    from megatron_neobert.evaluation.ner import evaluate

    _print_page(evaluate(options), "ner")


def evaluate_ppl(options: PerplexityOptions) -> None:
    """Measure the pseudo-perplexity of encoders as a function of document length.

    Write OUTPUT/MODEL/pseudo_perplexity.json for each model, and OUTPUT/pseudo_perplexity.md and .png for all models.
    Raises a NeoBERTError if an input cannot be used.
    """
    name_models(options.model)
    go_offline()
    from megatron_neobert.evaluation.pseudo_perplexity import evaluate

    evaluate(options)


def evaluate_throughput(options: ThroughputOptions) -> None:
    """Measure the tokens per second of encoders as a function of document length and batch size.

    Write OUTPUT/MODEL/throughput.json for each model, and OUTPUT/throughput.md and .png for all models. Print the .md.
    Raises a NeoBERTError if an input cannot be used.
    """
    name_models(options.model)
    go_offline()
    from megatron_neobert.evaluation.throughput import evaluate

    evaluate(options)


def evaluate_mteb(options: MtebOptions) -> None:
    """Evaluate an encoder on MTEB, without network access."""
    _prepare(options.model, options.data_dir, f"{_FETCH} mteb --output DIR")
    from megatron_neobert.evaluation.mteb import evaluate

    evaluate(options)


def finetune(options: ContrastiveOptions) -> None:
    """Fine-tune an encoder for embeddings with a contrastive loss, as NeoBERT's paper does before MTEB."""
    _prepare(options.model, options.data_dir, f"{_FETCH} contrastive --data-dir DIR")
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


def _prepare(model: Path, data_dir: Path, remedy: str) -> None:
    """Check that both folders exist, and disable network access."""
    require_folder("--model", model, holding="config.json")
    require_folder("--data-dir", data_dir, remedy=remedy)
    go_offline()


def _print_page(folder: Path, kind: str) -> None:
    """Print the page with the results of an evaluation, and the names of the files it wrote."""
    print((folder / f"{kind}.md").read_text(encoding="utf-8"))
    print(f"wrote {folder / kind}.json and .md")


def go_offline() -> None:
    """Set HF_HUB_OFFLINE and HF_DATASETS_OFFLINE. Hugging Face libraries, even if imported, then stay offline."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    # These modules read the variables only once, when they are imported.
    for name in ("huggingface_hub.constants", "datasets.config"):
        if name in sys.modules:
            sys.modules[name].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
