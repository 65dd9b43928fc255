"""Measure the speed of a training step against the padded reference.

    python benchmarks/benchmark_step.py --seq-length 512 1024

Trains the same documents with the same masks from the same weights three times in turns: packed, as this project
does; padded, by this project's engine too, but with one document per row; and by the reference, which is plain PyTorch
(SDPA, AdamW, padded to the longest, decoder at every position). Losses are compared. Document lengths are about those
of the web, truncated at the length of a row. Seconds are CPU seconds on a CPU and wall seconds on a GPU; tokens are
those of documents, padding is not counted, and MFU neither counts what is computed for it.
"""

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout before any that is installed

from megatron_neobert.cli import Parser
from megatron_neobert.config.schema import DataConfig, ModelConfig, OptimizerConfig, Settings, TrainingConfig
from megatron_neobert.errors import ConfigError, run_command

LEARNING_RATE = 1e-4  # any: neither speed nor memory depends on it
LAYOUTS = ("packed", "padded", "reference")
DOCUMENTS = 4096  # one window: as well packed as a large corpus
PACKAGES = ("torch", "megatron-core", "transformer-engine", "flash-attn")
_WAITED = "called a synchronizing CUDA operation"  # what torch warns of


@dataclass(frozen=True)
class Timing:
    """One step in one layout."""

    seq_length: int
    layout: str
    tokens: int  # of documents
    capacity: int  # tokens, padding included
    flops: float  # that the documents need
    seconds: float
    loss: float  # nats per masked token
    peak_bytes: int | None  # most that a GPU had allocated during the step, the other model included


def main() -> int:
    """Measure and print one line per step, then the table."""
    from megatron_neobert.config.cli import run_flags

    parser = Parser((__doc__ or "").partition("\n")[0], also=run_flags())
    add = parser.add_argument
    add("--num-layers", type=int, default=6, metavar="N", help="default %(default)s")
    add("--hidden-size", type=int, default=384, metavar="N", help="default %(default)s")
    add("--num-attention-heads", type=int, default=6, metavar="N", help="default %(default)s")
    add("--vocab-size", type=int, default=30_522, metavar="N", help="default %(default)s")
    add("--seq-length", type=int, nargs="+", default=[1024], metavar="N", help="tokens of a row (1024)")
    tokens = "token capacity per pass, at least a row (%(default)s)"
    add("--micro-batch-tokens", type=int, default=4096, metavar="N", help=tokens)
    add("--global-batch-tokens", type=int, default=8192, metavar="N", help="the same per packed step (%(default)s)")
    add("--median-tokens", type=int, default=368, metavar="N", help="median document (%(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="steps in each layout, after one to warm up (%(default)s)")
    add("--threads", type=int, default=1, metavar="N", help="on a CPU (%(default)s)")
    add("--bf16", action="store_true", help="bfloat16; the reference by autocast")
    add("--peak-tflops", type=float, metavar="X", help="of the processor, for MFU; known for A100, H100 SXM and H200")
    add("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="leave some out (default: none)")
    add("--profile", action="store_true", help="also list a packed step's operations, and where it waits for a GPU")
    add("--output", type=Path, metavar="FILE", help="write all figures there as JSON")
    arguments, flags = parser.parse_known_args()
    if problems := parser.unknown_flags():
        raise ConfigError(problems)
    arguments.layouts = sorted({"packed", *arguments.layouts}, key=LAYOUTS.index)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        return measure(arguments, flags, Path(folder))


def measure(arguments: argparse.Namespace, flags: list[str], folder: Path) -> int:
    """Build both models, let them train in turn at every length, and print the table."""
    import torch

    from benchmarks.shared import describe_machine, print_table, write_figures
    from megatron_neobert.inspection.global_batch import replace_by_flags
    from megatron_neobert.model.flops import count_parameters
    from megatron_neobert.model.gpus import find_gpu
    from megatron_neobert.model.kernels import check_hardware, choose_kernels, engine_attention

    torch.set_num_threads(arguments.threads)
    settings = replace_by_flags(build_settings(arguments, folder), flags, world_size=1)
    check_hardware(settings)  # before Megatron is imported: it imports any package that is called apex

    from benchmarks.step_layouts import Reference
    from megatron_neobert.runtime import distributed
    from megatron_neobert.training.setup import build_run, join

    run = build_run(settings, *join(settings))
    reference = None
    if "reference" in arguments.layouts:
        reference = Reference(settings, run.device, vocab_size=arguments.vocab_size)
    bench = Bench(run, reference)
    on_gpu = run.device.type == "cuda"
    device = torch.cuda.get_device_name(run.device) if on_gpu else f"{arguments.threads} CPU thread(s)"
    parameters = count_parameters(settings.model, vocab_size=arguments.vocab_size).total
    kernels = choose_kernels(settings).summary
    print(f"{arguments.num_layers} x {arguments.hidden_size}, {parameters:,} parameters, {device}", flush=True)
    print(kernels, flush=True)

    timings: list[Timing] = []
    for seq_length in arguments.seq_length:
        for number, passes in enumerate(steps_in_each_layout(run, seq_length, arguments)):
            steps = [bench.time_step(seq_length, layout, passes) for layout in arguments.layouts]
            timings += steps if number else []  # the first steps allocate what later ones reuse
    inside: dict[str, Any] = {}
    if arguments.profile:
        step = partial(bench.time_step, seq_length, "packed", passes)
        inside = {"waits": find_waits(step) if on_gpu else None, "profile": profile_step(step, on_gpu=on_gpu)}
    distributed.shut_down()

    gpu = find_gpu(device) if on_gpu and arguments.bf16 else None
    peak = arguments.peak_tflops or (None if gpu is None else gpu.bf16_tflops)
    table = summarise(timings, peak_tflops=peak)
    print_table(table)
    if reference is not None:
        print(f"losses within {largest_loss_gap(timings):.1e} of the reference's")
    if arguments.profile:
        print_table(inside["profile"])
        print(f"waits for the GPU: {inside['waits'] if on_gpu else 'there is none'}")
    machine = describe_machine(PACKAGES) | {"device": device, "kernels": kernels}
    figures: dict[str, Any] = {"machine": machine, "attention": engine_attention(), "parameters": parameters}
    given = {**{key: str(value) for key, value in vars(arguments).items()}, "flags of a run": flags}
    figures |= {"table": table, "steps": [asdict(one) for one in timings], **inside, "arguments": given}
    write_figures(arguments.output, figures)
    return 0


def steps_in_each_layout(run: Any, seq_length: int, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield steps in rows of this length, each in all layouts: one to warm up, then the rounds."""
    from benchmarks.step_layouts import passes_in_each_layout

    rows, rows_per_step = rows_of_batch(seq_length, arguments)
    stream = run.training_stream.streams[0]
    settings = replace(stream.settings, seq_length=seq_length, micro_batch_size=rows, global_batch_size=rows_per_step)
    stream = replace(stream, settings=settings)  # the model does not depend on the length
    for _, batches in zip(range(arguments.rounds + 1), stream.steps(), strict=False):
        yield passes_in_each_layout(batches, arguments.micro_batch_tokens)


@dataclass(frozen=True)
class Bench:
    """Both models, and how a step of theirs is measured."""

    run: Any  # megatron_neobert.state.Run
    reference: Any  # benchmarks.step_layouts.Reference; None where it is left out, and weights are those of the run

    def time_step(self, seq_length: int, layout: str, passes: dict[str, Any]) -> Timing:
        """Run one step, from the reference's weights where there is one."""
        import torch

        from megatron_neobert.training.step import train_step

        on_gpu, clock = self.run.device.type == "cuda", time.process_time
        if layout != "reference" and self.reference is not None:
            self.reference.give_weights(self.run)
        if on_gpu:
            clock = time.perf_counter
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = clock()
        if layout == "reference":
            loss = self.reference.step(passes["reference"])
        else:
            loss = train_step(self.run, passes[layout]).sums.mean_loss  # a number: the device has finished
        seconds = clock() - start
        batches = passes["packed" if layout == "packed" else "padded"].micro_batches
        tokens, capacity = (sum(one.real_tokens for one in batches), sum(one.tokens_t.numel() for one in batches))
        print(
            f"{seq_length} {layout} | {tokens:,} of {capacity:,} tokens | {tokens / seconds:,.0f} tokens/s | "
            f"loss {loss:.6f}",
            flush=True,
        )
        return Timing(
            seq_length=seq_length,
            layout=layout,
            tokens=tokens,
            capacity=capacity,
            flops=tokens * flops_per_token(self.run, passes["lengths"]),
            seconds=seconds,
            loss=loss,
            peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
        )


def find_waits(step: Callable[[], Any]) -> dict[str, int]:
    """Return how often a step waits for the GPU by line of Python; calls named synchronize are not among them."""
    import torch

    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines = (f"{Path(one.filename).name}:{one.lineno}" for one in caught if _WAITED in str(one.message))
    return dict(Counter(lines))


def profile_step(step: Callable[[], Any], *, on_gpu: bool, rows: int = 30) -> list[dict[str, Any]]:
    """Return the operations that take longest in a step, those that start no other counted alone.

    Returns:
        Name, calls, milliseconds of the GPU (of the CPU without one) and percent of all, the longest first; on a GPU
        also the calls of CUDA's own functions that wait for it.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as found:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    events = found.key_averages()

    def microseconds(event: Any) -> float:
        return float(event.self_device_time_total if on_gpu else event.self_cpu_time_total)

    total = sum(map(microseconds, events)) or 1.0
    longest = sorted(events, key=microseconds, reverse=True)[:rows]
    waiting = [event for event in events if on_gpu and event.key.startswith("cuda") and "ynchronize" in event.key]
    return [
        {
            "operation": event.key[:100],
            "calls": event.count,
            "ms": microseconds(event) / 1e3,
            "% of all": 100 * microseconds(event) / total,
        }
        for event in dict.fromkeys([*longest, *waiting])
    ]


def summarise(timings: list[Timing], *, peak_tflops: float | None) -> list[dict[str, Any]]:
    """Return one row per length and layout: medians, and the speed of the packed step of the same round."""
    table = []
    for seq_length, layout in dict.fromkeys((timing.seq_length, timing.layout) for timing in timings):
        of_length = [timing for timing in timings if timing.seq_length == seq_length]
        packed = [timing for timing in of_length if timing.layout == "packed"]
        group = [timing for timing in of_length if timing.layout == layout]
        tflops = statistics.median(timing.flops / timing.seconds for timing in group) / 1e12
        used = sum(timing.tokens for timing in group) / sum(timing.capacity for timing in group)
        table.append(
            {
                "row": seq_length,
                "layout": layout,
                "% unused": 100 * (1 - used),
                "tokens/s": statistics.median(timing.tokens / timing.seconds for timing in group),
                "TFLOP/s": tflops,
                "% MFU": None if peak_tflops is None else 100 * tflops / peak_tflops,
                "peak GiB": max(timing.peak_bytes or 0 for timing in group) / (1 << 30) or None,
                "packed is faster by": statistics.median(
                    other.seconds / ours.seconds for ours, other in zip(packed, group, strict=True)
                ),
            }
        )
    return table


def largest_loss_gap(timings: list[Timing]) -> float:
    """Return the largest relative gap between a step's loss and the reference's in the same round."""
    references = [timing.loss for timing in timings if timing.layout == "reference"]
    layouts = dict.fromkeys(timing.layout for timing in timings)
    others = ([timing.loss for timing in timings if timing.layout == layout] for layout in layouts)
    return max(abs(loss / theirs - 1) for losses in others for loss, theirs in zip(losses, references, strict=True))


def build_settings(arguments: argparse.Namespace, folder: Path) -> Settings:
    """Write the corpus, and return the settings of this project's side at the longest row."""
    from benchmarks.shared import write_corpus

    longest = max(arguments.seq_length)
    prefix, vocabulary = write_corpus(
        folder,
        documents=DOCUMENTS,
        median_tokens=arguments.median_tokens,
        longest=longest,
        vocab_size=arguments.vocab_size,
    )
    rows, rows_per_step = rows_of_batch(longest, arguments)
    return Settings(
        model=ModelConfig(
            num_layers=arguments.num_layers,
            hidden_size=arguments.hidden_size,
            num_attention_heads=arguments.num_attention_heads,
            max_position_embeddings=longest,
        ),
        data=DataConfig(data_path=(prefix,), tokenizer_model=vocabulary, seq_length=longest, split="1", num_workers=0),
        optimizer=OptimizerConfig(lr=LEARNING_RATE, min_lr=LEARNING_RATE, lr_decay_style="constant", lr_warmup_iters=0),
        training=TrainingConfig(
            micro_batch_size=rows, global_batch_size=rows_per_step, bf16=arguments.bf16, eval_iters=0
        ),
    )


def rows_of_batch(seq_length: int, arguments: argparse.Namespace) -> tuple[int, int]:
    """Return the rows per pass and per step, at least one."""
    rows = max(1, arguments.micro_batch_tokens // seq_length)
    return rows, rows * max(1, arguments.global_batch_tokens // (rows * seq_length))


def flops_per_token(run: Any, lengths: list[int]) -> float:
    """Return the FLOPs of forward and backward per token of documents of these lengths."""
    from megatron_neobert.model.flops import training_flops_per_token

    length_of_a_tokens_document = sum(length * length for length in lengths) / sum(lengths)
    return training_flops_per_token(
        run.settings, vocab_size=run.tokenizer.vocab_size, document_tokens=length_of_a_tokens_document
    )


if __name__ == "__main__":
    run_command(main)
