"""The command `neobert sample-corpus`: a small corpus of English prose from the documentation of Python packages.

Source files are parsed and never imported. A document is the docstring of a module, the docstrings of a public class
and its methods, the docstring of a public function, or the README of a package. The output has the shape of RefinedWeb:
parquet files with the columns `content` and `url`. The same packages give the same bytes. A keyed hash shuffles the
documents, so that every contiguous part of the corpus is a fair sample.
"""

import ast
import hashlib
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_neobert.cli import option
from megatron_neobert.errors import DataError
from megatron_neobert.runtime.jobs import progress_bar

# Shorter texts are one-liners such as "Return the name."
MINIMUM_CHARACTERS = 200
# A few longer texts would dominate the corpus: one class has 300,000 characters.
MAXIMUM_CHARACTERS = 20_000
SKIPPED_FOLDERS = {"test", "tests", "testing", "site-packages", "__pycache__", "idlelib"}
SHUFFLE_KEY = b"sample corpus"


@dataclass(frozen=True)
class Document:
    """A document; `url` is python-package://FILE#NAME, with FILE relative to the folder of packages."""

    content: str
    url: str


@dataclass(frozen=True, kw_only=True)
class SampleCorpusOptions:
    output: Path = option(help="new or empty folder for the parquet files")
    packages: Path | None = option(None, "folder with unpacked packages; default: the packages of this Python")
    megabytes: float = option(6.0, "amount of text, in 10^6 bytes", minimum=0.001)
    files: int = option(4, "number of parquet files", minimum=1)


def sample_corpus(options: SampleCorpusOptions) -> None:
    """Write a small corpus of English prose, collected from the documentation of Python packages."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from megatron_neobert.runtime.atomic_files import build_folder

    installed = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")]
    folders = [options.packages] if options.packages else installed
    documents = choose_documents(folders, budget_bytes=int(options.megabytes * 1e6))
    if len(documents) < options.files:
        raise DataError(
            f"found {len(documents)} documentation texts below {', '.join(map(str, folders))}, fewer than --files "
            f"{options.files}; give a folder with more packages as --packages, or remove --packages and use the "
            "Python of an environment in which this project is installed."
        )
    with build_folder(options.output) as unfinished:
        for number in range(options.files):
            start, end = (len(documents) * bound // options.files for bound in (number, number + 1))
            table = pa.Table.from_pylist([vars(document) for document in documents[start:end]])
            pq.write_table(table, unfinished / f"part-{number:04d}.parquet", compression="zstd")
    size = sum(len(document.content.encode()) for document in documents)
    print(f"{len(documents):,} documents, {size / 1e6:.1f} MB of text, in {options.files} files: {options.output}")


def choose_documents(folders: Iterable[Path], *, budget_bytes: int) -> list[Document]:
    """Read whole files in a fixed pseudo-random order until the texts reach `budget_bytes`, or no file is left.

    The documents are returned in another pseudo-random order. Texts that differ from an earlier text only in
    case or white space are left out.
    """
    chosen: dict[bytes, Document] = {}
    size = 0  # not the count of the bar, which stays 0 if the user's environment disables tqdm
    with progress_bar(desc="documentation", total=budget_bytes, unit="B") as bar:
        files: dict[str, Path] = {}
        for folder in folders:
            for path in (*folder.glob("**/*.py"), *folder.glob("*.dist-info/METADATA")):
                relative = path.relative_to(folder)
                if not SKIPPED_FOLDERS.intersection(relative.parts):
                    files[relative.as_posix()] = path
        for name in sorted(files, key=_keyed_hash):
            for document in read_documents(files[name], name=name):
                digest = hashlib.sha256(" ".join(document.content.casefold().split()).encode()).digest()
                if digest not in chosen:
                    chosen[digest] = document
                    document_bytes = len(document.content.encode())
                    size += document_bytes
                    bar.update(document_bytes)
            if size >= budget_bytes:
                break
    return sorted(chosen.values(), key=lambda document: _keyed_hash(document.url))


def read_documents(path: Path, *, name: str) -> Iterator[Document]:
    """Yield the documents of a Python source file, or the README in a METADATA file, with `name` in their URLs.

    Texts of less than 200 or more than 20,000 characters are skipped. Unreadable or invalid files yield nothing.
    """
    try:
        source = path.read_bytes().decode("utf-8")
        # In METADATA, an empty line separates the header fields from the README.
        texts = [("", source.partition("\n\n")[2])] if path.name == "METADATA" else _source_texts(source)
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError, RecursionError):
        return
    for anchor, text in texts:
        lines = [line.rstrip() for line in text.splitlines()]
        # Without lines that have no letter or digit, and without repeated empty lines.
        lines = [line for line in lines if not line or any(character.isalnum() for character in line)]
        pairs = zip(["", *lines], lines, strict=False)
        text = "\n".join(line for previous, line in pairs if previous or line).strip()
        if MINIMUM_CHARACTERS <= len(text) <= MAXIMUM_CHARACTERS:
            yield Document(content=text, url=f"python-package://{name}" + (f"#{anchor}" if anchor else ""))


def _keyed_hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), key=SHUFFLE_KEY, digest_size=16).digest()


def _source_texts(source: str) -> list[tuple[str, str]]:
    """Return (name, documentation) of a module (name "") and its public classes and functions, or raise SyntaxError."""
    with warnings.catch_warnings():
        # For invalid escapes in strings; before Python 3.12 the category was DeprecationWarning.
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        module = ast.parse(source)
    texts = [("", ast.get_docstring(module) or "")]
    for node in module.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
            texts.append((node.name, "\n\n".join(_docstrings(node, name=node.name))))
    return texts


def _docstrings(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, *, name: str) -> Iterator[str]:
    """Yield each docstring of a function, or of a class and its public members, below a line with its dotted name."""
    if docstring := ast.get_docstring(node):
        yield f"{name}\n{docstring}"
    if isinstance(node, ast.ClassDef):
        for member in node.body:
            if isinstance(member, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and member.name[0] != "_":
                yield from _docstrings(member, name=f"{name}.{member.name}")
