"""How near is the memory that `--dry-run` announces to what training takes?

    python benchmarks/benchmark_memory.py

Builds the model of each case and prints, beside the plan, the bytes that autograd keeps of one micro-batch, each
storage once. On a GPU (--gpu) the cases are larger, and the table also has the peak of torch's own count of its tensors
in a training step; the plan's assumption about CUDA's context is left out.
"""

import gc
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

from megatron_neobert.cli import Parser
from megatron_neobert.config.schema import DataConfig, ModelConfig, Settings, TrainingConfig
from megatron_neobert.errors import run_command

PACKAGES = ("torch", "megatron-core", "transformer-engine")
DOCUMENTS = 4096  # a window of them, which is what the loader packs at once
VOCABULARY = 30_522  # bert-base-uncased's


@dataclass(frozen=True)
class Case:
    """Sizes of a run, layers x width and rows x tokens, and settings by section and name that are not the defaults."""

    layers: int
    hidden: int
    rows: int
    row_tokens: int
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def size(self) -> str:
        return f"{self.layers} x {self.hidden}, {self.rows} x {self.row_tokens}"


BF16 = {"bf16": True}
FULL = {"recompute_granularity": "full"}
CPU_CASES = {
    "narrow": Case(4, 256, 2, 1024),
    "fp32": Case(6, 384, 2, 1024),
    "wide": Case(4, 768, 2, 512),
    "bf16": Case(6, 384, 2, 1024, {"training": BF16}),
    "recompute layers": Case(6, 384, 2, 1024, {"compute": FULL}),
    "recompute attention": Case(6, 384, 2, 1024, {"compute": {"recompute_granularity": "selective"}}),
}
GPU_CASES = {
    "16 rows": Case(28, 768, 16, 1024, {"training": BF16}),
    "32 rows": Case(28, 768, 32, 1024, {"training": BF16}),
    "long rows": Case(28, 768, 8, 4096, {"training": BF16}),
    "recompute layers": Case(28, 768, 32, 1024, {"training": BF16, "compute": FULL}),
    "torch's layers": Case(28, 768, 16, 1024, {"training": BF16, "compute": {"transformer_impl": "local"}}),
    "fp32": Case(12, 768, 8, 1024),
}


def main() -> int:
    """Measure every case and print the table."""
    parser = Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpu", action="store_true", help="the cases for one GPU instead of those for a CPU")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all figures there as JSON")
    arguments = parser.parse_args()
    from benchmarks.shared import describe_machine, print_table, write_figures

    rows = []
    for name, case in (GPU_CASES if arguments.gpu else CPU_CASES).items():
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            figures = measure(case, Path(folder), on_gpu=arguments.gpu)
        row: dict[str, Any] = {"case": name, "size": case.size}
        for what, (planned, measured) in figures.items():
            row |= {f"{what} MiB": measured / (1 << 20), f"planned {what}": planned / (1 << 20)}
            row[f"{what} / planned"] = measured / planned
        rows.append(row)
        print_table(rows[-1:])
    print()
    print_table(rows)
    write_figures(arguments.output, {"machine": describe_machine(PACKAGES), "cases": rows})
    return 0


def measure(case: Case, folder: Path, *, on_gpu: bool) -> dict[str, tuple[int, int]]:
    """Return planned and measured bytes: `kept` of one micro-batch, and on a GPU the `peak` of a training step."""
    import torch

    from megatron_neobert.planning.memory import plan_memory
    from megatron_neobert.runtime import distributed
    from megatron_neobert.training.setup import build_run, join
    from megatron_neobert.training.step import train_step

    settings = build_settings(case, folder)
    run = build_run(settings, *join(settings))
    steps = run.training_stream.steps()
    train_step(run, next(steps))  # which allocates the optimizer's moments, and what libraries keep
    batch = next(steps).micro_batches[0]
    kept = count_saved_bytes(run, batch)
    plan = plan_memory(settings, vocab_size=VOCABULARY, world_size=1, masked_tokens=len(batch.labels_m))
    figures = {"kept": (plan.activations + plan.head, kept)}
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        train_step(run, next(steps))
        figures["peak"] = (plan.total - plan.context, torch.cuda.max_memory_allocated())
    distributed.shut_down()
    del run, steps
    gc.collect()
    return figures


def build_settings(case: Case, folder: Path) -> Settings:
    """Return the settings of a run, and write the corpus that they name."""
    from benchmarks.shared import write_corpus

    prefix, vocabulary = write_corpus(
        folder, documents=DOCUMENTS, median_tokens=368, longest=case.row_tokens - 2, vocab_size=VOCABULARY
    )
    settings = Settings(
        model=ModelConfig(
            num_layers=case.layers,
            hidden_size=case.hidden,
            num_attention_heads=case.hidden // 64,
            max_position_embeddings=case.row_tokens,
        ),
        data=DataConfig(
            data_path=(prefix,),
            tokenizer_model=vocabulary,
            seq_length=case.row_tokens,
            split="1",
            num_workers=0,
        ),
        training=TrainingConfig(micro_batch_size=case.rows, global_batch_size=case.rows, eval_iters=0),
    )
    for section, changes in case.changes.items():
        settings = settings.with_section(section, **changes)
    return settings


def count_saved_bytes(run: Any, batch: Any) -> int:
    """Return the bytes that autograd keeps of one micro-batch: every storage once, weights not counted.

    Collective: all ranks.
    """
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
