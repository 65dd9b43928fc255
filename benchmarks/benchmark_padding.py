"""Measure the speed of the exported class on padded batches, with and without padding, beside transformers' classes.

    python benchmarks/benchmark_padding.py
    python benchmarks/benchmark_padding.py --device cuda --dtype bfloat16

Each class is a sequence classifier of the same depth and width, with random weights and SDPA, so that all compute the
same products per token. All classes take the same batches in turns. Lengths are log-normal, like RefinedWeb's (median
368, at most 1,024 tokens) and GLUE's (mean 25, at most 128). Tokens per second do not count padding.
"""

import argparse
import math
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, before an installed package

from benchmarks.shared import SIGMA, build_parser, measure_in_turns, positive, report
from megatron_neobert.errors import run_command

PADDED, UNPADDED = "neobert, padded", "neobert, unpadded"
LENGTHS = {"RefinedWeb": (368, SIGMA, 1024), "GLUE": (22, 0.5, 128)}  # median, sigma, longest
VOCABULARY = 4096  # small, so that the update of the embedding does not hide the blocks
WARM_UP = 1  # rounds that are not counted


def main() -> None:
    parser = build_parser(__doc__, rounds=5)
    add = parser.add_argument
    add("--device", default="cpu", help="torch device (%(default)s)")
    add("--dtype", default="float32", help="type of weights and activations (%(default)s)")
    add("--num-layers", type=positive, metavar="N", help="default: 4 on the CPU, else 28")
    add("--hidden-size", type=positive, metavar="N", help="multiple of 64; default: 256 on the CPU, else 768")
    arguments = parser.parse_args()
    layers, hidden, long_rows = (4, 256, 8) if arguments.device == "cpu" else (28, 768, 32)
    models = build_models(arguments, arguments.num_layers or layers, arguments.hidden_size or hidden)
    rows = {"RefinedWeb": long_rows, "GLUE": 32}
    table = [line for name in LENGTHS for line in measure(models, name, rows[name], arguments)]
    report(arguments.output, ("torch", "transformers"), {"table": table})


def build_models(arguments: argparse.Namespace, layers: int, hidden: int) -> dict[str, Any]:
    """Return name -> classifier. The names PADDED and UNPADDED share one NeoBERT model."""
    import torch
    import transformers as hf

    from megatron_neobert.huggingface.auto_classes import register_neobert
    from megatron_neobert.huggingface.modeling_neobert import NeoBERTConfig

    register_neobert()
    heads, wide, gated = hidden // 64, 4 * hidden, 8 * hidden // 3
    common: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    common |= {"vocab_size": VOCABULARY, "max_position_embeddings": 1024, "pad_token_id": 0}
    ids: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    configs = {
        UNPADDED: NeoBERTConfig(**common, intermediate_size=wide),
        "EuroBERT": hf.EuroBertConfig(
            **common, **ids, mask_token_id=4, num_key_value_heads=heads, intermediate_size=gated
        ),
        "ModernBERT": hf.ModernBertConfig(**common, **ids, intermediate_size=gated),
        "BERT": hf.BertConfig(**common, intermediate_size=wide),
    }
    torch.manual_seed(0)
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    place = (arguments.device, getattr(torch, arguments.dtype))
    build = hf.AutoModelForSequenceClassification.from_config
    models = {name: build(config, attn_implementation="sdpa").to(*place) for name, config in configs.items()}
    return {PADDED: models[UNPADDED], **models}


def build_batch(rng: random.Random, lengths: str, rows: int, device: str) -> dict[str, Any]:
    """Return a batch of random documents with alternating labels, padded to the longest document."""
    import torch

    median, sigma, longest = LENGTHS[lengths]
    sizes = torch.tensor([min(int(rng.lognormvariate(math.log(median), sigma)) + 3, longest) for _ in range(rows)])
    mask = (torch.arange(int(sizes.max())) < sizes[:, None]).long()
    tokens = torch.randint(5, VOCABULARY, mask.shape, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
    batch = {"input_ids": tokens * mask, "attention_mask": mask, "labels": torch.arange(rows) % 2}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def measure(models: dict[str, Any], lengths: str, rows: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a table row for each model: median real tokens per second, and the median speed-up over PADDED."""
    import torch

    from megatron_neobert.huggingface import modeling_neobert

    # On the CPU, seconds of one core, which other processes of the machine do not affect.
    on_gpu = arguments.device.startswith("cuda")
    clock, wait = (time.perf_counter, torch.cuda.synchronize) if on_gpu else (time.process_time, lambda: None)
    rng, rounds = random.Random(0), arguments.rounds + WARM_UP
    batches = [build_batch(rng, lengths, rows, arguments.device) for _ in range(rounds)]
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-6) for name, model in models.items()}

    def forward(name: str, batch: dict[str, Any]) -> None:
        with torch.no_grad():
            models[name].eval()(**batch)

    def train(name: str, batch: dict[str, Any]) -> None:
        models[name].train()(**batch).loss.backward()
        optimizers[name].step()
        optimizers[name].zero_grad()

    def take_turn(number: int, name: str) -> list[float]:
        """Return [forward, training] tokens per second of model `name` on batch `number`."""
        batch, speeds = batches[number - 1], []
        may_unpad = (lambda *_: False) if name == PADDED else modeling_neobert.may_unpad
        with patch.object(modeling_neobert, "may_unpad", may_unpad):
            for step in (forward, train):
                wait()
                start = clock()
                step(name, batch)
                wait()
                speeds.append(int(batch["attention_mask"].sum()) / (clock() - start))
        return speeds

    measured = measure_in_turns(models, take_turn, rounds=rounds)[WARM_UP:]
    padding = statistics.mean(1 - batch["attention_mask"].float().mean().item() for batch in batches)
    print(f"{lengths}: {rows} documents per batch, {100 * padding:.0f} % padding", flush=True)
    table = []
    for name in models:
        line: dict[str, Any] = {"lengths": lengths, "class": name}
        for index, label in enumerate(("forward", "training")):
            line[f"{label}, tokens/s"] = statistics.median(speeds[name][index] for speeds in measured)
            line[f"x {label}"] = statistics.median(speeds[name][index] / speeds[PADDED][index] for speeds in measured)
        table.append(line)
    return table


if __name__ == "__main__":
    run_command(main)
