"""The nine GLUE tasks, and the diagnostic set: what their files, labels, metrics and sizes are.

Names of tasks and columns are those of the data set on the Hub; the benchmark's own TSV files call some columns
otherwise. Metrics: the first one chooses models, all of them are averaged for the table.
Source: Wang et al. 2019, tables 1 and 5; arXiv 2502.19587 appendix C.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatron_neobert.errors import ConfigError

PAIR = ("sentence1", "sentence2")
BINARY = ("0", "1")
RTE_COLUMNS = ("index", *PAIR, "label")


@dataclass(frozen=True, kw_only=True)
class GlueTask:
    """One task.

    `rows` names every split and its size. `columns` are those of the benchmark's labelled TSV file, in its order;
    `tsv_names` what it calls the columns that are read, where that is not the Hub's name.
    """

    name: str
    title: str  # of folders and submissions, as the benchmark writes it
    texts: tuple[str, ...]
    labels: tuple[str, ...]  # words by class; none: a number from 0 to 5
    metrics: tuple[str, ...]
    columns: tuple[str, ...]
    rows: dict[str, int]
    tsv_names: dict[str, str] = field(default_factory=dict)
    validation: tuple[str, ...] = ("validation",)
    starts_from_mnli: bool = False

    @property
    def num_outputs(self) -> int:
        return len(self.labels) or 1

    @property
    def is_regression(self) -> bool:
        return not self.labels


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What every run of an evaluation has in common."""

    epochs: int = 10
    patience: int = 15  # evaluations
    max_length: int = 1024  # tokens
    limit: int | None = None  # rows of every split
    dtype: str = "float32"  # of the forward and backward passes; weights and moments stay float32
    attention: str | None = None
    device: str = "cpu"


def _rows(train: int, validation: int, test: int) -> dict[str, int]:
    return {"train": train, "validation": validation, "test": test}


_TASKS = (
    GlueTask(
        name="mnli",
        title="MNLI",
        texts=("premise", "hypothesis"),
        labels=("entailment", "neutral", "contradiction"),
        metrics=("accuracy", "accuracy_mismatched"),
        columns=(
            *("index", "promptID", "pairID", "genre", "sentence1_binary_parse", "sentence2_binary_parse"),
            *("sentence1_parse", "sentence2_parse", *PAIR, "label1", "gold_label"),
        ),
        tsv_names={"premise": "sentence1", "hypothesis": "sentence2", "label": "gold_label"},
        rows={
            "train": 392_702,
            "validation_matched": 9_815,
            "validation_mismatched": 9_832,
            "test_matched": 9_796,
            "test_mismatched": 9_847,
        },
        validation=("validation_matched", "validation_mismatched"),
    ),
    GlueTask(
        name="qnli",
        title="QNLI",
        texts=("question", "sentence"),
        labels=("entailment", "not_entailment"),
        metrics=("accuracy",),
        columns=("index", "question", "sentence", "label"),
        rows=_rows(104_743, 5_463, 5_463),
        starts_from_mnli=True,
    ),
    GlueTask(
        name="qqp",
        title="QQP",
        texts=("question1", "question2"),
        labels=BINARY,
        metrics=("accuracy", "f1"),
        columns=("id", "qid1", "qid2", "question1", "question2", "is_duplicate"),
        tsv_names={"label": "is_duplicate"},
        rows=_rows(363_846, 40_430, 390_965),
    ),
    GlueTask(
        name="rte",
        title="RTE",
        texts=PAIR,
        labels=("entailment", "not_entailment"),
        metrics=("accuracy",),
        columns=RTE_COLUMNS,
        rows=_rows(2_490, 277, 3_000),
        starts_from_mnli=True,
    ),
    GlueTask(
        name="sst2",
        title="SST-2",
        texts=("sentence",),
        labels=BINARY,
        metrics=("accuracy",),
        columns=("sentence", "label"),
        rows=_rows(67_349, 872, 1_821),
    ),
    GlueTask(
        name="mrpc",
        title="MRPC",
        texts=PAIR,
        labels=BINARY,
        metrics=("accuracy", "f1"),
        columns=("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"),
        tsv_names={"sentence1": "#1 String", "sentence2": "#2 String", "label": "Quality"},
        rows=_rows(3_668, 408, 1_725),
        starts_from_mnli=True,
    ),
    GlueTask(
        name="cola",
        title="CoLA",
        texts=("sentence",),
        labels=BINARY,
        metrics=("matthews",),
        columns=("source", "label", "star", "sentence"),
        rows=_rows(8_551, 1_043, 1_063),
    ),
    GlueTask(
        name="stsb",
        title="STS-B",
        texts=PAIR,
        labels=(),
        metrics=("pearson", "spearman"),
        columns=("index", "genre", "filename", "year", "old_index", "source1", "source2", *PAIR, "score"),
        tsv_names={"label": "score"},
        rows=_rows(5_749, 1_500, 1_379),
        starts_from_mnli=True,
    ),
    GlueTask(
        name="wnli",
        title="WNLI",
        texts=PAIR,
        labels=BINARY,
        metrics=("accuracy",),
        columns=RTE_COLUMNS,
        rows=_rows(635, 71, 146),
    ),
)
TASKS = {task.name: task for task in _TASKS}
PAPER_TASKS = tuple(task.name for task in _TASKS if task.name != "wnli")  # in the order of the paper's table

# No training set and no labels: the best MNLI model answers it for the server.
DIAGNOSTIC = GlueTask(
    name="ax",
    title="AX",
    texts=("premise", "hypothesis"),
    labels=TASKS["mnli"].labels,
    metrics=(),
    columns=("index", *PAIR),
    tsv_names={"premise": "sentence1", "hypothesis": "sentence2"},
    rows={"test": 1_104},
)


def choose_tasks(names: Sequence[str] | None, default: Iterable[str]) -> list[str]:
    """The tasks that are asked for.

    Raises:
        ConfigError: There is no such task.
    """
    chosen = list(default) if names is None else list(dict.fromkeys(name.lower().replace("-", "") for name in names))
    unknown = [name for name in chosen if name not in TASKS]
    if unknown:
        raise ConfigError(f"--tasks {' '.join(unknown)}: GLUE's tasks are {', '.join(TASKS)}.")
    return chosen
