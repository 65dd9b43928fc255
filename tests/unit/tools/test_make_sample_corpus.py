"""The sample corpus: documentation is parsed, never executed, and gives the same documents every time."""

from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
from commands import run_forked

from megatron_neobert.commands import sample_corpus as tool

PROSE = "Every row of the table is read once and its columns are summed before the next row is read. " * 3


def write_package(folder: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")


def test_folder_of_packages_is_parsed_and_never_executed_and_equal_texts_are_kept_once(tmp_path):
    witness = tmp_path / "executed"
    members = "".join(f'    def {name}(self):\n        """{name} text."""\n' for name in ("read", "_hidden"))
    files = {
        "one.py": f'"""One. {PROSE}"""\nopen({str(witness)!r}, "w")\n',
        "a/two.py": f'class Table:\n    """{PROSE}"""\n{members}',
        "again.py": f'"""One. {PROSE.upper().replace(" ", "  ")}"""',
        "pkg-1.0.dist-info/METADATA": f"Name: pkg\nVersion: 1.0\n\n# pkg\n\n{PROSE}\n",
    }
    write_package(tmp_path / "packages", files)
    flags = ("--packages", tmp_path / "packages", "--files", 1)
    code, output = run_forked("sample-corpus", "--output", tmp_path / "c", *flags)
    assert code == 0, output
    rows = pq.read_table(tmp_path / "c").to_pylist()
    found = {row["url"].removeprefix("python-package://"): row["content"] for row in rows}
    assert len(rows) == len(found) == 3
    assert found["a/two.py#Table"] == f"Table\n{PROSE.strip()}\n\nTable.read\nread text."
    assert found["pkg-1.0.dist-info/METADATA"] == f"# pkg\n\n{PROSE.strip()}"
    assert len({"one.py", "again.py"} & set(found)) == 1
    assert not witness.exists()


def test_same_packages_in_another_folder_give_the_same_shuffled_documents(tmp_path):
    # Each has one docstring, a little longer than PROSE.
    files = {f"m{number}.py": f'def f{number}():\n    """{number} {PROSE}"""\n' for number in range(20)}
    chosen = []
    for place in "ab":
        write_package(tmp_path / place, files)
        chosen.append(tool.choose_documents([tmp_path / place], budget_bytes=10**6))
    urls = [document.url for document in chosen[0]]
    assert chosen[0] == chosen[1]
    assert urls != sorted(urls)  # shuffled


def test_size_is_limited_with_and_without_a_progress_bar(tmp_path, monkeypatch):
    write_package(tmp_path, {f"m{number}.py": f'"""{number} {PROSE}"""' for number in range(20)})
    chosen = tool.choose_documents([tmp_path], budget_bytes=2 * len(PROSE))
    assert 2 <= len(chosen) <= 3
    # As the variable TQDM_DISABLE does.
    monkeypatch.setattr(tool, "progress_bar", partial(tool.progress_bar, disable=True))
    assert tool.choose_documents([tmp_path], budget_bytes=2 * len(PROSE)) == chosen
