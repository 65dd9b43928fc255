"""The commands of evaluations; each checks its folders before the seconds that importing torch takes."""

from pathlib import Path

from megatron_neobert.evaluation.options import (
    FetchContrastiveOptions,
    FetchGlueOptions,
    FetchMtebOptions,
    FinetuneOptions,
    GlueOptions,
    MtebOptions,
    NerOptions,
    PerplexityOptions,
    ReportOptions,
    ThroughputOptions,
    choose_glue_tasks,
)
from megatron_neobert.huggingface.offline import go_offline
from megatron_neobert.runtime.atomic_files import name_models, require_folder
from megatron_neobert.text import visible

_FETCH = "on a machine with network: neobert fetch"


def evaluate_glue(options: GlueOptions) -> None:
    """Fine-tune and measure on GLUE by the paper's protocol, from local files.

    Every point of the grid is run with every seed. Writes OUTPUT/MODEL/glue.json and .md, the latter with the
    paper's rows below. RTE, MRPC, STS-B and QNLI start from the best MNLI model. Started again, it resumes with the
    runs that are not done.
    """
    choose_glue_tasks(options.tasks)
    _prepare(options.model, options.data_dir, f"{_FETCH} glue --output DIR")
    from megatron_neobert.evaluation.glue import evaluate

    folder = evaluate(options)
    print((folder / "glue.md").read_text(encoding="utf-8"))
    print(f"wrote {folder / 'glue.json'} and .md")


def evaluate_ner(options: NerOptions) -> None:
    """Fine-tune and measure named-entity recognition, from CoNLL-style files or the Hub's.

    Every point of the grid is run with every seed. Writes OUTPUT/MODEL/ner.json and .md, with entity F1 by seqeval, and
    keeps the weights of the best run. Started again, it resumes.
    """
    _prepare(options.model, options.data_dir, "make a folder for each data set in it")
    from megatron_neobert.evaluation.ner import evaluate

    folder = evaluate(options)
    print((folder / "ner.md").read_text(encoding="utf-8"))
    print(f"wrote {folder / 'ner.json'} and .md")


def evaluate_ppl(options: PerplexityOptions) -> None:
    """Measure the pseudo-perplexity of encoders against the length of texts.

    Masks one token at a time, never those that the tokenizer adds. Writes OUTPUT/MODEL/pseudo_perplexity.json, and the
    curves of all models as OUTPUT/pseudo_perplexity.md and .png. Started again, it resumes.
    """
    name_models(options.model)
    go_offline()
    from megatron_neobert.evaluation.pseudo_perplexity import evaluate

    evaluate(options)


def evaluate_throughput(options: ThroughputOptions) -> None:
    """Measure tokens per second of encoders against the length of documents and the batch size.

    Measures the forward pass of the backbone and, with --backward, the masked-language-model loss with its gradients.
    Writes OUTPUT/MODEL/throughput.json, and of all models throughput.md and figures. Started again, it
    resumes; more lengths or batch sizes may be added.
    """
    name_models(options.model)
    go_offline()
    from megatron_neobert.evaluation.throughput import evaluate

    evaluate(options)


def evaluate_mteb(options: MtebOptions) -> None:
    """Evaluate an encoder on MTEB, or on tasks from your own files, without a network.

    Writes mteb.json and mteb.md under OUTPUT/MODEL, with the means by category of the paper's Table 4 for
    each choice of tasks and settings. Started again, it resumes.
    """
    require_folder("--model", options.model, holding="config.json")
    _prepare(options.model, options.data_dir, f"{_FETCH} mteb --output DIR")
    from megatron_neobert.evaluation.mteb import evaluate

    evaluate(options)


def finetune(options: FinetuneOptions) -> None:
    """Fine-tune an encoder contrastively for embeddings, as NeoBERT's paper does before MTEB.

    Writes OUTPUT/NAME/NAME-contrastive, which `SentenceTransformer(folder)` loads, the loss as CSV and PNG, and
    contrastive.json; NAME is the model's folder. Start it with torchrun for several GPUs.
    """
    require_folder("--model", options.model, holding="config.json")
    _prepare(options.model, options.data_dir, f"{_FETCH} contrastive --data-dir DIR")
    from megatron_neobert.evaluation.embed import finetune

    finetune(options)


def fetch_glue(options: FetchGlueOptions) -> None:
    """Fetch GLUE's data as parquet files, for machines without network."""
    from megatron_neobert.evaluation.fetch import fetch_glue

    fetch_glue(options)


def fetch_contrastive(options: FetchContrastiveOptions) -> None:
    """Fetch the datasets of contrastive fine-tuning as parquet files, for machines without network."""
    from megatron_neobert.evaluation.fetch import fetch_contrastive

    fetch_contrastive(options)


def fetch_mteb(options: FetchMtebOptions) -> int:
    """Fetch the data of MTEB's tasks, for machines without a network, and read it back without one.

    Where a cache of the Hugging Face libraries is filled already, HF_HUB_OFFLINE=1 makes it the only source.
    """
    if options.check:
        go_offline()
    from megatron_neobert.evaluation.fetch import fetch_mteb

    return fetch_mteb(options)


def report(options: ReportOptions) -> None:
    """Put all results on one page, beside the paper's numbers.

    Reads the records below the folders and writes OUTPUT/report.md with its figures. Reported numbers are marked and
    enter no average; what is missing is named.
    """
    for folder in options.results:
        require_folder("--results", folder, remedy="name the --output of an evaluation")
    from megatron_neobert.evaluation.report import missing, write_report

    runs = write_report(options.results, options.output)
    for model, kinds in missing(runs).items():
        if kinds:
            print(f"{visible(model)}: no record of {', '.join(kinds)}")
    print(f"wrote {options.output / 'report.md'} from {len(runs)} records")


def _prepare(model: Path, data_dir: Path, remedy: str) -> None:
    require_folder("--data-dir", data_dir, remedy=remedy)
    require_folder("--model", model, holding="config.json")
    go_offline()
