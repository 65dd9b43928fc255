"""Find input files by paths, globs, folders, URLs and lists, and detect whether an input file has changed."""

import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from megatron_neobert.data.inputs.input_reader import BYTE_ORDER_MARK, file_system_of, is_url, named_errors, open_input
from megatron_neobert.errors import DataError, MissingInputError
from megatron_neobert.text import without_credentials

# Files about the data, which a folder of input files often contains.
_ABOUT_THE_DATA = re.compile(
    r"(readme|licen[cs]e|notice|copying|(md5|sha\d+|check)sums?)(\.(md|txt|rst|html))?"
    r"|.+\.(md5|sha\d+)(sums?)?|dataset_(info|dict)\.json",
    re.IGNORECASE,
)
# Files that `datasets` writes next to its data, in a folder with dataset_info.json.
_WRITTEN_BY_DATASETS = re.compile(r"state\.json|cache-.*\.arrow")
# Names of a file's version in the file systems of fsspec, the most reliable first.
_VERSION_KEYS = ("ETag", "etag", "md5Hash", "crc32c", "checksum", "mtime", "LastModified", "last_modified", "created")


class InputVersion(NamedTuple):
    """Size and version of an input file. They differ after a change that the file system or server reports."""

    bytes: int
    version: str  # modification time, or the identifier that the server uses


def find_inputs(patterns: Sequence[str]) -> list[str]:
    """Return the paths and URLs of the input files that `patterns` name, in the order of the patterns.

    A pattern is a path, a glob (`**` descends), a folder, a URL, or `@list.txt`, whose lines are patterns. The files of
    each glob and folder are sorted. A folder stands for all files below it, except files and folders that begin with
    `.` or `_`, and files about the data (README, LICENSE, checksums, metadata of `datasets`). A file that several
    patterns or symbolic links name is returned once. Raise MissingInputError if a pattern matches no input file.
    """
    inputs: dict[str, str] = {}  # by the path after all symbolic links
    for pattern in _with_lists(patterns):
        if is_url(pattern):
            files = _remote_files(pattern)
        else:
            found: list[Path] = []
            matches = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
            for match in map(Path, matches):
                found += [match / name for name in _select_data_files(_walk(match))] if match.is_dir() else [match]
            for path in found:
                if not path.is_file():
                    raise MissingInputError(f"{path} is neither a file nor a folder; repair or remove the link")
            files = list(map(str, found))
        if not files:
            raise MissingInputError(f"{pattern}: no file matches; check the path, and quote globs in scripts")
        for file in files:
            inputs.setdefault(file if is_url(file) else os.path.realpath(file), file)
    return list(inputs.values())


def input_version(path: str) -> InputVersion:
    """Return the size in bytes and the version of an input file or URL, to detect later changes."""
    if not is_url(path):
        status = Path(path).stat()
        return InputVersion(status.st_size, str(status.st_mtime_ns))
    file_system, path_in_file_system = file_system_of(path)
    with named_errors(path):
        info: dict[str, Any] = file_system.info(path_in_file_system)
    return version_from_info(info, path)


def version_from_info(info: dict[str, Any], url: str) -> InputVersion:
    """Return a URL's version from its file system's `info` result. Raise DataError if the size is missing."""
    if info.get("size") is None:
        raise DataError(f"{url}: the server does not report the size; copy the file to a disk and use the copy")
    versions = (str(info[key]) for key in _VERSION_KEYS if info.get(key))
    return InputVersion(int(info["size"]), next(versions, ""))


def _with_lists(patterns: Iterable[str]) -> Iterable[str]:
    """Yield the patterns. Replace each `@list` by the lines of the file or URL `list`, without blank lines.

    A pattern `@list` is not replaced if a file `@list` exists. Raise MissingInputError if `list` does not exist.
    """
    for pattern in patterns:
        if not pattern.startswith("@") or Path(pattern).exists():
            yield pattern
            continue
        path = pattern.removeprefix("@")
        if not is_url(path) and not Path(path).is_file():
            raise MissingInputError(f"{pattern}: {path} is not a file; name a file that lists one input per line")
        with named_errors(path), open_input(path) as file:
            # Not str.splitlines and str.strip: names can contain U+2028, U+0085 and form feeds.
            lines = (line.strip(b" \t\r") for line in file.read().removeprefix(BYTE_ORDER_MARK).split(b"\n"))
            yield from map(os.fsdecode, filter(None, lines))


def _walk(top: Path) -> Iterator[str]:
    """Yield all files below `top` as paths relative to `top`, unsorted. Raise OSError if a folder is unreadable.

    Folders that begin with `.` or `_` are skipped. Symbolic links are followed, but each folder is read only once.
    """

    def fail(error: OSError) -> None:
        raise error

    visited = {os.path.realpath(top)}
    for folder, subfolders, files in os.walk(top, followlinks=True, onerror=fail):
        yield from (Path(folder, name).relative_to(top).as_posix() for name in files)
        targets: dict[str, str] = {}
        for name in sorted(name for name in subfolders if name[0] not in "._"):
            targets.setdefault(os.path.realpath(Path(folder, name)), name)
        subfolders[:] = [name for target, name in targets.items() if target not in visited]
        visited |= targets.keys()


def _remote_files(url: str) -> list[str]:
    file_system, path = file_system_of(url)
    with named_errors(url):
        if file_system.isfile(path):
            return [url]
        matches = [path]
        if glob.has_magic(path):
            # Python's glob skips hidden files unless the pattern names them; fsspec's glob does not.
            named = set(PurePosixPath(path).parts)
            matches = [
                match
                for match in sorted(file_system.glob(path))
                if not any(part[0] == "." and part not in named for part in PurePosixPath(match).parts)
            ]
        files = []
        for match in matches:
            if file_system.isfile(match):
                files.append(match)
            elif file_system.isdir(match):
                top = match.rstrip("/") + "/"
                # An object whose name ends with "/" is an empty folder, as S3's console and Spark make them.
                names = (file.removeprefix(top) for file in file_system.find(match) if not file.endswith("/"))
                files += [top + name for name in _select_data_files(names)]
        return [file_system.unstrip_protocol(file) for file in files]


def _select_data_files(names: Iterable[str]) -> list[str]:
    """Return the sorted paths, without hidden files and folders (`.` or `_`), and without files about the data."""
    paths = sorted(path for path in map(PurePosixPath, names) if not any(part[0] in "._" for part in path.parts))
    saved_datasets = {path.parent for path in paths if path.name == "dataset_info.json"}
    return [
        str(path)
        for path in paths
        if not _ABOUT_THE_DATA.fullmatch(path.name)
        and not (path.parent in saved_datasets and _WRITTEN_BY_DATASETS.fullmatch(path.name))
    ]


def input_label(path: str) -> str:
    """Return the name of an input file for messages and the manifest: a URL without its credentials and query."""
    return without_credentials(path) if is_url(path) else path
