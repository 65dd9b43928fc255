"""Links lead somewhere, quoted messages are those of the code, and the site builds without the network."""

import ast
import html
import importlib.util
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
]


@cache
def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors_on_github(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", read(page), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    without_code = re.sub(r"^```.*?^```|`[^`\n]+`", "", text, flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" not in link and (not target.is_file() or (anchor and anchor not in anchors_on_github(target))):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_and_headings_lead_there_on_github(page):
    assert broken_links(page, read(page)) == []


def test_broken_links_are_found():
    page = REPOSITORY / "docs" / "cluster.md"
    text = "[a](reliability.md) [b](nothing.md) [c](reliability.md#nowhere) [d](#slurm) [e](../README.md) [f](#Slurm)"
    assert broken_links(page, text) == ["nothing.md", "reliability.md#nowhere", "#Slurm"]


def build_site(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site as `make docs` does; it fails on broken links and on pages outside the navigation."""
    words = re.search(r"-m (mkdocs build .*?) &&", read(REPOSITORY / "Makefile"))[1].split()
    command = [sys.executable, "-m", *words, "--site-dir", str(folder)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def test_building_the_site_fails_on_a_broken_link(tmp_path):
    """An option such as --quiet would let it pass."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Start\n\n[there](#start) [nowhere](#nowhere)\n")
    (tmp_path / "docs" / "site_pages.py").write_text(read(REPOSITORY / "docs" / "site_pages.py"))
    navigation = re.compile(r"^nav:\n(?:[ -].*\n)+", flags=re.MULTILINE)
    (tmp_path / "mkdocs.yml").write_text(navigation.sub("nav: [index.md]\n", read(REPOSITORY / "mkdocs.yml")))
    built = build_site(tmp_path, tmp_path / "site")
    assert built.returncode != 0
    assert "1 warnings in strict mode" in built.stdout + built.stderr
    assert "#nowhere" in built.stdout + built.stderr


def test_site_builds_with_the_files_that_pages_link_to_and_loads_nothing_from_the_network(tmp_path):
    built = build_site(REPOSITORY, tmp_path)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "#SBATCH" in read(tmp_path / "repository" / "examples" / "slurm" / "pretrain.sh.html")
    assert 'href="repository/SECURITY.html' in read(tmp_path / "conversion.html")
    loading = re.compile(
        r"""<(?:script|img|iframe|link (?!rel="(?:canonical|next|prev))[^>]*)\b[^>]*?(?:src|href)=["']?(?:https?:)?//"""
    )
    assert loading.search('<script src="https://example.org/x.js">')
    assert {page.name for page in tmp_path.rglob("*.html") if loading.search(read(page))} == set()
    styles = "".join(path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.css"))
    assert re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", styles) == []


def literals(tree: ast.AST) -> list[str]:
    """Return a program's texts without its docstrings; a formatted one has a mark in the place of each value."""
    found = []
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            found.append(node.value)
    return found


@cache
def spoken_text() -> str:
    """Return what programs of this project can print: a text per line, its white space made even."""
    folders = ("megatron_neobert", "checkpoint_conversion", "tools", "benchmarks")
    programs = [path for folder in folders for path in (REPOSITORY / folder).rglob("*.py")]
    texts = {text for program in programs for text in literals(ast.parse(read(program)))}
    texts |= {line for script in (REPOSITORY / "tools").glob("*.sh") for line in read(script).splitlines()}
    return "\n".join(" ".join(text.split()) for text in texts)


def quoted_messages(page: Path) -> list[str]:
    """Return the code in the first column of a page's tables."""
    rows = re.findall(r"^\| (`[^|]*?) \|", read(page), flags=re.MULTILINE)
    return [code for row in rows for code in re.findall(r"`([^`]+)`", row)]


def is_spoken(message: str) -> bool:
    """Return whether one text has every piece of a message, in order; `...` stands for a value or for other words."""
    pieces = [re.escape(piece.strip()) for piece in message.split("...") if piece.strip()]
    return re.search(".*?".join(pieces), spoken_text()) is not None


def test_messages_that_troubleshooting_quotes_are_those_of_the_programs():
    messages = quoted_messages(REPOSITORY / "docs" / "troubleshooting.md")
    assert len(messages) > 30 and [message for message in messages if not is_spoken(message)] == []
    assert not is_spoken("holds no chequepoint")
    assert not is_spoken("name another folder ... already holds checkpoints of a run")


SUPPORT = REPOSITORY / "docs" / "support.md"


def assigned(module: str, name: str) -> ast.expr:
    """Return what a test module assigns to a name at its top, without importing the module, which takes seconds."""
    for node in ast.parse(read(REPOSITORY / module)).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            return node.value
    raise AssertionError(f"{module} assigns no {name}")


def test_layouts_that_the_support_table_calls_tested_are_those_that_are_trained():
    block = re.search(r"^\| layout \|.*\n\|[ |-]+\n((?:\|.*\n)+)", read(SUPPORT), flags=re.MULTILINE)[1]
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()]
    layouts = assigned("tests/distributed/test_layouts.py", "LAYOUTS")
    assert [name for name, *_ in rows] == [ast.literal_eval(key) for key in layouts.keys]
    in_bf16 = ast.literal_eval(assigned("tests/distributed/test_layouts.py", "IN_BF16"))
    assert [name for name, _, bf16, _ in rows if bf16 == "CPU"] == list(in_bf16)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_a_page_names_exist(page):
    for module, name in set(re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", read(page))):
        assert f"def {name}" in read(REPOSITORY / module), f"{module}::{name}"


def test_figure_of_the_readme_shows_the_numbers_of_the_performance_page():
    """`python docs/figures.py` draws the figure again."""
    source = importlib.util.spec_from_file_location("figures", REPOSITORY / "docs" / "figures.py")
    figures = importlib.util.module_from_spec(source)
    source.loader.exec_module(figures)
    shown = re.search(r"<dc:description>(.*?)</dc:description>", read(figures.OVERVIEW), flags=re.DOTALL)[1]
    page = read(REPOSITORY / "docs" / "performance.md")
    assert json.loads(html.unescape(shown)) == figures.read_numbers(page)
    assert json.loads(html.unescape(shown)) != figures.read_numbers(page.replace("| 717 |", "| 718 |"))
