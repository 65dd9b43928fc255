"""Draw the figures of the documentation: `python docs/figures.py`.

The numbers of the overview come from the tables of docs/performance.md, the lengths and rows of the packing figure from
the code that packs. Each SVG file lists its numbers in its metadata, so that a test can compare them with their source.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from megatron_neobert.data.batches.packing import best_fit_decreasing

DOCS = Path(__file__).resolve().parent
FIGURES = DOCS / "figures"

OWN, PEER, INK, MUTED = "#0f766e", "#b6c2cc", "#1f2933", "#5b6770"
STAGES = (
    ("raw web text", "Parquet, JSON lines,\nWARC, WET, text"),
    ("corpus", "Megatron's .bin and .idx,\nevery record counted"),
    ("packed batches", "no padding, the same\nbatch on any layout"),
    ("checkpoint", "safetensors, checksums,\nbitwise resume"),
    ("Hugging Face model", "verified logits,\nno remote code"),
)
# Panels: title, first cell of the table's header, column of the number, and a short name for each row that is drawn.
PANELS = (
    (
        "Preprocessing, MB/s of text on one core",
        "tool, one core",
        "MB/s",
        {
            "this project, fast back end": "this project",
            "datatrove": "datatrove",
            "`datasets.map`": "datasets.map",
        },
    ),
    (
        "Training, tokens/s on one CPU thread",
        "layout",
        "tokens/s",
        {"packed": "packed", "padded": "this engine,\npadded", "reference": "plain PyTorch,\npadded"},
    ),
    (
        "28 x 768, thousand tokens/s on one GPU",
        "layers",
        "thousand tokens/s",
        {
            "the same in FP8, delayed": "this project,\nH200, FP8",
            "Transformer Engine": "this project,\nH200, bf16",
            "NeoBERT's own run, per H100": "NeoBERT's own\nrun, H100",
        },
    ),
)


SEQ_LENGTH = 1024
SHADES = ("#0f766e", "#2f9e8f", "#5b7c99", "#8aa4b8", "#3b5b73")
COMMIT = (
    ("every rank", "copies its tensors,\nwrites and flushes\nrank_N.safetensors"),
    ("rank 0", "writes train state,\nsettings and tokenizer"),
    ("MANIFEST.json", "size and sha256 of\nevery file, last"),
    ("rename", ".tmp-iter_0001000\nto iter_0001000"),
    ("pointer", "names the newest\ncheckpoint"),
    ("--keep-last", "older checkpoints\nare deleted"),
)
# From the top; a floor imports from the floors below it. tests/repo/test_import_direction.py has the full table.
LAYERS = (
    ("commands", "tools", "benchmarks"),
    ("launch, pretrain", "checkpoint_conversion", "inspection"),
    ("evaluation", "planning"),
    ("training", "checkpoint", "state"),
    ("model", "data: inputs, tokenizer, preprocessing, corpus, deduplication, batches"),
    ("runtime", "reference model, packing, masking, order (pure functions)"),
    ("config", "huggingface"),
    ("cli", "errors", "text"),
)


def read_number(page: str, first_header: str, column: str, start: str) -> float:
    """Return the number at the start of a cell of the first table whose first column has this header.

    The first cell of its row starts with `start`.
    """
    lines = page.splitlines()
    table = next(number for number, line in enumerate(lines) if line.startswith(f"| {first_header} |"))
    row = next(line for line in lines[table:] if line.startswith(f"| {start}"))
    cell = row.split("|")[lines[table].split("|").index(f" {column} ")]
    return float(re.search(r"[\d.,]+", cell)[0].replace(",", ""))


def read_numbers() -> dict[str, dict[str, float]]:
    """Return the number of each bar by the panel's title and the bar's name, from docs/performance.md."""
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    return {
        title: {name: read_number(page, first_header, column, start) for start, name in names.items()}
        for title, first_header, column, names in PANELS
    }


def draw_chain(axes: Axes, boxes: Sequence[tuple[str, str]]) -> None:
    """Draw boxes from left to right, each with a bold name and a text below it, and an arrow between each two."""
    axes.set(xlim=(-0.3, 100.3), ylim=(0, 10))
    axes.axis("off")
    gap = 3.5
    width = (100 + gap) / len(boxes) - gap
    style = {"boxstyle": "round,pad=0,rounding_size=0.8", "facecolor": "#f3f6f8", "edgecolor": PEER}
    arrow = {"arrowstyle": "-|>", "color": MUTED, "lw": 1.2}
    for number, (name, text) in enumerate(boxes):
        left = number * (width + gap)
        centre = left + width / 2
        axes.add_patch(FancyBboxPatch((left, 0.6), width, 8.6, **style))
        axes.text(centre, 7.2, name, ha="center", va="center", fontsize=10.5, weight="bold", color=INK)
        axes.text(centre, 3.5, text, ha="center", va="center", fontsize=8.5, color=MUTED, linespacing=1.4)
        if number:
            axes.annotate("", (left - 0.3, 4.9), (left - gap + 0.3, 4.9), arrowprops=arrow)


def draw_bars(axes: Axes, title: str, values: dict[str, float], *, title_left: float = -0.4) -> None:
    """Draw a bar for each value. The first one and others of this project have its colour.

    `title_left` is where the title begins, in widths of the panel.
    """
    names = list(values)
    colors = [OWN if number == 0 or name.startswith("this project") else PEER for number, name in enumerate(names)]
    bars = axes.barh(names, list(values.values()), color=colors, height=0.62)
    axes.bar_label(bars, labels=[f"{value:g}" for value in values.values()], padding=4, fontsize=9, color=INK)
    axes.set_title(title, fontsize=9.5, color=INK, loc="left", pad=6, x=title_left)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.tick_params(axis="y", length=0, labelsize=8.5, labelcolor=INK)
    axes.xaxis.set_visible(False)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color(PEER)


def draw_overview(numbers: dict[str, dict[str, float]]) -> Figure:
    """Draw the stages of the project above its speeds beside other tools."""
    figure = plt.figure(figsize=(11, 3.5), facecolor="white")
    grid = figure.add_gridspec(2, 3, height_ratios=(1, 1.25), left=0.095, right=0.98, top=0.98, bottom=0.03)
    grid.update(hspace=0.42, wspace=0.68)
    draw_chain(figure.add_axes((0.01, 0.58, 0.98, 0.4)), STAGES)
    for number, (title, values) in enumerate(numbers.items()):
        draw_bars(figure.add_subplot(grid[1, number]), title, values)
    return figure


def draw_narrow_overview(numbers: dict[str, dict[str, float]]) -> Figure:
    """Draw the same for a screen of 400 pixels: the stages from top to bottom, and the panels below each other."""
    figure = plt.figure(figsize=(4.4, 8), facecolor="white")
    axes = figure.add_axes((0.02, 0.55, 0.96, 0.44))
    axes.set(xlim=(0, 100), ylim=(len(STAGES), 0))
    axes.axis("off")
    for number, (name, text) in enumerate(STAGES):
        axes.barh(number + 0.45, 100, height=0.8, color="#f3f6f8", edgecolor=PEER)
        axes.text(3, number + 0.45, name, va="center", fontsize=10.5, weight="bold", color=INK)
        axes.text(97, number + 0.45, text, va="center", ha="right", fontsize=9, color=MUTED, linespacing=1.3)
    grid = figure.add_gridspec(3, 1, left=0.27, right=0.97, top=0.51, bottom=0.01, hspace=0.45)
    for number, (title, values) in enumerate(numbers.items()):
        draw_bars(figure.add_subplot(grid[number]), title, values, title_left=-0.34)
    return figure


def pack_documents() -> dict[str, Any]:
    """Return the lengths of sixteen web-like documents, the packed sequence of each, and shares of a whole window."""
    deviation = np.sqrt(2 * np.log(640 / 368))  # median and mean of RefinedWeb, in tokens
    lengths = np.random.default_rng(2).lognormal(np.log(368), deviation, 4096).clip(1, SEQ_LENGTH).astype(int)
    window = sorted(lengths.tolist(), reverse=True)
    shown = sorted(lengths[:16].tolist(), reverse=True)
    sequences = max(best_fit_decreasing(window, capacity=SEQ_LENGTH)) + 1
    return {
        "lengths": shown,
        "sequences": best_fit_decreasing(shown, capacity=SEQ_LENGTH),
        "unused when padded, %": round(100 - 100 * sum(window) / (SEQ_LENGTH * len(window)), 1),
        "unused when packed, %": round(100 - 100 * sum(window) / (SEQ_LENGTH * sequences), 2),
    }


def draw_packing(data: dict[str, Any]) -> Figure:
    """Draw the documents one to a row, and in the rows that they are packed into."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 3), facecolor="white", sharex=True, sharey=True)
    layouts = {"padded": list(range(len(data["lengths"]))), "packed": data["sequences"]}
    for axes, (layout, rows) in zip(panels, layouts.items(), strict=True):
        ends = [0] * (max(rows) + 1)
        axes.barh(range(len(ends)), SEQ_LENGTH, color="#eef1f3", height=0.8)
        for number, (row, length) in enumerate(zip(rows, data["lengths"], strict=True)):
            axes.barh(row, length, left=ends[row], color=SHADES[number % len(SHADES)], edgecolor="white", height=0.8)
            ends[row] += length
        unused = data[f"unused when {layout}, %"]
        shown = 100 - 100 * sum(ends) / (SEQ_LENGTH * len(ends))
        title = f"16 documents {layout}: {shown:.0f} % unused; 4,096 documents: {unused} %"
        axes.set_title(title, fontsize=9.5, color=INK, loc="left")
        axes.axis("off")
    panels[0].invert_yaxis()
    figure.subplots_adjust(left=0.01, right=0.99, top=0.9, bottom=0.02, wspace=0.04)
    return figure


def share_micro_batches() -> dict[str, list[list[int]]]:
    """Return the micro-batches of each data-parallel rank: rank d of D trains on micro-batches d, d + D, ..."""
    return {str(size): [list(range(rank, 8, size)) for rank in range(size)] for size in (1, 2, 4)}


def draw_batch(data: dict[str, list[list[int]]]) -> Figure:
    """Draw the eight micro-batches of a global batch over one, two and four data-parallel ranks."""
    figure, panels = plt.subplots(1, len(data), figsize=(11, 1.9), facecolor="white")
    for axes, ranks in zip(panels, data.values(), strict=True):
        for rank, batches in enumerate(ranks):
            axes.text(-0.2, rank, f"rank {rank}", ha="right", va="center", fontsize=8.5, color=INK)
            for place, batch in enumerate(batches):
                axes.barh(rank, 0.92, left=place, color=SHADES[batch % len(SHADES)], height=0.8)
                axes.text(place + 0.46, rank, str(batch), ha="center", va="center", fontsize=8.5, color="white")
        axes.set(xlim=(-1.6, 8), ylim=(3.6, -0.6))
        axes.set_title(f"{len(ranks)} data-parallel rank{'s' * (len(ranks) > 1)}", fontsize=9.5, color=INK, loc="left")
        axes.axis("off")
    figure.subplots_adjust(left=0.01, right=0.99, top=0.86, bottom=0.02, wspace=0.06)
    return figure


def draw_commit(steps: Sequence[Sequence[str]]) -> Figure:
    """Draw the steps of saving a checkpoint in their order."""
    figure = plt.figure(figsize=(11, 1.5), facecolor="white")
    draw_chain(figure.add_axes((0.01, 0.02, 0.98, 0.96)), steps)
    return figure


def draw_layers(layers: Sequence[Sequence[str]]) -> Figure:
    """Draw the packages as floors of a house; each imports from the floors below it."""
    figure = plt.figure(figsize=(11, 3.4), facecolor="white")
    axes = figure.add_axes((0.01, 0.02, 0.98, 0.96))
    axes.set(xlim=(0, 100), ylim=(len(layers), 0))
    axes.axis("off")
    for floor, rooms in enumerate(layers):
        width = 100 / len(rooms)
        for number, room in enumerate(rooms):
            axes.barh(
                floor + 0.5, width - 0.5, left=number * width + 0.25, height=0.88, color="#f3f6f8", edgecolor=PEER
            )
            axes.text((number + 0.5) * width, floor + 0.5, room, ha="center", va="center", fontsize=8.5, color=INK)
    return figure


# Numbers or texts of each figure, and the function that draws it.
SOURCES: dict[str, tuple[Callable[[], Any], Callable[[Any], Figure]]] = {
    "overview": (read_numbers, draw_overview),
    "overview_narrow": (read_numbers, draw_narrow_overview),
    "packing": (pack_documents, draw_packing),
    "batch": (share_micro_batches, draw_batch),
    "commit": (lambda: COMMIT, draw_commit),
    "layers": (lambda: LAYERS, draw_layers),
}


if __name__ == "__main__":
    FIGURES.mkdir(exist_ok=True)
    for name, (read, draw) in SOURCES.items():
        matplotlib.rcParams["svg.hashsalt"] = name  # equal names of elements in every run
        data = read()
        draw(data).savefig(FIGURES / f"{name}.svg", metadata={"Date": None, "Description": json.dumps(data)})
