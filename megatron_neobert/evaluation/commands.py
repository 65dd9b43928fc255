"""The commands of evaluations; each checks its folders before the seconds that importing torch takes."""

import os
import sys
from pathlib import Path

from megatron_neobert.evaluation.options import (
    FETCH_GLUE,
    FinetuneOptions,
    GlueOptions,
    MtebOptions,
    NerOptions,
    PerplexityOptions,
    ReportOptions,
    ThroughputOptions,
    choose_glue_tasks,
)
from megatron_neobert.runtime.atomic_files import name_models, require_folder

_FETCH = "on a machine with network: neobert fetch"


def evaluate_glue(options: GlueOptions) -> None:
    """Fine-tune and measure on GLUE by the paper's protocol, from local files."""
    choose_glue_tasks(options.tasks)
    _prepare(options.model, options.data_dir, FETCH_GLUE)
    from megatron_neobert.evaluation.glue import evaluate

    folder = evaluate(options)
    print((folder / "glue.md").read_text(encoding="utf-8"))
    print(f"wrote {folder / 'glue.json'} and .md")


def evaluate_ner(options: NerOptions) -> None:
    """Fine-tune and measure named-entity recognition, from CoNLL-style files or the Hub's."""
    _prepare(options.model, options.data_dir, "make a folder for each data set in it")
    from megatron_neobert.evaluation.ner import evaluate

    folder = evaluate(options)
    print((folder / "ner.md").read_text(encoding="utf-8"))
    print(f"wrote {folder / 'ner.json'} and .md")


def evaluate_ppl(options: PerplexityOptions) -> None:
    """Measure the pseudo-perplexity of encoders against the length of texts."""
    name_models(options.model)
    go_offline()
    from megatron_neobert.evaluation.pseudo_perplexity import evaluate

    evaluate(options)


def evaluate_throughput(options: ThroughputOptions) -> None:
    """Measure tokens per second of encoders against the length of documents and the batch size."""
    name_models(options.model)
    go_offline()
    from megatron_neobert.evaluation.throughput import evaluate

    evaluate(options)


def evaluate_mteb(options: MtebOptions) -> None:
    """Evaluate an encoder on MTEB, or on tasks from your own files, without a network."""
    _prepare(options.model, options.data_dir, f"{_FETCH} mteb --output DIR")
    from megatron_neobert.evaluation.mteb import evaluate

    evaluate(options)


def finetune(options: FinetuneOptions) -> None:
    """Fine-tune an encoder contrastively for embeddings, as NeoBERT's paper does before MTEB."""
    _prepare(options.model, options.data_dir, f"{_FETCH} contrastive --data-dir DIR")
    from megatron_neobert.evaluation.embed import finetune

    finetune(options)


def report(options: ReportOptions) -> None:
    """Put all results on one page, beside the paper's numbers."""
    for folder in options.results:
        require_folder("--results", folder, remedy="name the --output of an evaluation")
    from megatron_neobert.evaluation.report import write_report

    runs = write_report(options.results, options.output)
    print(f"wrote {options.output / 'report.md'} from {len(runs)} records")


def _prepare(model: Path, data_dir: Path, remedy: str) -> None:
    require_folder("--model", model, holding="config.json")
    require_folder("--data-dir", data_dir, remedy=remedy)
    go_offline()


def go_offline() -> None:
    """Have the Hugging Face libraries of this process read local files alone, whether they are imported yet or not."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    for name in ("huggingface_hub.constants", "datasets.config"):  # which read the variables once
        if name in sys.modules:
            sys.modules[name].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
