"""Paths, globs, folders, URLs and lists name the expected input files."""

import gzip
import os
import sys

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.core import url_to_fs
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from unit.data.inputs.reading import JSON_LINES, TEXTS, texts_of, write_table

from megatron_neobert.data.inputs.find import find_inputs, input_label
from megatron_neobert.errors import ConfigError, MissingInputError, MissingPackageError


@pytest.fixture
def memory():
    """fsspec's file system in memory, whose files have URLs only, as in object stores."""
    yield fsspec.filesystem("memory")
    MemoryFileSystem.store.clear()


def touch(folder, *names):
    """Create empty files in a folder or below a URL."""
    for name in names:
        file_system, path = url_to_fs(f"{folder}/{name}", auto_mkdir=True)
        file_system.touch(path)


@pytest.mark.parametrize("is_remote", [False, True])
def test_inputs_are_sorted_within_a_pattern_and_listed_once_and_hidden_files_are_skipped(tmp_path, memory, is_remote):
    top = "memory:///bucket" if is_remote else str(tmp_path)
    touch(top, "b.jsonl", "a.jsonl", "deep/c.jsonl", ".hidden", "_SUCCESS", ".cache/d.jsonl")
    a, b, c = (f"{top}/{name}" for name in ("a.jsonl", "b.jsonl", "deep/c.jsonl"))
    assert find_inputs([top]) == find_inputs([f"{top}/"]) == [a, b, c]
    assert find_inputs([f"{top}/*.jsonl"]) == [a, b]
    assert find_inputs([f"{top}/**/*.jsonl"]) == [a, b, c]
    assert find_inputs([b, top]) == [b, a, c]


@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize("pattern", ["*.parquet", "missing", "empty"])
def test_pattern_without_a_file_is_missing_input(tmp_path, pattern, scheme):
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingInputError, match=f"{pattern.lstrip('*')}: no file matches"):
        find_inputs([f"{scheme}{tmp_path}/{pattern}"])


def test_folders_behind_links_are_read_once_and_link_cycles_end(tmp_path):
    touch(tmp_path, "other/b.jsonl", "data/a.jsonl", "data/deep/c.jsonl")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "data" / "link_again").symlink_to(tmp_path / "other")
    (tmp_path / "data" / "deep" / "back").symlink_to(tmp_path / "data")
    (tmp_path / "other" / "also_back").symlink_to(tmp_path / "data")
    names = ("a.jsonl", "deep/c.jsonl", "link/b.jsonl")
    assert find_inputs([str(tmp_path / "data")]) == [str(tmp_path / "data" / name) for name in names]


@pytest.mark.parametrize("pattern", ["data", "data/*", "data/broken.jsonl"])
def test_broken_link_is_missing_input_unless_it_is_hidden(tmp_path, pattern):
    touch(tmp_path, "data/a.jsonl")
    (tmp_path / "data" / ".hidden").symlink_to(tmp_path / "gone")
    assert find_inputs([str(tmp_path / "data")]) == [str(tmp_path / "data" / "a.jsonl")]
    (tmp_path / "data" / "broken.jsonl").symlink_to(tmp_path / "gone")
    with pytest.raises(MissingInputError, match=r"/data/broken\.jsonl is neither a file nor a folder"):
        find_inputs([str(tmp_path / pattern)])


def test_folder_without_read_permission_is_an_error(tmp_path, monkeypatch):
    touch(tmp_path, "a.jsonl", "closed/b.jsonl", ".trash/c.jsonl")
    scan = os.scandir

    def scan_without_permission(path):  # root may read every folder
        if os.path.basename(path) in ("closed", ".trash"):  # noqa: PTH119  (a string or a path)
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_without_permission)
    with pytest.raises(PermissionError, match=r"Permission denied: '.*/closed'"):
        find_inputs([str(tmp_path)])


def test_file_with_several_paths_is_listed_once_under_the_first_path(tmp_path, monkeypatch):
    touch(tmp_path, "data/a.jsonl", "data/b.jsonl")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "c.jsonl").symlink_to(tmp_path / "data" / "a.jsonl")
    assert find_inputs(["data", str(tmp_path / "data"), "./data/../data/a.jsonl"]) == ["data/a.jsonl", "data/b.jsonl"]
    assert find_inputs(["data/c.jsonl", "data"]) == ["data/c.jsonl", "data/b.jsonl"]


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_list_gives_the_patterns_in_its_lines_which_end_only_at_line_feeds(tmp_path, scheme):
    odd = [f"z{character}b{character}" for character in ("\u2028", "\u0085", "\f", "\x1c", "\udcff")]
    touch(tmp_path, "a.jsonl", "b.jsonl", "more/c.jsonl", "with space.jsonl", *odd)
    lines = ["more", "?.jsonl\r", "with space.jsonl", *odd]
    content = "\n\n  ".join(f"{tmp_path}/{line}" for line in lines)
    (tmp_path / "list.txt").write_bytes(os.fsencode(content))
    names = ("more/c.jsonl", "a.jsonl", "b.jsonl", "with space.jsonl", *odd)
    assert find_inputs([f"@{scheme}{tmp_path}/list.txt"]) == [str(tmp_path / name) for name in names]


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_folder_gives_no_files_about_its_data_unless_they_are_named(tmp_path, scheme):
    about = ["README.md", "readme", "LICENSE", "LICENCE.txt", "SHA256SUMS", "md5sum.txt", "NOTICE", "COPYING"]
    about += ["a.jsonl.sha256", "a.jsonl.md5", "dataset_dict.json"]
    saved = ("cache-0123456789abcdef.arrow", "state.json", "dataset_info.json")  # by `datasets`
    about += [f"{split}/{name}" for split in ("test", "train") for name in saved]
    data = ["a.jsonl", "license_texts.jsonl", "licensed.jsonl", "notice.jsonl.gz", "other/state.json"]
    data += ["readme-00000-of-00002.parquet", "readmes.txt", "summary.txt", "test/data-00000-of-00001.arrow"]
    data += ["train/data-00000-of-00002.arrow", "train/data-00001-of-00002.arrow"]
    touch(tmp_path, *about, *data)
    assert find_inputs([f"{scheme}{tmp_path}"]) == [f"{scheme}{tmp_path}/{name}" for name in data]
    assert find_inputs([f"{scheme}{tmp_path}/LICENSE"]) == [f"{scheme}{tmp_path}/LICENSE"]


def test_objects_that_mark_folders_are_no_files(memory):
    """S3's console and Spark write objects of zero bytes whose names end with "/", and file systems find them."""
    touch("memory:///bucket", "deep/c.jsonl")
    for marker in ("/bucket/", "/bucket/deep/"):
        memory.store[marker] = MemoryFile(memory, marker)
    assert {"/bucket/", "/bucket/deep/"} <= {*memory.find("/bucket")}
    for pattern in ("memory:///bucket", "memory:///bucket/*", "memory:///bucket/deep/", "memory:///bucket/**"):
        assert find_inputs([pattern]) == ["memory:///bucket/deep/c.jsonl"]


def test_urls_are_read_like_files(memory, tmp_path):
    table = pa.table({"content": TEXTS})
    write_table(pq.ParquetWriter, tmp_path / "parquet", table, 1)
    write_table(pa.ipc.new_stream, tmp_path / "arrow", table)
    (tmp_path / "jsonl").write_bytes(JSON_LINES)
    (tmp_path / "gzip").write_bytes(gzip.compress(JSON_LINES))
    for path in tmp_path.iterdir():
        url = f"memory://bucket/{path.name}"
        memory.pipe(f"/bucket/{path.name}", path.read_bytes())
        assert find_inputs([url]) == [url]
        assert texts_of(url) == texts_of(path) == TEXTS
        assert texts_of(url, chunk_bytes=20) == TEXTS  # several chunks of Parquet and JSON lines


@pytest.mark.parametrize("pattern", ["nowhere://bucket/shard", "@nowhere://bucket/shard"])
def test_address_of_an_unknown_protocol_is_a_wrong_setting(pattern):
    with pytest.raises(ConfigError, match=r"nowhere://bucket/shard cannot be opened .Protocol not known"):
        find_inputs([pattern])


@pytest.mark.parametrize(("url", "package"), [("gs://bucket/shard", "gcsfs"), ("abfs://bucket@host/shard", "adlfs")])
def test_missing_package_of_an_address_ends_with_69_and_the_command_that_installs_it(monkeypatch, url, package):
    monkeypatch.setitem(sys.modules, package, None)  # import fails as if it were not installed
    with pytest.raises(MissingPackageError, match=rf"^{url}: .*: {sys.executable} -m pip install {package}$") as caught:
        find_inputs([url])
    assert caught.value.exit_code == 69


@pytest.mark.parametrize(
    ("url", "label"),
    [
        ("https://me:sec@ret@host.org/b?sig=a@b/c?d", "https://host.org/b"),
        ("s3://key:secret@bucket/b.jsonl?versionId=1", "s3://bucket/b.jsonl"),
        ("abfs://container@account.dfs.core.windows.net/b?sig=x", "abfs://container@account.dfs.core.windows.net/b"),
        ("simplecache::https://me:secret@host.org/b?sig=x", "simplecache::https://host.org/b"),
        ("/data/what?/me:x@home.jsonl", "/data/what?/me:x@home.jsonl"),
    ],
)
def test_label_of_an_input_file_has_no_credentials(url, label):
    assert input_label(url) == label
