"""Numbers that the paper reports. They are shown beside measured numbers and never averaged with them.

Source: Le Breton et al. 2025, "NeoBERT: A Next-Generation BERT", arXiv 2502.19587v2, tables 3, 4, 6 and 10. The paper
draws pseudo-perplexities (figure 2) and does not print them. NeoBERT-1024 and NeoBERT-4096 are the paper's checkpoints
before and after the second stage of pre-training.
"""

from typing import NamedTuple

SOURCE = "arXiv 2502.19587v2"
# Names of benchmarks in mteb, so that commands can print --help before they import mteb. The paper uses v1 with 56
# tasks; v2 has 41.
MTEB_PAPER = "MTEB(eng, v1)"
MTEB_BENCHMARKS = (MTEB_PAPER, "MTEB(eng, v2)")
# Task types of mteb, in the order of table 4.
MTEB_CATEGORIES = (
    "Classification",
    "Clustering",
    "PairClassification",
    "Reranking",
    "Retrieval",
    "STS",
    "Summarization",
)


class Reported(NamedTuple):
    """One table of the paper."""

    title: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[float, ...]]  # model -> values; missing columns at the end are left out
    note: str


# In per cent. The paper quotes the rows of other models from the papers of these models. The rows of BERT are scores on
# the test sets, and their averages count the two halves of MNLI as two tasks. All averages exclude WNLI, and average
# the metrics of a task first.
GLUE = Reported(
    f"GLUE, {SOURCE} table 3",
    ("MNLI", "QNLI", "QQP", "RTE", "SST", "MRPC", "CoLA", "STS", "Avg."),
    {
        "BERT base": (84.0, 90.5, 71.2, 66.4, 93.5, 88.9, 52.1, 85.8, 79.6),
        "RoBERTa base": (87.6, 92.8, 91.9, 78.7, 94.8, 90.2, 63.6, 91.2, 86.4),
        "GTE-en-8192 base": (86.7, 91.9, 88.8, 84.8, 93.3, 92.1, 57.0, 90.2, 85.6),
        "NomicBERT-2048 base": (86.0, 92.0, 92.0, 82.0, 93.0, 88.0, 50.0, 90.0, 84.0),
        "ModernBERT base": (89.1, 93.9, 92.1, 87.4, 96.0, 92.2, 65.1, 91.8, 88.5),
        "NeoBERT-1024": (88.9, 93.9, 90.7, 91.0, 95.8, 93.4, 64.8, 92.1, 88.8),
        "NeoBERT-4096": (89.0, 93.7, 90.7, 91.3, 95.6, 93.4, 66.2, 91.8, 89.0),
        "BERT large": (86.3, 92.7, 72.1, 70.1, 94.9, 89.3, 60.5, 86.5, 82.1),
        "RoBERTa large": (90.2, 94.7, 92.2, 86.6, 96.4, 90.9, 68.0, 92.4, 88.9),
        "DeBERTaV3 large": (91.9, 96.0, 93.0, 92.7, 96.9, 91.9, 75.3, 93.0, 91.4),
        "GTE-en-8192 large": (89.2, 93.9, 89.2, 88.1, 95.1, 93.5, 60.4, 91.4, 87.6),
        "ModernBERT large": (90.8, 95.2, 92.7, 92.1, 97.1, 91.7, 71.4, 92.8, 90.5),
    },
    "development sets, in per cent; the rows of BERT are scores on the test sets",
)

# Main scores x 100. The average is over tasks, not over categories.
MTEB = Reported(
    f"{MTEB_PAPER} after 2,000 steps of contrastive fine-tuning, {SOURCE} table 4",
    ("Class.", "Clust.", "PairClass.", "Rerank.", "Retriev.", "STS", "Summ.", "Avg."),
    {
        "BERT base": (60.6, 37.0, 71.5, 48.9, 28.3, 69.9, 31.1, 48.1),
        "RoBERTa base": (58.7, 36.7, 71.2, 49.8, 26.9, 71.8, 29.1, 47.7),
        "DeBERTaV3 base": (45.9, 15.2, 44.3, 39.0, 3.5, 42.2, 25.0, 26.9),
        "NomicBERT-2048 base": (55.0, 35.3, 69.0, 48.8, 30.5, 70.1, 30.1, 47.1),
        "ModernBERT base": (58.9, 38.1, 63.8, 48.5, 21.0, 66.2, 30.1, 45.0),
        "NeoBERT-4096": (61.6, 40.8, 76.2, 51.2, 31.6, 74.8, 30.7, 51.3),
        "BERT large": (59.8, 39.3, 70.9, 49.7, 29.6, 71.4, 31.2, 49.1),
        "RoBERTa large": (57.1, 39.3, 72.5, 51.3, 30.0, 71.7, 31.1, 48.9),
        "DeBERTaV3 large": (45.9, 16.4, 45.0, 40.8, 4.0, 40.1, 29.9, 27.1),
        "ModernBERT large": (62.4, 38.7, 65.5, 50.1, 23.1, 68.3, 27.8, 46.9),
    },
    "averages over 12, 11, 3, 4, 15, 10 and 1 tasks, and over all 56",
)

# Task -> batch size, learning rate and weight decay of NeoBERT-4096.
GLUE_BEST_POINTS: dict[str, tuple[int, float, float]] = {
    "CoLA": (8, 8e-6, 1e-5),
    "MNLI": (16, 5e-6, 1e-5),
    "MRPC": (2, 1e-5, 1e-5),
    "QNLI": (8, 5e-6, 1e-5),
    "QQP": (32, 8e-6, 1e-5),
    "RTE": (32, 5e-6, 1e-5),
    "SST-2": (32, 8e-6, 1e-2),
    "STS-B": (32, 2e-5, 1e-5),
}

# Measured with the best batch size between 1 and 512, over 100 steps on one A100; the paper states neither dtype nor
# attention kernel. Models with learned positions have only the first lengths.
THROUGHPUT_LENGTHS = (512, 1024, 2048, 4096, 8192)
THROUGHPUT = Reported(
    f"Throughput in thousands of tokens per second, {SOURCE} table 10",
    tuple(f"{length:,}" for length in THROUGHPUT_LENGTHS),
    {
        "BERT base": (27.6,),
        "RoBERTa base": (24.9,),
        "ModernBERT base": (25.4, 22.6, 17.2, 11.7, 6.8),
        "NeoBERT": (24.5, 22.2, 20.5, 17.2, 13.0),
        "BERT large": (19.5,),
        "RoBERTa large": (15.9,),
        "ModernBERT large": (13.4, 11.4, 9.2, 6.5, 3.8),
    },
    "one A100, batch size from 1 to 512; the paper states neither dtype nor attention kernel, and its operations per "
    "second suggest float32",
)
