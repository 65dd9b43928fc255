"""Find input files by paths, globs, folders, URLs and lists, and tell whether one has changed."""

import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from megatron_neobert.data.inputs.stream import BYTE_ORDER_MARK, is_url, named_errors, open_input
from megatron_neobert.errors import ConfigError, DataError, MissingInputError
from megatron_neobert.runtime.atomic_files import sha256_of
from megatron_neobert.text import without_credentials

# Found in folders of input files, and read only if they are named themselves.
_ABOUT_THE_DATA = re.compile(
    r"(readme|licen[cs]e|notice|copying|(md5|sha\d+|check)sums?)(\.(md|txt|rst|html))?|dataset_(info|dict)\.json",
    re.IGNORECASE,
)
_BESIDE_SAVED_SHARDS = re.compile(r"state\.json|cache-.*\.arrow")  # in a folder with dataset_info.json
# What the file systems of fsspec call it, the surest first.
_VERSION_KEYS = ("ETag", "etag", "md5Hash", "crc32c", "checksum", "mtime", "LastModified", "last_modified", "created")


class InputVersion(NamedTuple):
    """Changes when the content of an input file changes, as far as its file system or server reports it."""

    bytes: int
    version: str


def find_inputs(patterns: Sequence[str]) -> list[str]:
    """Return files and URLs named by paths, globs (`**` descends), folders and `@lists`, each glob and folder sorted.

    A folder gives all files below it except hidden ones, those that start with an underscore (`_SUCCESS`), and what is
    there about the data (README, LICENSE, checksums, what `datasets` saves beside its files). The lines of a file
    `list.txt` are patterns for `@list.txt`. A file that is found several times, be it by a symbolic link, is read once.

    Raises:
        MissingInputError: A pattern matches no file, or something that is none, as a link to nowhere.
    """
    found: dict[str, str] = {}
    for pattern in _with_lists(patterns):
        files = _remote_files(pattern) if is_url(pattern) else _local_files(pattern)
        if not files:
            raise MissingInputError(f"{pattern}: no file matches; check the path, and quote globs in scripts")
        for file in files:
            found.setdefault(file if is_url(file) else os.path.realpath(file), file)
    return list(found.values())


def input_version(path: str) -> InputVersion:
    """Return size, and time of the latest change or what a server has instead of it."""
    if not is_url(path):
        status = Path(path).stat()
        return InputVersion(status.st_size, str(status.st_mtime_ns))
    file_system, inner = file_system_of(path)
    with named_errors(path):
        facts: dict[str, Any] = file_system.info(inner)
    return version_in(facts, path)


def version_in(facts: dict[str, Any], url: str) -> InputVersion:
    """Return the version of a URL from the facts that its file system has about it."""
    if facts.get("size") is None:
        raise DataError(f"{url}: its server does not report its size; copy it to a disk and name that file")
    versions = (str(facts[key]) for key in _VERSION_KEYS if facts.get(key))
    return InputVersion(int(facts["size"]), next(versions, ""))


def input_sha256(path: str) -> str | None:
    """Hash a local file; None for a URL, since what is transferred twice is paid for twice."""
    return None if is_url(path) else sha256_of(Path(path))


def _with_lists(patterns: Iterable[str]) -> Iterable[str]:
    for pattern in patterns:
        if not pattern.startswith("@") or Path(pattern).exists():
            yield pattern
            continue
        path = pattern.removeprefix("@")
        if not is_url(path) and not Path(path).is_file():
            raise MissingInputError(f"{pattern}: there is no file {path} with the names of input files")
        with named_errors(path), open_input(path) as file:
            yield from filter(None, map(str.strip, os.fsdecode(file.read().removeprefix(BYTE_ORDER_MARK)).splitlines()))


def _local_files(pattern: str) -> list[str]:
    files = []
    matches = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
    for top in map(Path, matches):
        files += [top / name for name in _data_among(_walk(top))] if top.is_dir() else [top]
    for file in files:
        if not file.is_file():
            raise MissingInputError(f"{file} is neither a file nor a folder; repair the link, or remove it")
    return [str(file) for file in files]


def _walk(top: Path) -> Iterator[str]:
    """Yield all files below a folder by their paths in it; a folder that leads back to itself is entered once."""

    def refuse(error: OSError) -> None:
        raise error

    entered = {os.path.realpath(top)}
    for folder, inner, files in os.walk(top, followlinks=True, onerror=refuse):
        yield from (Path(folder, name).relative_to(top).as_posix() for name in files)
        targets: dict[str, str] = {}
        for name in sorted(name for name in inner if name[0] not in "._"):
            targets.setdefault(os.path.realpath(Path(folder, name)), name)
        inner[:] = [name for target, name in targets.items() if target not in entered]
        entered |= targets.keys()


def file_system_of(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, the same in all threads of a process, and the path for it."""
    with named_errors(url):
        import fsspec

        try:
            file_system, path = fsspec.core.url_to_fs(url)
        except ValueError as error:
            raise ConfigError(f"{url} cannot be opened ({error}); check how the address begins") from error
        return file_system, path


def _remote_files(url: str) -> list[str]:
    file_system, path = file_system_of(url)
    with named_errors(url):
        if file_system.isfile(path):
            return [url]
        matches = [path]
        if glob.has_magic(path):  # as among local files, no hidden ones, unless the pattern spells them out
            spelt = set(PurePosixPath(path).parts)
            found = ((match, PurePosixPath(match).parts) for match in sorted(file_system.glob(path)))
            matches = [match for match, parts in found if not any(p[0] == "." and p not in spelt for p in parts)]
        files = []
        for match in matches:
            below = [match]
            if not file_system.isfile(match):
                top = match.rstrip("/") + "/"
                names = [file.removeprefix(top) for file in file_system.find(match)] if file_system.isdir(match) else []
                below = [top + name for name in _data_among(names)]
            files += [file_system.unstrip_protocol(file) for file in below]
        return files


def _data_among(names: Iterable[str]) -> list[str]:
    """Return the input files of a folder, sorted, given the paths of its files within it."""
    paths = sorted(path for path in map(PurePosixPath, names) if not any(part[0] in "._" for part in path.parts))
    saved = {path.parent for path in paths if path.name == "dataset_info.json"}
    return [
        str(path)
        for path in paths
        if not _ABOUT_THE_DATA.fullmatch(path.name)
        and not (path.parent in saved and _BESIDE_SAVED_SHARDS.fullmatch(path.name))
    ]


def input_label(path: str) -> str:
    """Return the name of an input file for people: a URL without its credentials, or the path as it is."""
    return without_credentials(path) if is_url(path) else path
