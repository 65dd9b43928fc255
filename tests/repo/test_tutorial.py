"""docs/tutorial.md and its notebook are one; from a wheel, in an empty folder, every block of it works."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from commands import REPOSITORY, succeed

PAGE, NOTEBOOK = REPOSITORY / "docs" / "tutorial.md", REPOSITORY / "docs" / "tutorial.ipynb"
# In the place of 500 iterations; a file goes before the recipe of its name.
TINY = """
model: {num_layers: 1, hidden_size: 32, num_attention_heads: 2}
data: {seq_length: 64, num_workers: 0}
optimizer: {lr_warmup_iters: 1}
training: {micro_batch_size: 2, global_batch_size: 4, train_iters: 4, eval_interval: 2, eval_iters: 1}
checkpoint: {save_interval: 4}
logging: {log_interval: 1}
"""


def to_cells(page: str) -> list[dict]:
    """Prose as Markdown, shell blocks as %%bash, Python as it is; what was printed is left to who runs it."""
    cells = []
    for number, piece in enumerate(re.split(r"^(```\w+\n.*?^```\n)", page, flags=re.DOTALL | re.MULTILINE)):
        language, _, body = piece.removeprefix("```").partition("\n")
        source = body.rpartition("```")[0].rstrip("\n")
        cell = {"id": f"cell-{number}", "metadata": {}}
        if number % 2 and language in ("bash", "python"):
            source = f"%%bash\n{source}" if language == "bash" else source
            cells.append({**cell, "cell_type": "code", "execution_count": None, "outputs": [], "source": source})
        elif piece.strip() and not (number % 2 and language == "console"):
            cells.append({**cell, "cell_type": "markdown", "source": piece.strip()})
    return cells


def to_notebook(page: str) -> str:
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {"cells": to_cells(page), "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def test_notebook_is_the_page():
    """WRITE_DOCUMENTATION=1 writes it anew."""
    notebook = to_notebook(PAGE.read_text(encoding="utf-8"))
    if os.environ.get("WRITE_DOCUMENTATION"):
        NOTEBOOK.write_text(notebook, encoding="utf-8")
    assert NOTEBOOK.read_text(encoding="utf-8") == notebook


@pytest.fixture
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder into which a wheel of this repository is installed; the other packages are those of the tests."""
    place = tmp_path_factory.mktemp("an environment")
    for folder in ("megatron_neobert", "checkpoint_conversion", "examples"):
        shutil.copytree(REPOSITORY / folder, place / "source" / folder, symlinks=True)
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / file, place / "source" / file)
    alone = ("--no-deps", "--no-index", "--no-build-isolation")
    succeed(sys.executable, "-m", "pip", "install", "-q", *alone, "--target", place / "packages", place / "source")
    return place / "packages"


def test_notebook_leads_from_an_installed_wheel_and_an_empty_folder_to_an_evaluated_model(packages, tmp_path: Path):
    (tmp_path / "tiny").write_text(TINY)
    path = f"{packages / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"}
    code = [cell["source"] for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    said = ""
    for source in ["import megatron_neobert\nprint(megatron_neobert.__file__)", *code]:
        shell = source.startswith("%%bash\n")
        command = ("bash", "-euc", source.partition("\n")[2]) if shell else (sys.executable, "-c", source)
        said += succeed(*command, cwd=tmp_path, env=environment)
    assert said.startswith(str(packages)), "the wheel's package, and not the checkout's"
    assert len(code) == 11, "the blocks of the page"
    assert (tmp_path / "model" / "config.json").is_file()
    records = {path.name for path in (tmp_path / "results").rglob("*.json")}
    assert records == {"pseudo_perplexity.json"}
    assert "Pseudo-perplexity" in (tmp_path / "report" / "report.md").read_text()
