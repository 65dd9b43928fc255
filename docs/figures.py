"""Draw the figure of README.md from the tables of docs/performance.md: `python docs/figures.py`.

The tables are the only place where the measured numbers are written. The figure's SVG file lists the numbers that it
shows in its metadata, so that a test can compare them with the page.
"""

import json
import re
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

DOCS = Path(__file__).resolve().parent
OVERVIEW = DOCS / "figures" / "overview.svg"

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
        "Preprocessing, MB/s on one core",
        "tool, one core",
        "MB/s",
        {
            "this project, fast back end": "this project",
            "datatrove": "datatrove",
            "`datasets.map`": "datasets.map",
        },
    ),
    (
        "Training step, tokens/s on one thread",
        "layout",
        "tokens/s",
        {"packed": "packed", "padded": "padded", "reference": "plain PyTorch, padded"},
    ),
    (
        "Loader, M tokens per CPU-second",
        "loader",
        "tokens of documents per CPU-second",
        {
            "this project, 1 worker": "this project, 1 worker",
            "transformers' collator, rows": "transformers, filled rows",
            "transformers' collator, padded": "transformers, padded",
        },
    ),
)


def read_table(page: str, first_header: str) -> list[dict[str, str]]:
    """Return the rows of the first table of a page whose first column has this header, by column."""
    lines = iter(page.splitlines())
    header = next(line for line in lines if line.startswith(f"| {first_header} |"))
    columns = [cell.strip() for cell in header.strip("|").split("|")]
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append(dict(zip(columns, (cell.strip() for cell in line.strip("|").split("|")), strict=True)))
    return rows


def read_numbers(page: str) -> dict[str, dict[str, float]]:
    """Return the number of each bar by the panel's title and the bar's name."""
    numbers: dict[str, dict[str, float]] = {}
    for title, first_header, column, names in PANELS:
        rows = read_table(page, first_header)
        numbers[title] = {}
        for start, name in names.items():
            row = next(row for row in rows if row[first_header].startswith(start))
            numbers[title][name] = float(re.match(r"[\d.,]+", row[column])[0].replace(",", ""))
    return numbers


def draw_stages(axes: Axes) -> None:
    """Draw the stages from raw text to the model as boxes with arrows between them."""
    axes.set(xlim=(-0.3, 100.3), ylim=(0, 10))
    axes.axis("off")
    width, gap = 17.2, 3.5
    for number, (name, text) in enumerate(STAGES):
        left = number * (width + gap)
        box = FancyBboxPatch(
            (left, 0.6), width, 8.6, boxstyle="round,pad=0,rounding_size=0.8", facecolor="#f3f6f8", edgecolor=PEER
        )
        axes.add_patch(box)
        axes.text(left + width / 2, 7.2, name, ha="center", va="center", fontsize=10.5, weight="bold", color=INK)
        axes.text(left + width / 2, 3.4, text, ha="center", va="center", fontsize=8.5, color=MUTED, linespacing=1.4)
        if number:
            arrow = {"arrowstyle": "-|>", "color": MUTED, "lw": 1.2}
            axes.annotate("", (left - 0.3, 4.9), (left - gap + 0.3, 4.9), arrowprops=arrow)


def draw_bars(axes: Axes, title: str, values: dict[str, float]) -> None:
    """Draw a bar for each value, the first one, which is this project's, in its own colour."""
    names = list(values)
    bars = axes.barh(names, list(values.values()), color=[OWN, *[PEER] * (len(names) - 1)], height=0.62)
    axes.bar_label(bars, labels=[f"{value:g}" for value in values.values()], padding=4, fontsize=9, color=INK)
    axes.set_title(title, fontsize=9.5, color=INK, loc="left", pad=6)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.tick_params(axis="y", length=0, labelsize=8.5, labelcolor=INK)
    axes.xaxis.set_visible(False)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color(PEER)


def draw_overview(path: Path) -> None:
    """Write the overview as SVG."""
    numbers = read_numbers((DOCS / "performance.md").read_text(encoding="utf-8"))
    matplotlib.rcParams["svg.hashsalt"] = "overview"  # the same names of elements each time
    figure = plt.figure(figsize=(11, 3.5), facecolor="white")
    grid = figure.add_gridspec(2, 3, height_ratios=(1, 1.25), left=0.095, right=0.98, top=0.98, bottom=0.03)
    grid.update(hspace=0.42, wspace=0.68)
    draw_stages(figure.add_axes((0.01, 0.58, 0.98, 0.4)))
    for number, (title, values) in enumerate(numbers.items()):
        draw_bars(figure.add_subplot(grid[1, number]), title, values)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Description": json.dumps(numbers)})
    plt.close(figure)


if __name__ == "__main__":
    draw_overview(OVERVIEW)
