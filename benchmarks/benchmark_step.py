"""Measure the speed of a training step against the padded reference.

    python benchmarks/benchmark_step.py --seq-length 512 1024

Trains the same documents with the same masks from the same weights in three layouts, in turns:

    packed      this project, with packed sequences
    padded      this project, with one document per row
    reference   plain PyTorch: SDPA, AdamW, padded to the longest document, decoder at every position

The losses are compared. Document lengths are about those of web pages, truncated at --seq-length. Seconds are CPU
seconds on a CPU and wall seconds on a GPU. Tokens and MFU do not count padding.
"""

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, before an installed package

from megatron_neobert.cli import Parser
from megatron_neobert.config.schema import DataConfig, ModelConfig, OptimizerConfig, Settings, TrainingConfig
from megatron_neobert.errors import ConfigError, run_command

LEARNING_RATE = 1e-4  # does not affect speed or memory
LAYOUTS = ("packed", "padded", "reference")
DOCUMENTS = 4096  # one window, so packing is as efficient as with a large corpus
PACKAGES = ("torch", "megatron-core", "transformer-engine", "flash-attn", "flash-attn-4")
_WAIT_WARNING = "called a synchronizing CUDA operation"  # of torch


@dataclass(frozen=True)
class Timing:
    """Figures of one step in one layout."""

    seq_length: int
    layout: str
    tokens: int  # without padding
    capacity: int  # tokens, padding included
    flops: float  # without padding
    seconds: float
    loss: float  # nats per masked token
    peak_bytes: int | None  # peak memory on the GPU, including both models; None on a CPU


def main() -> int:
    """Parse the options and measure; print one line per step, then the table. Return exit code 0."""
    from megatron_neobert.config.cli import run_flags

    parser = Parser((__doc__ or "").partition("\n")[0], also=run_flags())
    add = parser.add_argument
    add_int = partial(add, type=int, metavar="N")
    add_int("--num-layers", default=6, help="layers of the model (%(default)s)")
    add_int("--hidden-size", default=384, help="width of the model (%(default)s)")
    add_int("--num-attention-heads", default=6, help="attention heads (%(default)s)")
    add_int("--vocab-size", default=30_522, help="tokens in the vocabulary (%(default)s)")
    add_int("--seq-length", nargs="+", default=[1024], help="tokens per packed sequence; several are measured (1024)")
    add_int("--micro-batch-tokens", default=4096, help="token capacity of a forward pass (%(default)s)")
    add_int("--global-batch-tokens", default=8192, help="token capacity of a packed step (%(default)s)")
    add_int("--median-tokens", default=368, help="median tokens of a document (%(default)s)")
    add_int("--rounds", default=3, help="steps in each layout, after one warm-up step (%(default)s)")
    add_int("--threads", default=1, help="CPU threads (%(default)s)")
    add("--bf16", action="store_true", help="use bfloat16; the reference uses autocast")
    add("--peak-tflops", type=float, metavar="X", help="peak of the GPU, for MFU; known for A100, H100 SXM and H200")
    add("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="layouts besides packed (default: all)")
    add("--profile", action="store_true", help="list a packed step's operations, and the lines that wait for a GPU")
    add("--output", type=Path, metavar="FILE", help="write all figures as JSON to this file")
    arguments, flags = parser.parse_known_args()
    if problems := parser.unknown_flags():
        raise ConfigError(problems)
    arguments.layouts = sorted({"packed", *arguments.layouts}, key=LAYOUTS.index)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        return measure(arguments, flags, Path(folder))


def measure(arguments: argparse.Namespace, flags: list[str], folder: Path) -> int:
    """Train the layouts in turns at every length, and print their speeds. Return exit code 0.

    The figures are written to `arguments.output` (None: not written), and a corpus is written to `folder`. `flags` are
    flags of `neobert train`, which replace settings.
    """
    import torch

    from benchmarks.shared import describe_machine, print_table, write_figures
    from megatron_neobert.config.cli import parse_command_line, write_record
    from megatron_neobert.model.flops import count_parameters
    from megatron_neobert.model.gpus import find_gpu
    from megatron_neobert.model.kernels import check_hardware, choose_kernels, engine_attention

    torch.set_num_threads(arguments.threads)
    record = folder / "settings.yaml"
    write_record(build_settings(arguments, folder), record)
    settings = parse_command_line(["--config", str(record), *flags], world_size=1).settings
    check_hardware(settings)  # before Megatron is imported: it imports any package that is called apex

    from benchmarks.step_layouts import Reference
    from megatron_neobert.runtime import distributed
    from megatron_neobert.training.setup import build_run, join

    run = build_run(settings, *join(settings))
    reference = None
    if "reference" in arguments.layouts:
        reference = Reference(settings, run.device, vocab_size=arguments.vocab_size)
    on_gpu = run.device.type == "cuda"
    device = torch.cuda.get_device_name(run.device) if on_gpu else f"{arguments.threads} CPU thread(s)"
    parameters = count_parameters(settings.model, vocab_size=arguments.vocab_size).total
    kernels = choose_kernels(settings).summary
    print(f"{arguments.num_layers} x {arguments.hidden_size}, {parameters:,} parameters, {device}", flush=True)
    print(kernels, flush=True)

    timings: list[Timing] = []
    for seq_length in arguments.seq_length:
        for number, passes in enumerate(steps_in_each_layout(run, seq_length, arguments)):
            steps = [time_step(run, reference, seq_length, layout, passes) for layout in arguments.layouts]
            # The first steps allocate memory that later steps reuse.
            timings += steps if number else []
    profiled: dict[str, Any] = {}
    if arguments.profile:
        step = partial(time_step, run, reference, seq_length, "packed", passes)
        profiled = {"waits": find_waits(step) if on_gpu else None, "profile": profile_step(step, on_gpu=on_gpu)}
    if run.graph is not None:
        run.graph.free()
    distributed.shut_down()

    gpu = find_gpu(device) if on_gpu and arguments.bf16 else None
    peak = arguments.peak_tflops or (None if gpu is None else gpu.bf16_tflops)
    table = summarise(timings, peak_tflops=peak)
    print_table(table)
    if reference is not None:
        print(f"largest relative difference from the reference's loss: {largest_loss_gap(timings):.1e}")
    if arguments.profile:
        print_table(profiled["profile"])
        print(f"waits for the GPU: {profiled['waits'] if on_gpu else 'no GPU'}")
    machine = describe_machine(PACKAGES) | {"device": device, "kernels": kernels}
    figures: dict[str, Any] = {"machine": machine, "attention": engine_attention(), "parameters": parameters}
    options = {**{key: str(value) for key, value in vars(arguments).items()}, "flags of a run": flags}
    figures |= {"table": table, "steps": [asdict(timing) for timing in timings], **profiled, "arguments": options}
    write_figures(arguments.output, figures)
    return 0


def steps_in_each_layout(run: Any, seq_length: int, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the inputs of `arguments.rounds` + 1 steps, each {layout: batches} from `passes_in_each_layout`.

    The first step is for warming up. Batch sizes depend on `seq_length`. Nothing is trained.
    """
    from benchmarks.step_layouts import passes_in_each_layout

    micro, total = batch_sizes(seq_length, arguments)
    settings = run.settings.with_section("training", micro_batch_size=micro, global_batch_size=total)
    # The model does not depend on the length.
    stream = run.training_stream.with_settings(settings.with_section("data", seq_length=seq_length))
    for _, batches in zip(range(arguments.rounds + 1), stream.rank_batches(), strict=False):
        yield passes_in_each_layout(batches, arguments.micro_batch_tokens)


def time_step(run: Any, reference: Any, seq_length: int, layout: str, passes: dict[str, Any]) -> Timing:
    """Train one step in one layout, print a line, and return its figures.

    Args:
        run: megatron_neobert.state.Run.
        reference: benchmarks.step_layouts.Reference or None. If given, its weights are copied to `run` before a step in
            another layout than "reference".
        passes: Batches of the step in every layout, from `steps_in_each_layout`.
    """
    import torch

    from megatron_neobert.model.flops import training_flops_per_token
    from megatron_neobert.training.step import train_step

    on_gpu, clock = run.device.type == "cuda", time.process_time
    if layout != "reference" and reference is not None:
        reference.copy_weights_to(run)
    if on_gpu:
        clock = time.perf_counter
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = clock()
    # Both losses are Python numbers, so the device has finished.
    if layout == "reference":
        loss = reference.step(passes["reference"])
    else:
        loss = train_step(run, passes[layout]).sums.mean_loss
    seconds = clock() - start
    batches = passes["packed" if layout == "packed" else "padded"].micro_batches
    tokens, capacity = sum(batch.real_tokens for batch in batches), sum(batch.tokens_t.numel() for batch in batches)
    print(
        f"{seq_length} {layout} | {tokens:,} of {capacity:,} tokens | {tokens / seconds:,.0f} tokens/s | "
        f"loss {loss:.6f}",
        flush=True,
    )
    lengths = passes["lengths"]
    # Tokens of the document of the average token.
    document_tokens = sum(length * length for length in lengths) / sum(lengths)
    flops_per_token = training_flops_per_token(
        run.settings, vocab_size=run.tokenizer.vocab_size, document_tokens=document_tokens
    )
    return Timing(
        seq_length=seq_length,
        layout=layout,
        tokens=tokens,
        capacity=capacity,
        flops=tokens * flops_per_token,
        seconds=seconds,
        loss=loss,
        peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
    )


def find_waits(step: Callable[[], Any]) -> dict[str, int]:
    """Run a step on a GPU. Return {"FILE.py:LINE": waits for the GPU}. Explicit synchronize calls are not counted."""
    import torch

    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines = (
        f"{Path(warning.filename).name}:{warning.lineno}" for warning in caught if _WAIT_WARNING in str(warning.message)
    )
    return dict(Counter(lines))


def profile_step(step: Callable[[], Any], *, on_gpu: bool) -> list[dict[str, Any]]:
    """Run a step in torch's profiler. Return the 30 operations, on a GPU kernels, that take longest.

    Returns:
        Rows with "operation", "calls", "ms" (without operations that it calls) and "% of all", the longest first. With
        `on_gpu`, rows of CUDA functions that wait for the GPU follow; only their "calls" are meaningful.
    """
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    all_events = profiler.key_averages()
    # An operation has the time of its kernels, which are events, too. Each event has its own DeviceType object.
    device_type = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [event for event in all_events if event.device_type == device_type]

    def microseconds(event: Any) -> float:
        return float(event.self_device_time_total if on_gpu else event.self_cpu_time_total)

    total = sum(map(microseconds, events)) or 1.0
    longest = sorted(events, key=microseconds, reverse=True)[:30]
    waiting = [event for event in all_events if on_gpu and event.key.startswith("cuda") and "ynchronize" in event.key]
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
    """Return a row per length and layout: medians, and the median factor by which packed was faster in a round."""
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
                    timing.seconds / ours.seconds for ours, timing in zip(packed, group, strict=True)
                ),
            }
        )
    return table


def largest_loss_gap(timings: list[Timing]) -> float:
    """Return the largest relative difference between the loss of a step and the reference's in the same round."""
    references = [timing.loss for timing in timings if timing.layout == "reference"]
    layouts = dict.fromkeys(timing.layout for timing in timings)
    by_layout = ([timing.loss for timing in timings if timing.layout == layout] for layout in layouts)
    return max(abs(loss / ref - 1) for losses in by_layout for loss, ref in zip(losses, references, strict=True))


def build_settings(arguments: argparse.Namespace, folder: Path) -> Settings:
    """Write a corpus to `folder`, and return the settings of a run on it at the largest --seq-length."""
    from benchmarks.shared import write_corpus

    longest = max(arguments.seq_length)
    prefix, vocabulary = write_corpus(
        folder,
        documents=DOCUMENTS,
        median_tokens=arguments.median_tokens,
        longest=longest,
        vocab_size=arguments.vocab_size,
    )
    micro, total = batch_sizes(longest, arguments)
    return Settings(
        model=ModelConfig(
            num_layers=arguments.num_layers,
            hidden_size=arguments.hidden_size,
            num_attention_heads=arguments.num_attention_heads,
            max_position_embeddings=longest,
        ),
        data=DataConfig(data_path=(prefix,), tokenizer_model=vocabulary, seq_length=longest, split="1", num_workers=0),
        optimizer=OptimizerConfig(lr=LEARNING_RATE, min_lr=LEARNING_RATE, lr_decay_style="constant", lr_warmup_iters=0),
        training=TrainingConfig(micro_batch_size=micro, global_batch_size=total, bf16=arguments.bf16, eval_iters=0),
    )


def batch_sizes(seq_length: int, arguments: argparse.Namespace) -> tuple[int, int]:
    """Return the packed sequences per micro-batch and per global batch, each at least 1."""
    micro = max(1, arguments.micro_batch_tokens // seq_length)
    return micro, micro * max(1, arguments.global_batch_tokens // (micro * seq_length))


if __name__ == "__main__":
    run_command(main)
