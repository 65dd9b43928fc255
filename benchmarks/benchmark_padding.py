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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, before an installed package

from benchmarks.shared import SIGMA, describe_machine, in_turns, positive, print_table, write_figures
from megatron_neobert.cli import Parser
from megatron_neobert.errors import run_command

PADDED, UNPADDED = "neobert, padded", "neobert, unpadded"
LENGTHS = {"RefinedWeb": (368, SIGMA, 1024), "GLUE": (22, 0.5, 128)}  # median, sigma, longest
VOCABULARY = 4096  # small, so that the update of the embedding does not hide the blocks
WARM_UP = 1  # rounds that are not counted


def main() -> int:
    parser = Parser((__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--device", default="cpu", help="torch device (%(default)s)")
    add("--dtype", default="float32", help="type of weights and activations (%(default)s)")
    add("--num-layers", type=positive, metavar="N", help="default: 4 on the CPU, else 28")
    add("--hidden-size", type=positive, metavar="N", help="multiple of 64; default: 256 on the CPU, else 768")
    add("--rounds", type=positive, default=5, metavar="N", help="turns of each class; the table has medians")
    add("--output", type=Path, metavar="FILE", help="write all figures as JSON to this file")
    arguments = parser.parse_args()
    layers, hidden, long_rows = (4, 256, 8) if arguments.device == "cpu" else (28, 768, 32)
    models = build_models(arguments, arguments.num_layers or layers, arguments.hidden_size or hidden)
    rows = {"RefinedWeb": long_rows, "GLUE": 32}
    table = [line for name in LENGTHS for line in measure(models, name, rows[name], arguments)]
    print_table(table)
    write_figures(arguments.output, {"machine": describe_machine(("torch", "transformers")), "table": table})
    return 0


def build_models(arguments: argparse.Namespace, layers: int, hidden: int) -> dict[str, Any]:
    """Return a classifier per name; the two of NeoBERT are the same object."""
    import torch
    import transformers as hf

    from megatron_neobert.huggingface.modeling_neobert import NeoBERTConfig, NeoBERTForSequenceClassification

    heads, wide, gated = hidden // 64, 4 * hidden, 8 * hidden // 3
    common: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    common |= {"vocab_size": VOCABULARY, "max_position_embeddings": 1024, "pad_token_id": 0}
    ids: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    eurobert = hf.EuroBertConfig(**common, **ids, mask_token_id=4, num_key_value_heads=heads, intermediate_size=gated)
    kinds: dict[str, tuple[Any, Any]] = {
        UNPADDED: (NeoBERTForSequenceClassification, NeoBERTConfig(**common, intermediate_size=wide)),
        "EuroBERT": (hf.EuroBertForSequenceClassification, eurobert),
        "ModernBERT": (
            hf.ModernBertForSequenceClassification,
            hf.ModernBertConfig(**common, **ids, intermediate_size=gated),
        ),
        "BERT": (hf.BertForSequenceClassification, hf.BertConfig(**common, intermediate_size=wide)),
    }
    torch.manual_seed(0)
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    models = {}
    for name, (kind, config) in kinds.items():
        model = kind._from_config(config, attn_implementation="sdpa")
        models[name] = model.to(arguments.device, getattr(torch, arguments.dtype))
    return {PADDED: models[UNPADDED], **models}


def build_batch(rng: random.Random, lengths: str, rows: int, device: str) -> dict[str, Any]:
    """Return random documents with random labels, padded to the longest of them."""
    import torch

    median, sigma, longest = LENGTHS[lengths]
    sizes = torch.tensor([min(int(rng.lognormvariate(math.log(median), sigma)) + 3, longest) for _ in range(rows)])
    mask = (torch.arange(int(sizes.max())) < sizes[:, None]).long()
    tokens = torch.randint(5, VOCABULARY, mask.shape, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
    batch = {"input_ids": tokens * mask, "attention_mask": mask, "labels": torch.arange(rows) % 2}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def measure(models: dict[str, Any], lengths: str, rows: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a line of the table per model: median real tokens per second, and by how much it is faster than PADDED."""
    import torch

    from megatron_neobert.huggingface import modeling_neobert

    # On the CPU, seconds of one core, which other processes of the machine do not affect.
    on_gpu = arguments.device.startswith("cuda")
    clock, wait = (time.perf_counter, torch.cuda.synchronize) if on_gpu else (time.process_time, lambda: None)
    rng, rounds = random.Random(0), arguments.rounds + WARM_UP
    batches = [build_batch(rng, lengths, rows, arguments.device) for _ in range(rounds)]
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-6) for name, model in models.items()}
    rates: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in models}

    choices: dict[bool, Any] = {True: lambda *_: False, False: modeling_neobert.may_unpad}

    def forward(name: str, batch: dict[str, Any]) -> None:
        with torch.no_grad():
            models[name].eval()(**batch)

    def train(name: str, batch: dict[str, Any]) -> None:
        models[name].train()(**batch).loss.backward()
        optimizers[name].step()
        optimizers[name].zero_grad()

    for number, name in in_turns(models, rounds=rounds):
        batch = batches[number - 1]
        modeling_neobert.may_unpad = choices[name == PADDED]
        for step, speeds in zip((forward, train), rates[name], strict=True):
            wait()
            start = clock()
            step(name, batch)
            wait()
            speeds.append(int(batch["attention_mask"].sum()) / (clock() - start))
    modeling_neobert.may_unpad = choices[False]
    padding = statistics.mean(1 - batch["attention_mask"].float().mean().item() for batch in batches)
    print(f"{lengths}: {rows} documents per batch, {100 * padding:.0f} % padding", flush=True)
    table = []
    for name, both in rates.items():
        line: dict[str, Any] = {"lengths": lengths, "class": name}
        for label, speeds, base in zip(("forward", "training"), both, rates[PADDED], strict=True):
            counted, padded = speeds[WARM_UP:], base[WARM_UP:]
            line[f"{label}, tokens/s"] = statistics.median(counted)
            line[f"x {label}"] = statistics.median(a / b for a, b in zip(counted, padded, strict=True))
        table.append(line)
    return table


if __name__ == "__main__":
    run_command(main)
