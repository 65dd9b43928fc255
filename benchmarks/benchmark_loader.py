"""Measure the tokens per second that one core prepares for training, in comparison with other loaders.

    python benchmarks/benchmark_loader.py

A row is one sequence of a batch, packed or padded. The work of a loader is everything between a tokenised corpus in the
page cache and a masked batch: order, packing or padding, reading, masking and tensors. All loaders run in this process,
apart from their workers, on one core and in turns, so that drifts of the machine affect all alike. Seconds are CPU
seconds including workers. Tokens include [CLS] and [SEP], but not padding.

This project packs documents. Hugging Face's collator pads documents, or gets full rows of concatenated documents.
"""

import importlib.util
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, before an installed package

from benchmarks.shared import build_parser, measure_in_turns, positive, report, write_corpus
from megatron_neobert.errors import ConfigError, run_command

OURS = "this project, in process"
PACKAGES = ("torch", "numpy", "transformers", "nvidia-dali-cuda130")
PEER_DOCUMENTS = 8192  # kept in memory as Python lists; their number does not affect the speed of the collator
SETTLE_SECONDS = 0.3  # time in which a worker fills its queue
MASKED_SHARE = 0.2  # as in the paper
SEED = 1234


Sizes = Iterator[tuple[int, int]]  # tokens of each batch: with padding, and real ones


@dataclass(frozen=True)
class Turn:
    """Total size of the batches that a loader prepared in one round, and the CPU seconds used."""

    loader: str
    capacity: int  # tokens, padding included
    real_tokens: int
    cpu_seconds: float  # of this process and its workers

    @property
    def tokens_per_second(self) -> float:
        return self.real_tokens / self.cpu_seconds


def main() -> None:
    parser = build_parser(__doc__, rounds=5)
    add = parser.add_argument
    add("--documents", type=positive, default=12_288, metavar="N", help="documents of the corpus (%(default)s)")
    add("--seq-length", type=positive, default=1024, metavar="N", help="tokens per row (%(default)s)")
    add("--batch-size", type=positive, default=128, metavar="N", help="rows per batch (%(default)s)")
    add("--seconds", type=float, default=2.0, metavar="S", help="seconds per turn (%(default)s)")
    arguments = parser.parse_args()
    # torch reads this variable when it is imported, which is later.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from megatron_neobert.config.schema import DataConfig, Settings, TrainingConfig
    from megatron_neobert.data.batches.corpora import open_phases

    length, rows = arguments.seq_length, arguments.batch_size
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        prefix, model = write_corpus(
            Path(folder), documents=arguments.documents, median_tokens=368, longest=100_000, vocab_size=30_522
        )
        settings = Settings(
            data=DataConfig(
                data_path=(prefix,), tokenizer_model=model, split="1", seq_length=length, mask_prob=MASKED_SHARE
            ),
            training=TrainingConfig(micro_batch_size=rows, global_batch_size=rows, seed=SEED),
        )
        opened = open_phases(settings)
        corpus = opened[0].training[0].corpus
        print(f"{len(corpus):,} documents, {corpus.manifest.tokens:,} tokens", flush=True)
        loaders = start_loaders(settings, opened)

        def take_turn(number: int, loader: str) -> Turn:
            turn = measure(loader, loaders[loader], arguments.seconds)
            print(f"round {number} | {loader} | {turn.tokens_per_second:,.0f} tokens/cpu-s", flush=True)
            return turn

        rounds = measure_in_turns(loaders, take_turn, rounds=arguments.rounds)
    table = [summarise(rounds, loader) for loader in loaders]
    sizes = {"documents": len(corpus), "tokens": corpus.manifest.tokens}
    turns = [asdict(turn) for turns in rounds for turn in turns.values()]
    report(arguments.output, PACKAGES, {"table": table}, corpus=sizes, turns=turns)


def start_loaders(settings: Any, opened: list[Any]) -> dict[str, Sizes]:
    """Start all loaders, take a batch from each to warm up, and return them by name. Without DALI, print a hint.

    `opened` is the result of `open_phases`. This project's loaders start first, because they must fork workers before
    libraries start threads.
    """
    loaders = {OURS: ours(settings, opened, 0), "this project, 1 worker": ours(settings, opened, 1)}
    if importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali"):
        loaders["this project, DALI, in process"] = ours(settings, opened, 0, with_dali=True)
        loaders["this project, DALI, 1 worker"] = ours(settings, opened, 1, with_dali=True)
    else:
        print("skipping DALI, which is not installed: pip install 'megatron-neobert[dali]'")
    loaders["transformers, padded"] = collator(settings, opened[0], are_full=False)
    loaders["transformers, full rows"] = collator(settings, opened[0], are_full=True)
    for batches in loaders.values():
        next(batches)
    return loaders


def ours(settings: Any, opened: list[Any], num_workers: int, *, with_dali: bool = False) -> Sizes:
    """Yield (capacity, real tokens) of this project's batches, without end. If `num_workers` is 0, start no process."""
    import torch

    from megatron_neobert.data.batches.batch import build_stream
    from megatron_neobert.data.batches.loader import build_dali_loader, build_loader

    stream = build_stream(settings, opened)
    if with_dali:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        steps = build_dali_loader(stream, num_workers=num_workers, device=device)
    else:
        steps = build_loader(stream, num_workers=num_workers)
    for step in steps:
        yield step.micro_batches[0].tokens_t.numel(), step.real_tokens


def collator(settings: Any, opened: Any, *, are_full: bool) -> Sizes:
    """Yield (capacity, real tokens) of batches from transformers' DataCollatorForLanguageModeling, without end.

    A row is a truncated document. If `are_full`, documents are concatenated and divided into full rows, as in
    transformers' run_mlm.py. Every epoch shuffles the rows. Raise ConfigError if the rows do not fill a batch.
    """
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    ours, corpus = opened.tokenizer, opened.training[0].corpus
    names = {f"{role}_token": name for role, name in ours.special_names.items()}
    collate = DataCollatorForLanguageModeling(
        PreTrainedTokenizerFast(tokenizer_object=ours.backend, **names),
        mlm_probability=MASKED_SHARE,
        mask_replace_prob=1.0,
        random_replace_prob=0.0,
    )
    length, batch_size = settings.data.seq_length, settings.training.global_batch_size
    documents = (corpus.document(number) for number in range(min(len(corpus), PEER_DOCUMENTS)))
    rows = [[ours.cls_id, *document[: length - 2].tolist(), ours.sep_id] for document in documents]
    if are_full:
        tokens = list(itertools.chain.from_iterable(rows))
        rows = [tokens[end - length : end] for end in range(length, len(tokens) + 1, length)]
    special = set(ours.special_ids)
    features = [{"input_ids": row, "special_tokens_mask": [int(id_ in special) for id_ in row]} for row in rows]
    if len(features) < batch_size:
        raise ConfigError(f"--batch-size {batch_size} exceeds the {len(features):,} rows of this loader; lower it.")
    while True:
        random.Random(SEED).shuffle(features)
        for first in range(0, len(features) - batch_size + 1, batch_size):
            batch = collate(features[first : first + batch_size])
            yield batch["input_ids"].numel(), int(batch["attention_mask"].sum())


def measure(loader: str, batches: Sizes, seconds: float) -> Turn:
    """Take batches for `seconds` of wall time, at least one batch. Return total sizes and CPU seconds with workers."""
    time.sleep(SETTLE_SECONDS)
    cpu, end = tree_cpu_seconds(), time.perf_counter() + seconds
    taken = [next(batches)]
    while time.perf_counter() < end:
        taken.append(next(batches))
    time.sleep(SETTLE_SECONDS)
    capacity, real_tokens = (sum(numbers) for numbers in zip(*taken, strict=True))
    return Turn(loader, capacity, real_tokens, cpu_seconds=tree_cpu_seconds() - cpu)


def tree_cpu_seconds() -> float:
    """Return the CPU seconds that this process and its workers have used so far."""
    import psutil

    workers = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return time.process_time() + sum(times.user + times.system for times in workers)


def summarise(rounds: list[dict[str, Turn]], loader: str) -> dict[str, Any]:
    """Return a row of the table: median speed, % of unused capacity, and the median factor by which OURS was faster."""
    turns = [turns[loader] for turns in rounds]
    used = sum(turn.real_tokens for turn in turns) / sum(turn.capacity for turn in turns)
    factors = [turns[OURS].tokens_per_second / turns[loader].tokens_per_second for turns in rounds]
    return {
        "loader": loader,
        "real tokens/cpu-s": statistics.median(turn.tokens_per_second for turn in turns),
        "% unused": 100 * (1 - used),
        "x tokens": statistics.median(factors),
    }


if __name__ == "__main__":
    run_command(main)
