"""Measure the rows and tokens per second that one core prepares for training, beside other loaders.

    python benchmarks/benchmark_loader.py

Everything between a tokenised corpus in the page cache and a masked batch counts: order, packing or padding, reading,
masking, tensors. All loaders run in this one process (but for their workers), on one core, in turns, so that the
machine's mood hits all of them. What counts are CPU seconds, workers included, and tokens of documents, with their
[CLS] and [SEP] and without padding.

This project packs documents into rows; Hugging Face's collator pads them, or takes rows that were filled beforehand
with documents end to end.
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
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

from megatron_neobert.cli import Parser
from megatron_neobert.errors import run_command

OURS = "this project, in process"
PACKAGES = ("torch", "numpy", "transformers", "nvidia-dali-cuda130")
PEER_DOCUMENTS = 8192  # held in memory as Python objects; the peer's speed does not depend on how many there are
SETTLE_SECONDS = 0.3  # long enough for a worker to fill its queue
MASKED_SHARE = 0.2  # the paper's
SEED = 1234


@dataclass(frozen=True)
class Job:
    """Task of every loader."""

    corpus: Any  # megatron_neobert.data.corpus.reader.Corpus
    tokenizer: Any  # megatron_neobert.data.tokenizer.tokenizer.Tokenizer
    seq_length: int
    batch_size: int  # rows
    folder: Path  # for a peer's own files


class Size(NamedTuple):
    """Counts of one batch."""

    rows: int
    capacity: int  # tokens, padding included
    real_tokens: int


@dataclass(frozen=True)
class Turn:
    """Batches that one loader prepared in one round."""

    loader: str
    rows: int
    capacity: int  # tokens, padding included
    real_tokens: int
    cpu_seconds: float  # of this process and its workers

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.cpu_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.real_tokens / self.cpu_seconds


def main() -> int:
    parser = Parser((__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--documents", type=int, default=12_288, metavar="N", help="of the made-up corpus (%(default)s)")
    add("--seq-length", type=int, default=1024, metavar="N", help="tokens of a row (%(default)s)")
    add("--batch-size", type=int, default=128, metavar="N", help="rows of a batch (%(default)s)")
    add("--rounds", type=int, default=5, metavar="N", help="turns of each, of which the median counts (%(default)s)")
    add("--seconds", type=float, default=2.0, metavar="S", help="of each turn (%(default)s)")
    add("--output", type=Path, metavar="FILE", help="write all figures there as JSON")
    arguments = parser.parse_args()
    from benchmarks.shared import describe_machine, print_table, write_figures

    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded, which is later
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


def our_stream(job: Job) -> Any:
    from megatron_neobert.data.batches.inputs import token_ids_of
    from megatron_neobert.data.batches.masking import MaskingScheme
    from megatron_neobert.data.batches.stream import BatchSettings, BatchStream
    from megatron_neobert.data.batches.windows import Source

    settings = BatchSettings(
        seq_length=job.seq_length,
        micro_batch_size=job.batch_size,
        global_batch_size=job.batch_size,
        long_documents="truncate",
        masking=MaskingScheme(MASKED_SHARE),
        token_ids=token_ids_of(job.tokenizer),
        seed=SEED,
    )
    return BatchStream((Source(job.corpus, range(len(job.corpus))),), settings)


def ours(job: Job, *, num_workers: int, with_dali: bool = False) -> Iterator[Size]:
    """Yield batches of the loader of training."""
    import torch

    from megatron_neobert.data.batches.loader import build_dali_loader, build_loader

    if with_dali:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        steps = build_dali_loader(our_stream(job), num_workers=num_workers, device=device)
    else:
        steps = build_loader(our_stream(job), num_workers=num_workers) if num_workers else our_stream(job).steps()
    for step in steps:
        yield Size(job.batch_size, step.micro_batches[0].tokens_t.numel(), step.real_tokens)


# ---- others


def padded_examples(job: Job) -> list[list[int]]:
    """Return documents as tokenizers do, cut at the row's length."""
    cls, sep = job.tokenizer.cls_id, job.tokenizer.sep_id
    documents = (job.corpus.document(number) for number in range(min(len(job.corpus), PEER_DOCUMENTS)))
    return [[cls, *document[: job.seq_length - 2].tolist(), sep] for document in documents]


def full_examples(job: Job) -> list[list[int]]:
    """Return the same documents end to end, cut into full rows, as run_mlm.py of transformers does."""
    tokens = list(itertools.chain.from_iterable(padded_examples(job)))
    rows = len(tokens) // job.seq_length
    return [tokens[row * job.seq_length :][: job.seq_length] for row in range(rows)]


def collator(job: Job, examples: Callable[[Job], list[list[int]]]) -> Iterator[Size]:
    """Yield batches of DataCollatorForLanguageModeling over shuffled lists in memory: nothing is read."""
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
    while True:
        random.Random(SEED).shuffle(features)
        for first in range(0, len(features) - job.batch_size + 1, job.batch_size):
            batch = collate(features[first : first + job.batch_size])
            yield Size(job.batch_size, batch["input_ids"].numel(), int(batch["attention_mask"].sum()))


# ---- measuring


def available_loaders() -> dict[str, Callable[[Job], Iterator[Size]]]:
    """Return the loaders in the order of the table, those with workers first: other libraries bring threads."""
    loaders: dict[str, Callable[[Job], Iterator[Size]]] = {
        OURS: partial(ours, num_workers=0),
        "this project, 1 worker": partial(ours, num_workers=1),
    }
    if importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali"):
        loaders["this project, DALI, in process"] = partial(ours, num_workers=0, with_dali=True)
        loaders["this project, DALI, 1 worker"] = partial(ours, num_workers=1, with_dali=True)
    else:
        print("DALI is left out, it is not installed: pip install 'megatron-neobert[dali]'")
    return loaders | {
        "transformers, padded": partial(collator, examples=padded_examples),
        "transformers, full rows": partial(collator, examples=full_examples),
    }


def run_in_turns(loaders: dict[str, Iterator[Size]], *, rounds: int, seconds: float) -> list[Turn]:
    """Run every loader once a round, after one batch each that is not counted."""
    from benchmarks.shared import in_turns

    for batches in loaders.values():
        next(batches)
    turns = []
    for number, name in in_turns(loaders, rounds=rounds):
        turns.append(measure(name, loaders[name], seconds))
        print(f"round {number} | {name} | {turns[-1].rows_per_second:,.0f} rows/cpu-s", flush=True)
    return turns


def measure(name: str, batches: Iterator[Size], seconds: float) -> Turn:
    """Take batches for so many seconds; workers have full queues when the clock starts and when it stops."""
    time.sleep(SETTLE_SECONDS)
    cpu, end = tree_cpu_seconds(), time.perf_counter() + seconds
    taken = [next(batches)]
    while time.perf_counter() < end:
        taken.append(next(batches))
    time.sleep(SETTLE_SECONDS)
    rows, capacity, real_tokens = (sum(numbers) for numbers in zip(*taken, strict=True))
    return Turn(name, rows, capacity, real_tokens, cpu_seconds=tree_cpu_seconds() - cpu)


def tree_cpu_seconds() -> float:
    """Return the CPU seconds so far of all threads of this process and of its workers."""
    import psutil

    workers = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return time.process_time() + sum(times.user + times.system for times in workers)


def summarise(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return one row per loader: medians, and how many times as fast this project is in the same round."""
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
                "rows/cpu-s": statistics.median(turn.rows_per_second for turn in group),
                "real tokens/cpu-s": statistics.median(turn.tokens_per_second for turn in group),
                "% unused": 100 * (1 - used),
                "x rows": statistics.median(one.rows_per_second / other.rows_per_second for one, other in pairs),
                "x tokens": statistics.median(one.tokens_per_second / other.tokens_per_second for one, other in pairs),
            }
        )
    return table


if __name__ == "__main__":
    run_command(main)
