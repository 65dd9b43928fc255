"""Measure the tokens per second that one core prepares for training, in comparison with other loaders.

    python benchmarks/benchmark_loader.py

A row is one sequence of a batch, packed or padded. The work of a loader is everything between a tokenised corpus in the
page cache and a masked batch: order, packing or padding, reading, masking and tensors. All loaders run in this process,
apart from their workers, on one core and in turns, so that drifts of the machine affect all alike. Seconds are CPU
seconds including workers. Tokens include [CLS] and [SEP], but not padding.

This project packs documents. Hugging Face's collator pads documents, or gets full rows of concatenated documents.
"""

import argparse
import importlib.util
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, before an installed package

from megatron_neobert.cli import Parser
from megatron_neobert.errors import ConfigError, run_command

OURS = "this project, in process"
PACKAGES = ("torch", "numpy", "transformers", "nvidia-dali-cuda130")
PEER_DOCUMENTS = 8192  # kept in memory as Python lists; their number does not affect the speed of the collator
SETTLE_SECONDS = 0.3  # time in which a worker fills its queue
MASKED_SHARE = 0.2  # as in the paper
SEED = 1234


@dataclass(frozen=True)
class Job:
    """Input of every loader."""

    corpus: Any  # megatron_neobert.data.corpus.reader.Corpus
    tokenizer: Any  # megatron_neobert.data.tokenizer.tokenizer.Tokenizer
    seq_length: int
    batch_size: int  # rows
    folder: Path  # for files of the loaders


Sizes = Iterator[tuple[int, int]]  # tokens of each batch: with padding, and real ones


@dataclass(frozen=True)
class Turn:
    """Size of all batches that one loader prepared in one round."""

    loader: str
    capacity: int  # tokens, padding included
    real_tokens: int
    cpu_seconds: float  # of this process and its workers

    @property
    def tokens_per_second(self) -> float:
        return self.real_tokens / self.cpu_seconds


def main() -> int:
    parser = Parser((__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--documents", type=int, default=12_288, metavar="N", help="documents of the generated corpus (%(default)s)")
    add("--seq-length", type=int, default=1024, metavar="N", help="tokens per row (%(default)s)")
    add("--batch-size", type=int, default=128, metavar="N", help="rows per batch (%(default)s)")
    add("--rounds", type=int, default=5, metavar="N", help="turns of each loader; the table has medians (%(default)s)")
    add("--seconds", type=float, default=2.0, metavar="S", help="seconds per turn (%(default)s)")
    add("--output", type=Path, metavar="FILE", help="write all figures as JSON to this file")
    arguments = parser.parse_args()
    from benchmarks.shared import describe_machine, print_table, write_figures

    # torch reads this variable when it is imported, which is later.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        job = open_job(arguments, Path(folder))
        started = {name: start(job) for name, start in available_loaders().items()}
        turns = run_in_turns(started, rounds=arguments.rounds, seconds=arguments.seconds)
    table = summarise(turns)
    print_table(table)
    corpus = {"documents": len(job.corpus), "tokens": job.corpus.manifest.tokens}
    figures = {"machine": describe_machine(PACKAGES), "corpus": corpus, "table": table}
    write_figures(arguments.output, {**figures, "turns": [asdict(turn) for turn in turns]})
    return 0


def open_job(arguments: argparse.Namespace, folder: Path) -> Job:
    """Write a generated corpus to `folder`, print its number of documents and tokens, and return it as an open Job."""
    from benchmarks.shared import write_corpus
    from megatron_neobert.data.corpus.reader import Corpus
    from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer

    prefix, model = write_corpus(
        folder, documents=arguments.documents, median_tokens=368, longest=100_000, vocab_size=30_522
    )
    tokenizer, corpus = load_tokenizer(model), Corpus(prefix)
    print(f"{len(corpus):,} documents, {corpus.manifest.tokens:,} tokens", flush=True)
    return Job(corpus, tokenizer, arguments.seq_length, arguments.batch_size, folder)


# ---- this project


def ours(job: Job, *, num_workers: int, with_dali: bool = False) -> Sizes:
    """Yield the sizes of this project's batches, without end. With 0 workers, this process builds the batches."""
    import torch

    from megatron_neobert.config.schema import DataConfig, Settings, TrainingConfig
    from megatron_neobert.data.batches.loader import build_dali_loader, build_loader
    from megatron_neobert.data.batches.order import split_documents
    from megatron_neobert.data.batches.stream import BatchStream
    from megatron_neobert.data.batches.windows import BatchPhase, Source, token_ids_of

    settings = Settings(
        data=DataConfig(seq_length=job.seq_length, mask_prob=MASKED_SHARE),
        training=TrainingConfig(micro_batch_size=job.batch_size, global_batch_size=job.batch_size, seed=SEED),
    )
    source = Source(job.corpus, split_documents(len(job.corpus), "1")[0])
    stream = BatchStream((BatchPhase((source,), settings, token_ids_of(job.tokenizer)),))
    if with_dali:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        steps = build_dali_loader(stream, num_workers=num_workers, device=device)
    else:
        steps = build_loader(stream, num_workers=num_workers)
    for step in steps:
        yield step.micro_batches[0].tokens_t.numel(), step.real_tokens


# ---- other loaders


def padded_examples(job: Job) -> list[list[int]]:
    """Return documents as a tokenizer does with truncation: one document per row, without padding."""
    cls, sep = job.tokenizer.cls_id, job.tokenizer.sep_id
    documents = (job.corpus.document(number) for number in range(min(len(job.corpus), PEER_DOCUMENTS)))
    return [[cls, *document[: job.seq_length - 2].tolist(), sep] for document in documents]


def full_examples(job: Job) -> list[list[int]]:
    """Return the same documents concatenated and cut into full rows, as run_mlm.py of transformers does."""
    tokens = list(itertools.chain.from_iterable(padded_examples(job)))
    rows = len(tokens) // job.seq_length
    return [tokens[row * job.seq_length :][: job.seq_length] for row in range(rows)]


def collator(job: Job, examples: Callable[[Job], list[list[int]]]) -> Sizes:
    """Yield the size of each batch of transformers' DataCollatorForLanguageModeling, without end.

    `examples` returns the token ids of each row; every epoch shuffles the rows. A tokenizer is written to `job.folder`.
    Raise ConfigError if the rows do not fill one batch.
    """
    from transformers import AutoTokenizer, DataCollatorForLanguageModeling

    job.tokenizer.save_tokenizer_files(job.folder / "tokenizer", model_max_length=job.seq_length)
    tokenizer = AutoTokenizer.from_pretrained(job.folder / "tokenizer", trust_remote_code=False)
    collate = DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=MASKED_SHARE, mask_replace_prob=1.0, random_replace_prob=0.0
    )
    special = set(job.tokenizer.special_ids)
    features = [
        {"input_ids": ids, "special_tokens_mask": [int(id_ in special) for id_ in ids]} for ids in examples(job)
    ]
    if len(features) < job.batch_size:
        raise ConfigError(f"--batch-size {job.batch_size} exceeds the {len(features):,} rows of this loader; lower it.")
    while True:
        random.Random(SEED).shuffle(features)
        for first in range(0, len(features) - job.batch_size + 1, job.batch_size):
            batch = collate(features[first : first + job.batch_size])
            yield batch["input_ids"].numel(), int(batch["attention_mask"].sum())


# ---- measurement


def available_loaders() -> dict[str, Callable[[Job], Sizes]]:
    """Return {name: function that starts a loader}. Without DALI, leave its loaders out and print how to install it.

    This project's loaders come first in the dict and run first: they must fork workers before libraries start threads.
    """
    loaders: dict[str, Callable[[Job], Sizes]] = {
        OURS: partial(ours, num_workers=0),
        "this project, 1 worker": partial(ours, num_workers=1),
    }
    if importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali"):
        loaders["this project, DALI, in process"] = partial(ours, num_workers=0, with_dali=True)
        loaders["this project, DALI, 1 worker"] = partial(ours, num_workers=1, with_dali=True)
    else:
        print("skipping DALI, which is not installed: pip install 'megatron-neobert[dali]'")
    return loaders | {
        "transformers, padded": partial(collator, examples=padded_examples),
        "transformers, full rows": partial(collator, examples=full_examples),
    }


def run_in_turns(loaders: dict[str, Sizes], *, rounds: int, seconds: float) -> list[Turn]:
    """Warm up each loader with one batch, and measure it for `seconds` in every round. Print and return the turns."""
    from benchmarks.shared import in_turns

    for batches in loaders.values():
        next(batches)
    turns = []
    for number, name in in_turns(loaders, rounds=rounds):
        turns.append(measure(name, loaders[name], seconds))
        print(f"round {number} | {name} | {turns[-1].tokens_per_second:,.0f} tokens/cpu-s", flush=True)
    return turns


def measure(name: str, batches: Sizes, seconds: float) -> Turn:
    """Take batches for `seconds` of wall time, at least one. Return total sizes and CPU seconds, workers included."""
    time.sleep(SETTLE_SECONDS)
    cpu, end = tree_cpu_seconds(), time.perf_counter() + seconds
    taken = [next(batches)]
    while time.perf_counter() < end:
        taken.append(next(batches))
    time.sleep(SETTLE_SECONDS)
    capacity, real_tokens = (sum(numbers) for numbers in zip(*taken, strict=True))
    return Turn(name, capacity, real_tokens, cpu_seconds=tree_cpu_seconds() - cpu)


def tree_cpu_seconds() -> float:
    """Return the CPU seconds that this process and its workers have used so far."""
    import psutil

    workers = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return time.process_time() + sum(times.user + times.system for times in workers)


def summarise(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return a row per loader: median speeds, % of padding, and the median factor by which OURS was faster."""
    by_loader: dict[str, list[Turn]] = {}
    for turn in turns:
        by_loader.setdefault(turn.loader, []).append(turn)
    table = []
    for name, group in by_loader.items():
        pairs = list(zip(by_loader[OURS], group, strict=True))
        used = sum(turn.real_tokens for turn in group) / sum(turn.capacity for turn in group)
        table.append(
            {
                "loader": name,
                "real tokens/cpu-s": statistics.median(turn.tokens_per_second for turn in group),
                "% unused": 100 * (1 - used),
                "x tokens": statistics.median(ours.tokens_per_second / turn.tokens_per_second for ours, turn in pairs),
            }
        )
    return table


if __name__ == "__main__":
    run_command(main)
