"""What a measurement of speed leaves: a record per model, and of all models a CSV, a Markdown page and figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_neobert.evaluation.encoders import fingerprint
from megatron_neobert.evaluation.records import describe_machine, versions, write_record
from megatron_neobert.evaluation.throughput.batches import MASKED_SHARE, WEB_MEDIAN_TOKENS
from megatron_neobert.evaluation.throughput.line_up import LineUp
from megatron_neobert.evaluation.throughput.run import Sweep
from megatron_neobert.evaluation.throughput.tables import draw, to_csv, to_markdown
from megatron_neobert.runtime.atomic_files import replace_file

KIND = "throughput"


def describe(folders: Mapping[str, Path], found: LineUp, sweep: Sweep, device: torch.device) -> dict[str, Any]:
    """All that must be equal for measurements to stand in one table."""
    return {
        "models": {name: fingerprint(folder) for name, folder in folders.items()},
        "contenders": [
            f"{contender.model}, {contender.dtype}, {contender.attention}, {contender.layout}, {contender.passes}"
            for contender in found.contenders
        ],
        "steps": sweep.steps,
        "warmup": sweep.warmup,
        "lengths_distribution": sweep.distribution,
        "web_median_tokens": WEB_MEDIAN_TOKENS if sweep.distribution == "web" else None,
        "masked_share": MASKED_SHARE,
        "seed": sweep.seed,
        "max_tokens": sweep.max_tokens,
        "device": str(device),
        "machine": describe_machine(device),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "versions": versions(),
    }


def write_results(
    output: Path,
    folders: Mapping[str, Path],
    found: LineUp,
    sweep: Sweep,
    rows: Sequence[dict[str, Any]],
    device: torch.device,
) -> str:
    """Writes everything and returns the Markdown page."""
    common = describe(folders, found, sweep, device)
    settings = {name: value for name, value in common.items() if name not in ("machine", "versions")}
    for name, folder in folders.items():
        own = [row for row in rows if row["model"] == name]
        subject = next((s for c, s in found.contenders.items() if c.model == name), None)
        results = {
            "parameters": None if subject is None else subject.parameters,
            "rows": own,
            "not_run": [entry for entry in found.not_run if entry["model"] == name],
        }
        path = output / name / f"{KIND}.json"
        write_record(path, KIND, folder=folder, settings=settings, results=results, device=device)
    replace_file(output / f"{KIND}.csv", to_csv(rows))
    for passes in dict.fromkeys(row["passes"] for row in rows):
        draw(output / f"{KIND}_{passes.replace('+', '_')}.png", rows, passes, machine=common["machine"])
    page = _page(rows, found, common)
    replace_file(output / f"{KIND}.md", page)
    return page


def _page(rows: Sequence[dict[str, Any]], found: LineUp, common: Mapping[str, Any]) -> str:
    lines = [to_markdown(rows), ""]
    lines += [f"Not measured: {entry['contender']}: {entry['reason']}.\n" for entry in found.not_run]
    lines.append(
        f"{common['machine']}; medians of {common['steps']} steps after {common['warmup']} to warm up; documents: "
        f"{common['lengths_distribution']}; float32 matrix products: {common['float32_matmul_precision']}; torch "
        f"{common['versions']['torch']}, transformers {common['versions']['transformers']}."
    )
    return "\n".join(lines) + "\n"
