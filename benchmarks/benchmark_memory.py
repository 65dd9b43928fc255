"""Command: how near is the memory that `--dry-run` announces to what training takes?

    python benchmarks/benchmark_memory.py

Trains two real steps per case, each case in processes of its own, and prints beside the plan (a) the bytes that
autograd keeps of one micro-batch, each storage once, and (b) the peak of the second step. On a CPU that is the growth
of the resident set since the process had imported everything and joined the others, with glibc told to give freed
memory back at once; on a GPU it is torch's own count of its tensors. The plan's assumption about CUDA's context is left
out on both sides.
"""

import json
import os
import socket
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

from megatron_neobert.config.schema import DataConfig, ModelConfig, Settings, TrainingConfig
from megatron_neobert.errors import CommandParser, run_command

PACKAGES = ("torch", "megatron-core", "transformer-engine")
DOCUMENTS = 4096  # a window of them, which is what the loader packs at once
VOCABULARY = 30_522  # bert-base-uncased's
# Else a freed tensor stays with the process, and the resident set depends on the order in which tensors are freed.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}


@dataclass(frozen=True)
class Case:
    """What to train: layers x width, rows x length, and settings by section and name that differ from the defaults."""

    layers: int
    hidden: int
    rows: int
    row_tokens: int
    micro_batches: int = 1
    ranks: int = 1
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def size(self) -> str:
        return f"{self.layers} x {self.hidden}, {self.rows} x {self.row_tokens}"


BF16 = {"bf16": True}
FULL = {"recompute_granularity": "full"}
CPU_CASES = {
    "narrow": Case(4, 256, 2, 1024),
    "fp32": Case(6, 384, 2, 1024),
    "short rows": Case(6, 384, 8, 256),
    "bf16": Case(6, 384, 2, 1024, changes={"training": BF16}),
    "recompute layers": Case(6, 384, 2, 1024, changes={"compute": FULL}),
    "recompute attention": Case(6, 384, 2, 1024, changes={"compute": {"recompute_granularity": "selective"}}),
    "wide": Case(4, 768, 2, 512),
    "tensor parallel 2": Case(6, 384, 2, 1024, ranks=2, changes={"parallel": {"tensor_model_parallel_size": 2}}),
    "sequence parallel 2": Case(6, 384, 2, 1024, ranks=2, changes={"parallel": {"tensor_model_parallel_size": 2}}),
    "context parallel 2": Case(6, 384, 2, 1024, ranks=2, changes={"parallel": {"context_parallel_size": 2}}),
    "pipeline 2": Case(
        6, 384, 1, 1024, micro_batches=4, ranks=2, changes={"parallel": {"pipeline_model_parallel_size": 2}}
    ),
}
GPU_CASES = {
    "16 rows": Case(28, 768, 16, 1024, changes={"training": BF16}),
    "32 rows": Case(28, 768, 32, 1024, changes={"training": BF16}),
    "long rows": Case(28, 768, 8, 4096, changes={"training": BF16}),
    "recompute layers": Case(28, 768, 32, 1024, changes={"training": BF16, "compute": FULL}),
    "torch's layers": Case(28, 768, 16, 1024, changes={"training": BF16, "compute": {"transformer_impl": "local"}}),
    "fp32": Case(12, 768, 8, 1024),
}


def main() -> int:
    """Runs every case and prints the table."""
    parser = CommandParser(__doc__)
    parser.add_argument("--gpu", action="store_true", help="the cases for one GPU instead of those for a CPU")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all figures there as JSON")
    arguments = parser.parse_args()
    return compare(GPU_CASES if arguments.gpu else CPU_CASES, output=arguments.output)


def compare(cases: dict[str, Case], *, output: Path | None) -> int:
    """Measures the cases one after another."""
    from benchmarks.shared import describe_machine, print_table, write_figures

    rows = []
    for name, case in cases.items():
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            figures = max(run_ranks(case, Path(folder)), key=lambda rank: rank["measured peak"])
        row: dict[str, Any] = {"case": name, "size": case.size}
        for what in ("kept", "peak"):
            planned, measured = figures[f"planned {what}"], figures[f"measured {what}"]
            row |= {f"{what} MiB": measured and measured / (1 << 20), f"planned {what}": planned / (1 << 20)}
            row[f"{what}: plan / measured"] = measured and planned / measured
        rows.append(row)
        print_table(rows[-1:])
    print()
    print_table(rows)
    write_figures(output, {"machine": describe_machine(PACKAGES), "cases": rows})
    return 0


def run_ranks(case: Case, folder: Path) -> list[dict[str, Any]]:
    """Return the figures of every rank of a case; each rank is a process of its own."""
    from torch import multiprocessing

    from benchmarks.shared import write_corpus

    write_corpus(folder, documents=DOCUMENTS, median_tokens=368, longest=case.row_tokens - 2, vocab_size=VOCABULARY)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(case.ranks)}
    os.environ.update(GIVE_BACK, OMP_NUM_THREADS="1", **rendezvous)  # which the processes start with
    multiprocessing.spawn(measure, (case, folder), nprocs=case.ranks)
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(case.ranks)]


def build_settings(case: Case, folder: Path) -> Settings:
    """A run of the corpus in `folder`."""
    settings = Settings(
        model=ModelConfig(
            num_layers=case.layers,
            hidden_size=case.hidden,
            num_attention_heads=case.hidden // 64,
            max_position_embeddings=case.row_tokens,
        ),
        data=DataConfig(
            data_path=(str(folder / "c_content_document"),),
            tokenizer_model=str(folder / "vocab.txt"),
            seq_length=case.row_tokens,
            split="1",
            num_workers=0,
        ),
        training=TrainingConfig(
            micro_batch_size=case.rows, global_batch_size=case.rows * case.micro_batches, eval_iters=0
        ),
    )
    for section, changes in case.changes.items():
        settings = settings.with_section(section, **changes)
    return settings


def measure(rank: int, case: Case, folder: Path) -> None:
    """Two steps of this rank, and one more forward pass whose saved tensors are counted; writes the figures."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    import torch

    from benchmarks.shared import Memory
    from megatron_neobert.runtime import distributed
    from megatron_neobert.training.setup import build_run, join
    from megatron_neobert.training.step import train_step

    torch.set_num_threads(1)
    settings = build_settings(case, folder)
    inputs, device = join(settings)
    warm_up(device, torch.bfloat16 if settings.training.bf16 else torch.float32)
    memory = Memory(on_gpu=device.type == "cuda")
    with memory.watch("run"):
        run = build_run(settings, inputs, device)
        steps = run.training_stream.steps()
        train_step(run, next(steps))  # which allocates the optimizer's moments
    batches = next(steps)
    with memory.watch("run"):
        train_step(run, batches)
    batch = batches.micro_batches[0]
    kept = count_saved_bytes(run, batch) if settings.parallel.pipeline_model_parallel_size == 1 else None
    plan = plan_of(run, world_size=case.ranks, masked_tokens=len(batch.labels_m))
    distributed.shut_down()
    figures = {
        "planned kept": plan.activations + plan.head,
        "measured kept": kept,  # None: a stage with several micro-batches in flight shows by its peak alone
        "planned peak": plan.total - plan.context,
        "measured peak": memory.peak_bytes,
    }
    (folder / f"{rank}.json").write_text(json.dumps(figures), encoding="utf-8")


def warm_up(device: Any, dtype: Any) -> None:
    """Has the libraries load what they load at their first use, which is no tensor of the run."""
    import torch

    hidden = torch.randn(64, 64, device=device, dtype=dtype, requires_grad=True)
    heads = (hidden @ hidden).view(1, 1, 64, 64)
    torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).float().logsumexp(-1).sum().backward()


def plan_of(run: Any, *, world_size: int, masked_tokens: int) -> Any:
    """What --dry-run would print for the fullest rank."""
    from megatron_neobert.planning.memory import plan_memory

    return plan_memory(
        run.settings,
        vocab_size=run.tokenizer.vocab_size,
        world_size=world_size,
        masked_tokens=masked_tokens,
    )


def count_saved_bytes(run: Any, batch: Any) -> int:
    """What autograd keeps of one micro-batch: every storage once, weights not counted. Collective: all ranks."""
    import torch

    weights = {weight.untyped_storage().data_ptr() for weight in run.model.parameters()}
    kept: dict[int, Any] = {}  # the tensors as well: a freed one's place would be taken by another

    def keep(tensor: Any) -> Any:
        tensor = tensor.detach()  # or it would keep its graph, and this graph it, for ever
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            kept[place] = tensor
        return tensor

    batch = batch.to(run.device)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model = run.model
        model(batch.tokens_t, batch.cu_seqlens_n, batch.max_seqlen, batch.masked_positions_m, batch.labels_m)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


if __name__ == "__main__":
    run_command(main)
