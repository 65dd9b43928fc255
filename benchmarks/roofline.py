"""Derive by arithmetic how fast a step of the 28 x 768 model can be on one H100 or H200.

    python benchmarks/roofline.py --document-tokens 1024

Divides the work per token by rates of the GPU. FLOPs come from megatron_neobert/model/flops.py; bytes were counted by
tests/gpu_path and are in docs/performance.md; bytes of FP8 casts follow from shapes. The calculation assumes that
nothing overlaps and that no kernel waits for the host. Nothing is measured; a real step is slower.
"""

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, before an installed package

from megatron_neobert.cli import Parser
from megatron_neobert.config.schema import Settings
from megatron_neobert.errors import run_command
from megatron_neobert.model.flops import training_flops_per_token

PERFORMANCE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
TOKENS_PER_STEP = 2 * 65_536  # in the counted step
VOCAB_SIZE, VOCAB_PADDED = 30_522, 30_592  # bert-base-uncased's, and padded to a multiple of 128
BF16_PEAK = 989e12  # FLOP/s of both GPUs, from the data sheets
GEMM = 650e12  # FLOP/s of bf16 products of width 768, estimated as four fifths of the rate at 8192^3
BANDWIDTH = {"H100": 2.8e12, "H200": 4.0e12}  # bytes/s, estimated as five sixths of the data sheets (3.35, 4.8)
# TFLOP/s forward and backward by document length, on an H100 with heads of 64, without a mask, in bf16.
# Source: FlashAttention-3, arXiv 2407.08608, figures 5 and 6, read from the charts. torch's packed kernel is FA2, or
# FA3 if its package is installed.
ATTENTION = {
    "FA2": {512: (282, 198), 1024: (306, 238), 2048: (318, 264), 4096: (321, 280)},
    "FA3": {512: (333, 272), 1024: (392, 363), 2048: (460, 422), 4096: (476, 450)},
    "cuDNN": {512: (335, 266), 1024: (373, 348), 2048: (395, 395), 4096: (408, 420)},
}
# Speed-up of the products, and bytes moved per value that is cast: a read in bf16, two FP8 writes (by rows and by
# columns), and another read if the scale depends on the tensor itself.
# Source: Transformer Engine's examples/gemm_profiling measures 1.9 at width 4096; the values for 768 are estimates.
FP8 = {"delayed": (1.6, 4), "tensorwise": (1.6, 6), "blockwise": (1.5, 6)}
# Patterns of the counted operations by part of a step. All others are elementwise: norms, rotary, SwiGLU, adds.
PARTS = {
    "products": r"mm$|generic_gemm",
    "attention": r"torch_attn|fused_attn",
    "loss": r"compiled (logits_gradient|sum_exponentials|largest_logits)",
    "weight gradients": r"add_\.Tensor",
    "optimizer": r"fused_adamw_|(foreach_)?mul_\.|zero_|copy_|c10d",
    "other": r"others|sum\.dim_IntList",
}


@dataclass(frozen=True)
class Step:
    """Implementation of a training step."""

    name: str
    attention: str  # a key of ATTENTION
    bytes_by_part: dict[str, float]  # per token
    fp8: str | None = None  # a key of FP8


def main() -> None:
    """Print the table."""
    parser = Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--document-tokens", type=int, default=1024, metavar="N", help="tokens per document (1024)")
    print(to_table(parser.parse_args().document_tokens))


def counted_bytes(layers: str) -> dict[str, float]:
    """Return the bytes that a step moves per token, by part of the step: the keys of PARTS, and "elementwise".

    Args:
        layers: "local" or "Transformer Engine". The numbers are read from the table of docs/performance.md.
    """
    text = PERFORMANCE.read_text(encoding="utf-8")
    count = text.split("<!-- counted by tests/gpu_path -->")[1].split("<!-- end of the count -->")[0]
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in count.strip().splitlines())
    column = head.index(f"{layers}: kernels") + 1
    parts = dict.fromkeys([*PARTS, "elementwise"], 0.0)
    for operation, *cells in rows:
        if operation != "all":
            part = next((name for name, pattern in PARTS.items() if re.match(pattern, operation)), "elementwise")
            parts[part] += float(cells[column - 1] or 0) * 1e9 / TOKENS_PER_STEP
    return parts


def steps() -> list[Step]:
    """Return the implementations of a training step, in the order of the rows of the printed table."""
    in_bf16 = Step("Transformer Engine", "cuDNN", counted_bytes("Transformer Engine"))
    local = Step("local layers", "FA2", counted_bytes("local"))
    return [
        local,
        replace(local, name="local layers, FA3", attention="FA3"),
        in_bf16,
        *(replace(in_bf16, name=f"Transformer Engine, FP8 {recipe}", fp8=recipe) for recipe in FP8),
    ]


def microseconds(step: Step, document_tokens: int, bandwidth: float) -> dict[str, float]:
    """Return microseconds per token by part of a step on documents of `document_tokens`. `bandwidth` is in bytes/s."""
    settings = Settings()
    model, headless = settings.model, settings.with_section("data", mask_prob=0.0)
    products = training_flops_per_token(headless, vocab_size=VOCAB_SIZE, document_tokens=0)
    attention = training_flops_per_token(headless, vocab_size=VOCAB_SIZE, document_tokens=document_tokens) - products
    head = training_flops_per_token(settings, vocab_size=VOCAB_PADDED, document_tokens=0) - products
    gain, bytes_per_value = FP8[step.fp8] if step.fp8 else (1.0, 0)
    # Values that are cast: the inputs of the four products of a layer, and the gradients of their outputs.
    values = model.num_layers * (3 * model.hidden_size + model.ffn_width + 5 * model.hidden_size + 2 * model.ffn_width)
    rates = ATTENTION[step.attention]
    forward, backward = rates[min(rates, key=lambda length: abs(length - document_tokens))]
    seconds = {name: size / bandwidth for name, size in step.bytes_by_part.items()}
    return {
        "products": 1e6 * products / (GEMM * gain),
        # A third of the model's FLOPs are forward. The backward pass of a kernel has 2.5 times the forward FLOPs, while
        # the model counts twice.
        "attention": 1e-6 * attention / 3 * (1 / forward + 2.5 / backward),
        "elementwise": 1e6 * seconds["elementwise"],
        "FP8 casts": 1e6 * values * bytes_per_value / bandwidth,
        "head, loss": 1e6 * (head / GEMM + seconds["loss"]),
        "optimizer, others": 1e6 * (seconds["optimizer"] + seconds["weight gradients"] + seconds["other"]),
    }


def to_table(document_tokens: int) -> str:
    """Return a Markdown table with a row per GPU and implementation: µs per token by part and in all, tokens/s, MFU."""
    model_flops = training_flops_per_token(Settings(), vocab_size=VOCAB_SIZE, document_tokens=document_tokens)
    lines: list[list[str]] = []
    for gpu, bandwidth in BANDWIDTH.items():
        for step in steps():
            parts = microseconds(step, document_tokens, bandwidth)
            total = sum(parts.values())
            if not lines:
                header = ["GPU", "layers", *parts, "µs per token", "tokens/s", "MFU"]
                lines += [header, ["---"] * len(header)]
            rate, mfu = f"{1e3 / total:,.0f}k", f"{model_flops * 1e6 / total / BF16_PEAK:.0%}"
            shown = (f"{time:.2f}" for time in parts.values())
            lines.append([gpu, step.name, *shown, f"{total:.2f}", rate, mfu])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    run_command(main)
