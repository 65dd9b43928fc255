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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, before an installed package

from benchmarks.shared import build_parser, report, write_corpus
from megatron_neobert.config.schema import Settings
from megatron_neobert.errors import ConfigError, run_command

LAYOUTS = ("packed", "padded", "reference")
DOCUMENTS = 4096  # one window, so packing is as efficient as with a large corpus
PACKAGES = ("torch", "megatron-core", "transformer-engine", "flash-attn", "flash-attn-4")
_WAIT_WARNING = "called a synchronizing CUDA operation"  # of torch


@dataclass(frozen=True)
class Timing:
    """Figures of a training step in one layout."""

    seq_length: int
    layout: str
    tokens: int  # without padding
    capacity: int  # tokens, padding included
    flops: float  # without padding
    seconds: float
    loss: float  # nats per masked token
    peak_bytes: int | None  # peak memory on the GPU, including both models; None on a CPU


def main() -> None:
    """Train in each layout in turns, at every length. Print a line for each step, then the table."""
    arguments, flags = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        settings = build_settings(arguments, flags, Path(folder))
        measure(settings, arguments, flags)


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and flags of `neobert train` to override settings. Raise ConfigError for unknown flags."""
    from megatron_neobert.config.cli import run_flags

    parser = build_parser(__doc__, rounds=3, also=run_flags())
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
    add_int("--threads", default=1, help="CPU threads (%(default)s)")
    add("--bf16", action="store_true", help="use bfloat16; the reference uses autocast")
    add("--peak-tflops", type=float, metavar="X", help="peak of the GPU, for MFU; known for A100, H100 SXM and H200")
    add("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="layouts besides packed (default: all)")
    add("--profile", action="store_true", help="list a packed step's operations, and the lines that wait for a GPU")
    arguments, flags = parser.parse_known_args()
    if problems := parser.unknown_flags():
        raise ConfigError(problems)
    arguments.layouts = sorted({"packed", *arguments.layouts}, key=LAYOUTS.index)
    return arguments, flags


def build_settings(arguments: argparse.Namespace, flags: list[str], folder: Path) -> Settings:
    """Write a corpus to `folder`, and return the settings of a run on this corpus, at the largest --seq-length."""
    from megatron_neobert.config.cli import parse_command_line

    longest = max(arguments.seq_length)
    prefix, vocabulary = write_corpus(
        folder,
        documents=DOCUMENTS,
        median_tokens=arguments.median_tokens,
        longest=longest,
        vocab_size=arguments.vocab_size,
    )
    micro, total = batch_sizes(longest, arguments)
    layers, hidden, heads = arguments.num_layers, arguments.hidden_size, arguments.num_attention_heads
    model = ("--num-layers", layers, "--hidden-size", hidden, "--num-attention-heads", heads)
    length = ("--seq-length", longest, "--max-position-embeddings", longest)
    data = ("--data-path", prefix, "--tokenizer-model", vocabulary, "--split", 1, "--num-workers", 0, "--eval-iters", 0)
    batch = ("--micro-batch-size", micro, "--global-batch-size", total, *(["--bf16"] if arguments.bf16 else []))
    # The rate does not affect speed or memory.
    rate = ("--lr", 1e-4, "--min-lr", 1e-4, "--lr-decay-style", "constant", "--lr-warmup-iters", 0)
    words = map(str, (*model, *length, *data, *batch, *rate))
    return parse_command_line([*words, *flags], world_size=1).settings


def batch_sizes(seq_length: int, arguments: argparse.Namespace) -> tuple[int, int]:
    """Return (packed sequences per micro-batch, packed sequences per global batch), each at least 1."""
    micro = max(1, arguments.micro_batch_tokens // seq_length)
    return micro, micro * max(1, arguments.global_batch_tokens // (micro * seq_length))


def measure(settings: Settings, arguments: argparse.Namespace, flags: list[str]) -> None:
    """Train, and print the speeds. Write all figures and `flags` to `arguments.output` unless it is None."""
    import torch

    from megatron_neobert.model.flops import count_parameters, find_gpu
    from megatron_neobert.model.kernels import check_hardware, choose_kernels, engine_attention

    torch.set_num_threads(arguments.threads)
    check_hardware(settings)  # before Megatron is imported: it imports any package that is called apex

    from benchmarks.step_layouts import Reference, passes_in_each_layout
    from megatron_neobert.runtime import distributed
    from megatron_neobert.training.setup import build_run, join

    run = build_run(settings, *join(settings))
    reference = None
    if "reference" in arguments.layouts:
        reference = Reference(settings, run.device, vocab_size=arguments.vocab_size)
    on_gpu = run.device.type == "cuda"
    device = torch.cuda.get_device_name(run.device) if on_gpu else f"{arguments.threads} CPU thread(s)"
    parameters = count_parameters(settings.model, vocab_size=arguments.vocab_size).total
    print(f"{arguments.num_layers} x {arguments.hidden_size}, {parameters:,} parameters", flush=True)

    rounds: list[dict[str, Timing]] = []
    for seq_length in arguments.seq_length:
        micro, total = batch_sizes(seq_length, arguments)
        of_length = run.settings.with_section("training", micro_batch_size=micro, global_batch_size=total)
        # The model does not depend on the length.
        stream = run.training_stream.with_settings(of_length.with_section("data", seq_length=seq_length))
        for number, batches in enumerate(islice(stream.rank_batches(), arguments.rounds + 1)):
            passes = passes_in_each_layout(batches, arguments.micro_batch_tokens)
            steps = {name: time_step(run, reference, seq_length, name, passes) for name in arguments.layouts}
            if number:  # the first steps allocate memory that later steps reuse
                rounds.append(steps)
    tables, waits = {}, {}
    if arguments.profile:
        step = partial(time_step, run, reference, seq_length, "packed", passes)
        waits = {"waits": find_waits(step) if on_gpu else None}
        tables["profile"] = profile_step(step, on_gpu=on_gpu)
    if run.graph is not None:
        run.graph.free()
    distributed.shut_down()

    gpu = find_gpu(device) if on_gpu and arguments.bf16 else None
    peak = arguments.peak_tflops or (None if gpu is None else gpu.bf16_tflops)
    options = {**{key: str(value) for key, value in vars(arguments).items()}, "flags of a run": flags}
    report(
        arguments.output,
        PACKAGES,
        {"table": summarise(rounds, peak_tflops=peak), **tables},
        machine={"device": device, "kernels": choose_kernels(settings).summary},
        attention=engine_attention(),
        parameters=parameters,
        steps=[asdict(timing) for steps in rounds for timing in steps.values()],
        arguments=options,
        **waits,
    )
    for name, waiting in waits.items():
        print(f"{name} for the GPU: {waiting if on_gpu else 'no GPU'}")
    if reference is not None:
        print(f"largest relative difference from the reference's loss: {largest_loss_gap(rounds):.1e}")


def time_step(run: Any, reference: Any, seq_length: int, layout: str, passes: dict[str, Any]) -> Timing:
    """Train one step in one layout, print a line, and return the step's figures.

    `reference` (a Reference) trains in the layout "reference", `run` (a Run) in all others. Before `run` trains, the
    reference's weights, if there is a reference, are copied to it. `passes` come from `passes_in_each_layout`.
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
    speed = f"{tokens / seconds:,.0f} tokens/s"
    print(f"{seq_length} {layout} | {tokens:,} of {capacity:,} tokens | {speed} | loss {loss:.6f}", flush=True)
    lengths, vocab_size = passes["lengths"], run.tokenizer.vocab_size
    # Tokens of the document of the average token.
    mean = sum(length * length for length in lengths) / sum(lengths)
    flops_per_token = training_flops_per_token(run.settings, vocab_size=vocab_size, document_tokens=mean)
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
    """Run a step on a GPU. Return "FILE.py:LINE" -> number of waits for the GPU, without explicit synchronize calls."""
    import torch

    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if _WAIT_WARNING in str(warning.message)]
    return dict(Counter(f"{Path(wait.filename).name}:{wait.lineno}" for wait in waits))


def profile_step(step: Callable[[], Any], *, on_gpu: bool) -> list[dict[str, Any]]:
    """Run a step in torch's profiler. Return a row for each of the 30 slowest operations (on a GPU: kernels).

    An operation's time excludes the operations that it calls. If `on_gpu`, rows for CUDA functions that wait for the
    GPU follow; in these rows, only "calls" is meaningful.
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


def summarise(rounds: list[dict[str, Timing]], *, peak_tflops: float | None) -> list[dict[str, Any]]:
    """Return a row for each length and layout: medians, and the median factor by which packed was faster in a round.

    A round contains a step of each layout, all at the same length.
    """
    table = []
    for seq_length, layout in dict.fromkeys(
        (step.seq_length, step.layout) for steps in rounds for step in steps.values()
    ):
        of_length = [steps for steps in rounds if steps["packed"].seq_length == seq_length]
        group = [steps[layout] for steps in of_length]
        tflops = statistics.median(step.flops / step.seconds for step in group) / 1e12
        used = sum(step.tokens for step in group) / sum(step.capacity for step in group)
        table.append(
            {
                "row": seq_length,
                "layout": layout,
                "% unused": 100 * (1 - used),
                "tokens/s": statistics.median(step.tokens / step.seconds for step in group),
                "TFLOP/s": tflops,
                "% MFU": None if peak_tflops is None else 100 * tflops / peak_tflops,
                "peak GiB": max(step.peak_bytes or 0 for step in group) / (1 << 30) or None,
                "packed is faster by": statistics.median(
                    steps[layout].seconds / steps["packed"].seconds for steps in of_length
                ),
            }
        )
    return table


def largest_loss_gap(rounds: list[dict[str, Timing]]) -> float:
    """Return the largest relative difference between any layout's loss and the reference's in the same round."""
    return max(abs(step.loss / steps["reference"].loss - 1) for steps in rounds for step in steps.values())


if __name__ == "__main__":
    run_command(main)
