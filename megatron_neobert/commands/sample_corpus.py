"""The command `neobert sample-corpus`: a small corpus of English prose, the documentation texts of Python packages.

Source files are parsed, never imported. A document is the docstring of a module, the docstrings of a public class and
its methods, the docstring of a public function, or a package's own README. The shards have RefinedWeb's shape: parquet
with the columns `content` and `url`. The same packages give the same bytes, in an order shuffled by a keyed hash, so
that any contiguous part of the corpus is a fair sample of the whole.
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

MINIMUM_CHARACTERS = 200  # shorter texts are one-liners such as "Return the name."
MAXIMUM_CHARACTERS = 20_000  # the few longer ones would weigh too much: one class alone has 300,000
SKIPPED_FOLDERS = {"test", "tests", "testing", "site-packages", "__pycache__", "idlelib"}
SHUFFLE_KEY = b"sample corpus"


@dataclass(frozen=True)
class Document:
    """One row of the corpus; `url` is python-package://FILE#NAME, FILE relative to the folder of packages."""

    content: str
    url: str


@dataclass(frozen=True, kw_only=True)
class SampleCorpusOptions:
    """The command line of `neobert sample-corpus`."""

    output: Path = option(help="folder for the input files: a new or an empty one")
    packages: Path | None = option(None, "folder with packages, unpacked; by default those installed here")
    megabytes: float = option(6.0, "text to collect, in 10^6 bytes", minimum=0.001)
    shards: int = option(4, "parquet files to write", minimum=1)


def write_sample_corpus(options: SampleCorpusOptions) -> None:
    """Write a small corpus of real English prose: the documentation texts of Python packages.

    Raises:
        DataError: There are fewer texts than parquet files to write.
        OutputError: The folder exists and is not empty.
    """
    installed = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")]
    folders = [options.packages] if options.packages else installed
    documents = choose_documents(folders, budget_bytes=int(options.megabytes * 1e6))
    if len(documents) < options.shards:
        raise DataError(
            f"found {len(documents)} documentation texts below {', '.join(map(str, folders))}, fewer than --shards "
            f"{options.shards}; name a folder with more packages by --packages, or leave it out and run this with "
            "the Python of an environment that has this project installed."
        )
    write_shards(documents, options.output, shards=options.shards)
    size = sum(len(document.content.encode()) for document in documents)
    print(f"{len(documents):,} documents, {size / 1e6:.1f} MB of text, in {options.shards} shards: {options.output}")


def choose_documents(folders: Iterable[Path], *, budget_bytes: int) -> list[Document]:
    """Return documents of files in the order of a keyed hash, until their texts reach the budget, shuffled.

    Texts that differ only in case or white space count once.
    """
    files = {path.relative_to(folder).as_posix(): path for folder in folders for path in _documented_files(folder)}
    chosen: dict[bytes, Document] = {}
    size = 0
    for name in sorted(files, key=_keyed_hash):
        for document in read_documents(files[name], name=name):
            same = hashlib.sha256(" ".join(document.content.casefold().split()).encode()).digest()
            if same not in chosen:
                chosen[same] = document
                size += len(document.content.encode())
        if size >= budget_bytes:
            break
    return sorted(chosen.values(), key=lambda document: _keyed_hash(document.url))


def read_documents(path: Path, *, name: str) -> Iterator[Document]:
    """Yield the texts of a Python source file, or the README in a package's METADATA; none if it cannot be read."""
    try:
        source = path.read_bytes().decode("utf-8")
        # A package's long description follows the header fields after an empty line.
        texts = [("", source.partition("\n\n")[2])] if path.name == "METADATA" else _source_texts(source)
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError, RecursionError):
        return  # some packages ship templates, Python 2 sources or sources in other encodings; they are skipped
    for anchor, text in texts:
        text = _clean(text)
        if MINIMUM_CHARACTERS <= len(text) <= MAXIMUM_CHARACTERS:
            yield Document(content=text, url=f"python-package://{name}" + (f"#{anchor}" if anchor else ""))


def write_shards(documents: list[Document], output: Path, *, shards: int) -> None:
    """Write `output`/part-0000.parquet and so on; the folder appears under its name when all are complete.

    Raises:
        OutputError: The folder exists and is not empty.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from megatron_neobert.runtime.atomic_files import build_folder

    with build_folder(output) as unfinished:
        for shard in range(shards):
            start, end = (len(documents) * number // shards for number in (shard, shard + 1))
            columns = {key: [getattr(document, key) for document in documents[start:end]] for key in ("content", "url")}
            pq.write_table(pa.table(columns), unfinished / f"part-{shard:04d}.parquet", compression="zstd")


def _documented_files(folder: Path) -> Iterator[Path]:
    for pattern in ("**/*.py", "*.dist-info/METADATA"):
        for path in folder.glob(pattern):
            if not SKIPPED_FOLDERS.intersection(path.relative_to(folder).parts):
                yield path


def _keyed_hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), key=SHUFFLE_KEY, digest_size=16).digest()


def _source_texts(source: str) -> list[tuple[str, str]]:
    """Return pairs of a name ('' for the module itself) and its documentation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # invalid escapes in other people's strings
        warnings.simplefilter("ignore", DeprecationWarning)  # the same before Python 3.12
        module = ast.parse(source)
    texts = [("", ast.get_docstring(module) or "")]
    for node in module.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
            texts.append((node.name, "\n\n".join(_docstrings(node, name=node.name))))
    return texts


def _docstrings(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, *, name: str) -> Iterator[str]:
    """Yield the docstring of a function, or of a class and then of its public members, each under its name."""
    if docstring := ast.get_docstring(node):
        yield f"{name}\n{docstring}"
    if isinstance(node, ast.ClassDef):
        for member in node.body:
            if isinstance(member, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and member.name[0] != "_":
                yield from _docstrings(member, name=f"{name}.{member.name}")


def _clean(text: str) -> str:
    """Return a text without rulers and markup lines that hold no letter, and with at most one empty line in a row."""
    lines = [line.rstrip() for line in text.splitlines()]
    lines = [line for line in lines if not line or any(character.isalnum() for character in line)]
    return "\n".join(line for before, line in zip(["", *lines], lines, strict=False) if before or line).strip()
