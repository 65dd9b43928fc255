"""Which shards there are: files named by paths, globs, folders, URLs and lists, and what shows that one has changed."""

import glob
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from megatron_neobert.data.shards.streams import is_url, open_shard, remote_errors
from megatron_neobert.data.shards.texts import BYTE_ORDER_MARK
from megatron_neobert.errors import ConfigError, DataError, MissingInputError
from megatron_neobert.files import sha256_of

# Found in folders of shards, and read only where they are named themselves.
_ABOUT_THE_DATA = re.compile(r"(readme|licen[cs]e|notice|copying|(md5|sha\d+|check)sums?)([._-].*)?", re.IGNORECASE)
# What the file systems of fsspec call it, the surest first.
_VERSION_KEYS = ("ETag", "etag", "md5Hash", "crc32c", "checksum", "mtime", "LastModified", "last_modified", "created")


class ShardVersion(NamedTuple):
    """Changes when the content of a shard changes, as far as its file system or server tells."""

    bytes: int
    version: str


def find_shards(patterns: Sequence[str]) -> list[str]:
    """Files and URLs named by paths, globs (`**` descends), folders and `@lists`, each glob and folder sorted.

    A folder gives all files below it except hidden ones, those that start with an underscore (`_SUCCESS`), and what is
    there about the data (README, LICENSE, checksums). A data
    set that `datasets` has saved to disk gives its shards in its own order. The lines of a file `list.txt` are
    patterns for `@list.txt`. A file that several patterns name is read once.

    Raises:
        MissingInputError: A pattern matches no file.
    """
    shards: dict[str, None] = {}
    for pattern in _with_lists(patterns):
        files = _remote_files(pattern) if is_url(pattern) else _local_files(pattern)
        if not files:
            raise MissingInputError(f"--input {pattern}: no file matches; check the path, and quote globs in scripts")
        shards.update(dict.fromkeys(files))
    return list(shards)


def shard_version(path: str) -> ShardVersion:
    """Size, and time of the latest change or what a server has instead of it."""
    if not is_url(path):
        status = Path(path).stat()
        return ShardVersion(status.st_size, str(status.st_mtime_ns))
    file_system, inner = _file_system(path)
    with remote_errors(path):
        facts: dict[str, Any] = file_system.info(inner)
    if facts.get("size") is None:
        raise DataError(f"{path}: its server does not tell how large it is; copy it to a disk and name that file")
    versions = (str(facts[key]) for key in _VERSION_KEYS if facts.get(key))
    return ShardVersion(int(facts["size"]), next(versions, ""))


def shard_sha256(path: str) -> str | None:
    """Of a local file; None for a URL, since what is transferred twice is paid for twice."""
    return None if is_url(path) else sha256_of(Path(path))


def _with_lists(patterns: Iterable[str]) -> Iterable[str]:
    for pattern in patterns:
        if not pattern.startswith("@") or Path(pattern).exists():
            yield pattern
            continue
        path = pattern.removeprefix("@")
        if not is_url(path) and not Path(path).is_file():
            raise MissingInputError(f"--input {pattern}: there is no file {path} with the names of shards")
        with remote_errors(path), open_shard(path) as file:
            yield from filter(None, map(str.strip, os.fsdecode(file.read().removeprefix(BYTE_ORDER_MARK)).splitlines()))


def _local_files(pattern: str) -> list[str]:
    matches = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207  (Path.glob refuses absolute patterns)
    return [file for match in matches for file in _files_of(Path(match))]


def _files_of(path: Path) -> list[str]:
    if path.is_file():
        return [str(path)]
    below = [file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()]
    return [str(path / name) for name in _data_among(below, lambda name: (path / name).read_bytes())]


def _file_system(url: str) -> tuple[Any, str]:
    with remote_errors(url):
        import fsspec

        try:
            file_system, path = fsspec.core.url_to_fs(url)
        except ValueError as error:
            raise ConfigError(f"{url} cannot be opened ({error}); check how the address begins") from error
        return file_system, path


def _remote_files(url: str) -> list[str]:
    file_system, path = _file_system(url)
    with remote_errors(url):
        if file_system.isfile(path):
            return [url]
        matches = _remote_glob(file_system, path) if glob.has_magic(path) else [path]
        files = []
        for match in matches:
            below = [match] if file_system.isfile(match) else _remote_files_below(file_system, match)
            files += [file_system.unstrip_protocol(file) for file in below]
        return files


def _remote_glob(file_system: Any, pattern: str) -> list[str]:
    """As a glob of files gives them: no hidden ones, unless the pattern spells them out."""
    spelt = set(PurePosixPath(pattern).parts)
    matches = sorted(file_system.glob(pattern))
    return [match for match in matches if not any(p[0] == "." and p not in spelt for p in PurePosixPath(match).parts)]


def _remote_files_below(file_system: Any, folder: str) -> list[str]:
    prefix = folder.rstrip("/") + "/"
    below = [file.removeprefix(prefix) for file in file_system.find(folder)] if file_system.isdir(folder) else []
    return [prefix + name for name in _data_among(below, lambda name: file_system.cat_file(prefix + name))]


def _data_among(names: Iterable[str], read: Callable[[str], bytes]) -> list[str]:
    """The shards among the files below a folder, all given by their paths within it."""
    paths = sorted(path for path in map(PurePosixPath, names) if not any(part[0] in "._" for part in path.parts))
    paths = [path for path in paths if not _ABOUT_THE_DATA.fullmatch(path.name)]
    saved = {path.parent: _saved_shards(read(str(path))) for path in paths if path.name == "state.json"}
    saved = {folder: shards for folder, shards in saved.items() if shards}
    found: dict[str, None] = {}
    for path in paths:
        if path.parent in saved:
            found.update({str(path.parent / shard): None for shard in saved[path.parent]})
        elif not (saved and path.name == "dataset_dict.json"):
            found[str(path)] = None
    return list(found)


def _saved_shards(state: bytes) -> list[str]:
    """The files that the state.json of a saved data set names; none if it is another file of that name."""
    try:
        content = json.loads(state)
        return [entry["filename"] for entry in content["_data_files"]]
    except (ValueError, TypeError, KeyError):
        return []


def shard_label(path: str) -> str:
    """The name for people: a URL without its password and query, which may hold a signature."""
    if not is_url(path):
        return path
    scheme, _, rest = path.partition("://")
    address, _, _ = rest.partition("?")
    host, slash, file = address.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{file}"
