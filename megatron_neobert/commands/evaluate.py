"""The commands `neobert evaluate ...`. Each checks its folders before it imports torch, which takes seconds."""

from dataclasses import replace
from importlib import import_module

from megatron_neobert.evaluation.options import (
    FETCH_GLUE,
    ClassifyOptions,
    FineTuneOptions,
    GlueOptions,
    MtebOptions,
    NerOptions,
    PerplexityOptions,
    ThroughputOptions,
    with_local_model,
)
from megatron_neobert.huggingface.hub import find_models, go_offline


def evaluate_glue(options: GlueOptions) -> None:
    """Fine-tune and evaluate an encoder on GLUE with the paper's protocol, from local files.

    Write OUTPUT/MODEL/glue.json and glue.md, and print glue.md.
    """
    _fine_tune(with_local_model(options, FETCH_GLUE), "glue")


def evaluate_ner(options: NerOptions) -> None:
    """Fine-tune and evaluate an encoder on named-entity recognition, from CoNLL files or the Hub's."""
    _fine_tune(with_local_model(options, "create it, with one folder per dataset"), "ner")


def evaluate_classify(options: ClassifyOptions) -> None:
    """Fine-tune and evaluate an encoder on your own texts and labels, from CSV, JSON lines or Parquet files."""
    options = with_local_model(options, "create it, with NAME.csv for each dataset")
    from megatron_neobert.evaluation.classify_data import read_datasets

    for _ in read_datasets(options):  # fails before torch is imported
        pass
    _fine_tune(options, "classify")


def evaluate_ppl(options: PerplexityOptions) -> None:
    """Measure the pseudo-perplexity of encoders as a function of document length.

    Write OUTPUT/MODEL/pseudo_perplexity.json for each model, and OUTPUT/pseudo_perplexity.md and .png for all models.
    """
    options = replace(options, model=tuple(find_models(options.model).values()))
    go_offline()
    from megatron_neobert.evaluation.texts import require_texts

    require_texts(options)  # fails before torch is imported
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
    options = with_local_model(options, "on a machine with network: neobert fetch mteb --output DIR")
    from megatron_neobert.evaluation.mteb import run_mteb

    run_mteb(options)


def _fine_tune(options: FineTuneOptions, kind: str) -> None:
    """Run the evaluation in the module `kind`. Print the Markdown page and the names of the written files."""
    module = import_module(f"megatron_neobert.evaluation.{kind}")
    folder = getattr(module, f"run_{kind}")(options)
    print((folder / f"{kind}.md").read_text(encoding="utf-8"))
    print(f"wrote {folder / kind}.json and .md")
