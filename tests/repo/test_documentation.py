"""Links lead somewhere, quoted messages are those of the code, and the site builds without the network."""

import ast
import re
import subprocess
import sys
import unicodedata
from functools import cache
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")


@cache
def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```|`[^`\n]+`", "", text, flags=re.DOTALL | re.MULTILINE)


def anchor_on_github(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchor_on_site(heading: str) -> str:
    """As Python-Markdown's toc makes it."""
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def anchors(page: Path) -> set[str]:
    """Anchors of the headings that are the same on GitHub and on the site."""
    text = re.sub(r"^```.*?^```", "", read(page), flags=re.DOTALL | re.MULTILINE)
    headings = [re.sub(r"[`*]", "", line) for line in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)]
    return {anchor_on_github(heading) for heading in headings if anchor_on_github(heading) == anchor_on_site(heading)}


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for link in LINK.findall(without_code(text)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_and_headings_lead_there_on_github_and_on_the_site(page):
    assert broken_links(page, read(page)) == []


def test_broken_links_are_found():
    page = REPOSITORY / "docs" / "launching.md"
    text = "[a](reliability.md) [b](nothing.md) [c](reliability.md#nowhere) [d](#slurm) [e](../README.md) [f](#Slurm)"
    assert broken_links(page, text) == ["nothing.md", "reliability.md#nowhere", "#Slurm"]


def settings_of_site() -> dict:
    return yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))


def pages_of(navigation: list) -> list[str]:
    """The pages that mkdocs.yml lists, at any depth."""
    values = [value for entry in navigation for value in (entry.values() if isinstance(entry, dict) else [entry])]
    return [page for value in values for page in (pages_of(value) if isinstance(value, list) else [value])]


def test_every_page_is_in_the_navigation_once():
    assert sorted(pages_of(settings_of_site()["nav"])) == sorted(
        page.name for page in PAGES if page.parent.name == "docs"
    )


def build_site(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """As `make docs` builds it."""
    words = re.search(r"-m (mkdocs build .*?) &&", read(REPOSITORY / "Makefile"))[1].split()
    command = [sys.executable, "-m", *words, "--site-dir", str(folder)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build_site(REPOSITORY, folder)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_building_the_site_fails_on_a_broken_link(tmp_path):
    """Its --quiet, for one, would let it pass."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Start\n\n[there](#start) [nowhere](#nowhere)\n")
    for name in ("mkdocs.yml", "docs/site_pages.py"):
        (tmp_path / name).write_text(read(REPOSITORY / name))
    navigation = re.compile(r"^nav:\n(?:[ -].*\n)+", flags=re.MULTILINE)
    settings = navigation.sub("nav: [index.md]\n", (tmp_path / "mkdocs.yml").read_text())
    (tmp_path / "mkdocs.yml").write_text(settings)
    built = build_site(tmp_path, tmp_path / "site")
    assert built.returncode != 0
    assert "1 warnings in strict mode" in built.stdout + built.stderr
    assert "#nowhere" in built.stdout + built.stderr


def test_make_docs_prepares_no_environment_where_one_has_mkdocs_and_else_one_without_torch():
    """`make -n` prints what it would run; `import mkdocs, material` fails in an environment of neither."""
    recipe = subprocess.run(["make", "-n", "docs"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert "prepare_environment" not in recipe
    installed = re.search(r"pip install --quiet -c constraints\.txt (.*?);", recipe)
    assert installed is not None and installed[1].split() == ["mkdocs", "mkdocs-material"]


def test_site_holds_every_page_and_the_files_that_pages_link_to(site):
    expected = {f"{page.stem}.html" for page in PAGES if page.parent.name == "docs"}
    assert expected <= {page.name for page in site.glob("*.html")}
    assert "#SBATCH" in (site / "repository" / "examples" / "slurm" / "pretrain.sh.html").read_text(encoding="utf-8")
    assert 'href="repository/SECURITY.html' in (site / "conversion.html").read_text(encoding="utf-8")


def test_site_loads_nothing_from_the_network(site):
    loading = re.compile(
        r"""<(?:script|img|iframe|link (?!rel="(?:canonical|next|prev))[^>]*)\b[^>]*?(?:src|href)=["']?(?:https?:)?//"""
    )
    pages = {page.name: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    assert {name for name, text in pages.items() if loading.search(text)} == set()
    assert loading.search('<script src="https://example.org/x.js">')
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", styles) == []


def literals(tree: ast.AST) -> list[str]:
    """String literals of a program without its docstrings; formatted ones have a mark in the place of each value."""
    found = []
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in docstrings:
            continue
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


@cache
def spoken_text() -> str:
    """What programs of this project can say: a literal per line, its white space made even."""
    folders = ("megatron_neobert", "checkpoint_conversion", "tools", "benchmarks")
    programs = [path for folder in folders for path in (REPOSITORY / folder).rglob("*.py")]
    texts = {text for program in programs for text in literals(ast.parse(read(program)))}
    texts |= {line for script in (REPOSITORY / "tools").glob("*.sh") for line in read(script).splitlines()}
    return "\n".join(" ".join(text.split()) for text in texts)


def quoted_messages(page: Path) -> list[str]:
    """Code in the first column of a page's tables, without the exit codes and settings that stand there alone."""
    rows = re.findall(r"^\| (`[^|]*?) \|", read(page), flags=re.MULTILINE)
    return [code for row in rows for code in re.findall(r"`([^`]+)`", row)]


def is_spoken(message: str) -> bool:
    """Whether one literal holds every piece of a message, in order; `...` stands for a value or for other words."""
    pieces = [re.escape(piece.strip()) for piece in message.split("...") if piece.strip()]
    return re.search(".*?".join(pieces), spoken_text()) is not None


@pytest.mark.parametrize("message", quoted_messages(REPOSITORY / "docs" / "troubleshooting.md"))
def test_message_that_troubleshooting_quotes_is_one_of_the_programs(message):
    assert is_spoken(message)


def test_message_that_nobody_says_is_noticed():
    assert is_spoken("holds no checkpoint")
    assert not is_spoken("holds no chequepoint")
    assert not is_spoken("name another folder ... already holds checkpoints of a run")


SUPPORT = REPOSITORY / "docs" / "support.md"


def table(page: Path, first_column: str) -> dict[str, list[str]]:
    """The other cells of a table's rows by their first, of the table whose first column is called so."""
    block = re.search(rf"^\| {first_column} \|.*\n\|[ |-]+\n((?:\|.*\n)+)", read(page), flags=re.MULTILINE)
    assert block is not None, f"{page.name} has no table of {first_column}"
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block[1].splitlines()]
    return {row[0]: row[1:] for row in rows}


def assigned(module: str, name: str) -> ast.expr:
    """What a test module assigns to a name at its top, read and not imported: its imports take seconds."""
    for node in ast.parse(read(REPOSITORY / module)).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            return node.value
    raise AssertionError(f"{module} assigns no {name}")


def keys(node: ast.expr) -> list[str]:
    assert isinstance(node, ast.Dict)
    return [ast.literal_eval(key) for key in node.keys if key is not None]


def test_layouts_that_the_support_table_calls_tested_are_those_that_are_trained():
    rows = table(SUPPORT, "layout")
    assert list(rows) == keys(assigned("tests/distributed/test_layouts.py", "LAYOUTS"))
    in_bf16 = [name for name, (_, bf16, _) in rows.items() if bf16 == "CPU"]
    assert in_bf16 == list(ast.literal_eval(assigned("tests/distributed/test_layouts.py", "IN_BF16")))
    assert {cell for cells in rows.values() for cell in cells[:2]} <= {"CPU", "not tested"}


@cache
def functions_of(module: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(read(REPOSITORY / module)).body if isinstance(node, ast.FunctionDef)}


def named_tests(page: Path) -> list[tuple[str, str]]:
    return sorted(set(re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", read(page))))


@pytest.mark.parametrize(("module", "name"), sorted({one for page in PAGES for one in named_tests(page)}))
def test_test_that_a_page_names_exists(module, name):
    assert (REPOSITORY / module).is_file()
    assert name == "" or name in functions_of(module)


def gpu_cells(text: str) -> list[str]:
    """The last cells of all tables whose last column is called GPU."""
    tables = re.findall(r"^\|.*\| GPU \|\n\|[ |-]+\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    return [row.strip("|").split("|")[-1].strip() for rows in tables for row in rows.splitlines()]


def test_gpu_columns_hold_never_or_the_date_and_the_gpu():
    cells = gpu_cells(read(SUPPORT))
    assert len(cells) > 30
    assert [cell for cell in cells if not re.fullmatch(r"never|20\d\d-\d\d-\d\d, .+", cell)] == []
