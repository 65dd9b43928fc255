"""The sample corpus: documentation is parsed, never executed, and gives the same documents every time."""

from pathlib import Path

import pyarrow.parquet as pq
from commands import run_forked

from megatron_neobert.commands import sample_corpus as tool

PROSE = "Every row of the table is read once and its columns are summed before the next row is read. " * 3
# Each has one docstring, a little longer than PROSE.
FUNCTIONS = {f"m{number}.py": f'def f{number}():\n    """{number} {PROSE}"""\n' for number in range(20)}


def write_package(folder: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")


def choose(folder: Path, files: dict[str, str], *, budget_bytes: int = 10**6):
    """Write the files and return the documents chosen from them."""
    write_package(folder, files)
    return tool.choose_documents([folder], budget_bytes=budget_bytes)


def urls(documents) -> set[str]:
    return {document.url for document in documents}


def test_package_source_is_parsed_and_never_executed(tmp_path):
    witness = tmp_path / "executed"
    source = f'"""Module. {PROSE}"""\nopen({str(witness)!r}, "w")\n'
    assert urls(choose(tmp_path / "p", {"m.py": source})) == {"python-package://m.py"}
    assert not witness.exists()


def test_class_document_holds_its_public_members_under_their_names(tmp_path):
    source = f'class Table:\n    """{PROSE}"""\n'
    for name in ("read", "_hidden"):
        source += f'    def {name}(self):\n        """{name} text."""\n'
    (tmp_path / "m.py").write_text(source)
    (document,) = tool.read_documents(tmp_path / "m.py", name="pkg/m.py")
    assert document.url == "python-package://pkg/m.py#Table"
    assert document.content == f"Table\n{PROSE.strip()}\n\nTable.read\nread text."


def test_readme_is_the_text_after_the_header_fields_of_metadata(tmp_path):
    files = {"pkg-1.0.dist-info/METADATA": f"Name: pkg\nVersion: 1.0\n\n# pkg\n\n{PROSE}\n"}
    (document,) = choose(tmp_path, files)
    assert document.content == f"# pkg\n\n{PROSE.strip()}"


def test_texts_that_differ_only_in_case_and_space_are_kept_once(tmp_path):
    files = {"a.py": f'"""{PROSE}"""\n', "b.py": f'"""{PROSE.upper().replace(" ", "  ")}"""\n'}
    assert len(choose(tmp_path, files)) == 1


def test_same_packages_in_another_folder_give_the_same_shuffled_documents(tmp_path):
    first, second = (choose(tmp_path / place, FUNCTIONS) for place in "ab")
    assert first == second
    assert [document.url for document in first] != sorted(urls(first))  # shuffled


def test_installed_packages_give_the_requested_amount_of_text(tmp_path):
    code, output = run_forked("sample-corpus", "--output", tmp_path / "c", "--megabytes", 0.2, "--shards", 2)
    assert code == 0, output
    rows = pq.read_table(tmp_path / "c").to_pylist()
    assert 0.2e6 <= sum(len(row["content"].encode()) for row in rows) < 0.5e6
    assert all(row["url"].startswith("python-package://") for row in rows)


def test_folder_of_packages_replaces_the_installed_packages(tmp_path):
    write_package(tmp_path / "packages", {"one.py": f'"""One. {PROSE}"""', "a/two.py": f'"""Two. {PROSE}"""'})
    flags = ("--packages", tmp_path / "packages", "--shards", 1)
    code, output = run_forked("sample-corpus", "--output", tmp_path / "c", *flags)
    assert code == 0, output
    found = {row["url"] for row in pq.read_table(tmp_path / "c").to_pylist()}
    assert found == {"python-package://one.py", "python-package://a/two.py"}
