"""Links lead somewhere, quoted messages are those of the code, and the site builds without the network."""

import ast
import html
import importlib.util
import json
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from commands import REPOSITORY, succeed

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
    for link in re.findall(r'(?:\]\(|src="|srcset=")([^)"\s]+)[)"]', without_code):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" not in link and (not target.is_file() or (anchor and anchor not in anchors_on_github(target))):
            broken.append(link)
    return broken


def test_links_to_files_and_headings_lead_there_on_github():
    found = {page.name: broken_links(page, read(page)) for page in PAGES}
    assert {name: links for name, links in found.items() if links} == {}


def test_site_builds_with_the_files_that_pages_link_to_and_loads_nothing_from_the_network(tmp_path):
    """As `make docs` builds it; that fails on broken links and on pages outside the navigation."""
    words = re.search(r"-m (mkdocs build --strict) &&", read(REPOSITORY / "Makefile"))[1].split()
    succeed(sys.executable, "-m", *words, "--site-dir", tmp_path, cwd=REPOSITORY)
    assert "#SBATCH" in read(tmp_path / "repository" / "examples" / "slurm" / "pretrain.sh.html")
    assert 'href="repository/SECURITY.html' in read(tmp_path / "conversion.html")
    loading = re.compile(
        r"""<(?:script|img|iframe|link (?!rel="(?:canonical|next|prev))[^>]*)\b[^>]*?(?:src|href)=["']?(?:https?:)?//"""
    )
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
    """Return what programs of this project can print, each text with its white space made even."""
    folders = ("megatron_neobert", "checkpoint_conversion", "tools", "benchmarks")
    programs = [path for folder in folders for path in (REPOSITORY / folder).rglob("*.py")]
    texts = {text for program in programs for text in literals(ast.parse(read(program)))}
    texts |= {line for script in (REPOSITORY / "tools").glob("*.sh") for line in read(script).splitlines()}
    return "\n".join(" ".join(text.split()) for text in texts)


def is_spoken(message: str) -> bool:
    """Return whether one text has every piece of a message, in order; `...` stands for a value or for other words."""
    pieces = [re.escape(piece.strip()) for piece in message.split("...") if piece.strip()]
    return re.search(".*?".join(pieces), spoken_text()) is not None


def test_messages_that_troubleshooting_quotes_are_those_of_the_programs():
    rows = re.findall(r"^\| (`[^|]*?) \|", read(REPOSITORY / "docs" / "troubleshooting.md"), flags=re.MULTILINE)
    messages = [code for row in rows for code in re.findall(r"`([^`]+)`", row)]
    assert len(messages) > 10 and [message for message in messages if not is_spoken(message)] == []


def test_tests_that_pages_name_exist():
    for page in PAGES:
        for module, name in set(re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", read(page))):
            assert f"def {name}" in read(REPOSITORY / module), f"{page.name}: {module}::{name}"


@pytest.fixture(scope="module")
def figures():
    source = importlib.util.spec_from_file_location("figures", REPOSITORY / "docs" / "figures.py")
    module = importlib.util.module_from_spec(source)
    source.loader.exec_module(module)
    return module


def test_figures_show_the_numbers_of_their_sources(figures):
    """`python docs/figures.py` draws them again."""
    for name, (read_source, _) in figures.SOURCES.items():
        text = re.search(r"<dc:description>(.*?)</dc:description>", read(figures.FIGURES / f"{name}.svg"), re.DOTALL)[1]
        assert json.loads(html.unescape(text)) == json.loads(json.dumps(read_source())), name


def test_figure_of_the_readme_follows_the_tables_of_the_performance_page(figures, tmp_path, monkeypatch):
    numbers, page = figures.read_numbers(), read(REPOSITORY / "docs" / "performance.md")
    (tmp_path / "performance.md").write_text(page.replace("| 717 |", "| 718 |"), encoding="utf-8")
    monkeypatch.setattr(figures, "DOCS", tmp_path)
    assert figures.read_numbers() != numbers
