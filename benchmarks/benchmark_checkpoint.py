"""Measure what saving and loading a checkpoint cost each data-parallel rank.

    python benchmarks/benchmark_checkpoint.py --ranks 2 4 8

One run per number of ranks trains, saves and loads. Each rank counts seconds until the checkpoint is complete or
loaded, its peak memory, MiB of its files, MiB of the tensors that it reads, and MiB that it hashes while loading.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, before an installed package

from benchmarks.shared import build_parser, positive, report, write_corpus
from megatron_neobert.errors import run_command

DOCUMENTS = 2000  # of the generated corpus; any size does
VOCABULARY = 8192


def main() -> None:
    """Save and load on each number of ranks. Print a line for each: the largest of the ranks' medians over rounds."""
    parser = build_parser(__doc__, rounds=2)
    add = parser.add_argument
    add("--ranks", type=positive, nargs="+", default=[2, 4, 8], help="numbers of ranks (%(default)s)")
    add("--num-layers", type=positive, default=8, help="layers of the model (%(default)s)")
    add("--hidden-size", type=positive, default=512, help="width of the model (%(default)s); heads are 64 wide")
    add("--folder", help="folder for the checkpoints; default: the system's temporary folder")
    options = parser.parse_args()
    from torch import multiprocessing

    from megatron_neobert.config.schema import CheckpointConfig, DataConfig, ModelConfig, Settings, TrainingConfig
    from megatron_neobert.runtime.store import serve_store
    from megatron_neobert.text import parse_json

    table = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        corpus, vocabulary = write_corpus(
            Path(name), documents=DOCUMENTS, median_tokens=100, longest=500, vocab_size=VOCABULARY
        )
        shape = {"hidden_size": options.hidden_size, "num_attention_heads": options.hidden_size // 64}
        for ranks in options.ranks:
            settings = Settings(
                model=ModelConfig(num_layers=options.num_layers, **shape),
                data=DataConfig(data_path=(corpus,), tokenizer_model=vocabulary, seq_length=512, num_workers=0),
                training=TrainingConfig(micro_batch_size=2, global_batch_size=2 * max(options.ranks), eval_iters=0),
                checkpoint=CheckpointConfig(save=f"{name}/run_{ranks}", load=f"{name}/run_{ranks}", keep_last=2),
            )
            store = serve_store("127.0.0.1", 0, nodes=ranks)
            os.environ.update(WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
            os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", OMP_NUM_THREADS="1")
            figures = Path(name) / f"figures_{ranks}"
            figures.mkdir()
            multiprocessing.start_processes(
                _measure_rank, args=(settings, options.rounds, figures), nprocs=ranks, start_method="spawn"
            )
            results = [parse_json(path.read_text()) for path in figures.iterdir()]
            table.append({"ranks": ranks} | {key: max(result[key] for result in results) for key in results[0]})
    report(options.output, ("torch", "megatron-core"), {"table": table})


def _measure_rank(rank: int, settings: Any, rounds: int, figures: Path) -> None:
    """Run a training iteration, save and load `rounds` times. Write this rank's medians to `figures`/RANK as JSON."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    from megatron_neobert.checkpoint import folder as files
    from megatron_neobert.checkpoint.contents import StoredTensors
    from megatron_neobert.checkpoint.load import find_checkpoint, load_from
    from megatron_neobert.checkpoint.save import Saver
    from megatron_neobert.runtime import distributed
    from megatron_neobert.training.setup import build_run, join
    from megatron_neobert.training.step import train_step

    row: dict[str, float] = {}
    read, sha256_of = StoredTensors.read, files.sha256_of

    def read_and_count(self: Any, name: str, into: Any, **options: Any) -> None:
        row["read MiB"] += into.nbytes / 2**20
        read(self, name, into, **options)

    def hash_and_count(path: Path) -> str:
        row["hashed MiB"] += path.stat().st_size / 2**20
        return sha256_of(path)

    run = build_run(settings, *join(settings))
    saver, steps = Saver(run, log=lambda text: None), run.training_stream.rank_batches()
    rows = []
    for _ in range(rounds):
        row = {}
        with _measured(row, "train"):
            train_step(run, next(steps))
        run.state = replace(run.state, iteration=run.state.iteration + 1)
        with _measured(row, "save"):
            saver.save()
        checkpoint = files.latest_checkpoint(Path(settings.checkpoint.save))
        row["written MiB"] = sum(path.stat().st_size for path in checkpoint.glob(f"rank_{rank:05d}*")) / 2**20
        row |= {"read MiB": 0.0, "hashed MiB": 0.0}
        with (
            patch.object(StoredTensors, "read", read_and_count),
            patch.object(files, "sha256_of", hash_and_count),
            _measured(row, "load"),
        ):
            found = find_checkpoint(settings)
            assert found is not None
            load_from(run, found.folder)
        rows.append(row)
    result = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    (figures / str(rank)).write_text(json.dumps(result))
    distributed.shut_down()


@contextmanager
def _measured(row: dict[str, float], name: str) -> Iterator[None]:
    """Wait for all ranks, run the block, and add the block's seconds and peak memory to `row`."""
    import torch

    torch.distributed.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    started = time.perf_counter()
    yield
    row[f"{name} s"] = time.perf_counter() - started
    status = Path("/proc/self/status").read_text()
    row[f"{name} peak MiB"] = int(status.partition("VmHWM:")[2].split()[0]) / 1024


if __name__ == "__main__":
    run_command(main)
