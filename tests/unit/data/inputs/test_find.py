"""Paths, globs, folders, URLs and lists name the expected input files."""

import gzip
import json
import os
import sys

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFile
from unit.data.inputs.reading import TEXTS, texts_of

from megatron_neobert.data.inputs.find import find_inputs, input_label
from megatron_neobert.errors import ConfigError, MissingInputError, MissingPackageError


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_inputs_are_sorted_within_a_pattern_and_listed_once_and_hidden_files_are_skipped(tmp_path):
    touch(tmp_path, "b.jsonl", "a.jsonl", "deep/c.jsonl", ".hidden", "_SUCCESS", ".cache/d.jsonl")
    a, b, c = (str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "deep/c.jsonl"))
    assert find_inputs([str(tmp_path)]) == [a, b, c]
    assert find_inputs([str(tmp_path / "*.jsonl")]) == [a, b]
    assert find_inputs([str(tmp_path / "**" / "*.jsonl")]) == [a, b, c]
    assert find_inputs([b, str(tmp_path)]) == [b, a, c]


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


def test_list_gives_the_patterns_in_its_lines(tmp_path):
    touch(tmp_path, "a.jsonl", "b.jsonl", "more/c.jsonl", "with space.jsonl")
    lines = [f"{tmp_path}/more", "", f"{tmp_path}/?.jsonl\r", f"  {tmp_path}/with space.jsonl"]
    (tmp_path / "list.txt").write_text("\n".join(lines))
    names = ("more/c.jsonl", "a.jsonl", "b.jsonl", "with space.jsonl")
    for scheme in ("", "file://"):
        assert find_inputs([f"@{scheme}{tmp_path}/list.txt"]) == [str(tmp_path / name) for name in names]


def test_a_list_ends_its_lines_only_at_line_feeds(tmp_path):
    names = [f"a{character}b{character}" for character in ("\u2028", "\u0085", "\f", "\x1c", "\udcff")]
    touch(tmp_path, *names)
    (tmp_path / "list").write_bytes(os.fsencode("\r\n".join(f"{tmp_path}/{name}" for name in names)))
    assert find_inputs([f"@{tmp_path}/list"]) == [f"{tmp_path}/{name}" for name in names]


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_folder_of_a_saved_dataset_gives_only_its_data(tmp_path, scheme):
    data = ["test/data-00000-of-00001.arrow", "train/data-00000-of-00002.arrow", "train/data-00001-of-00002.arrow"]
    metadata = ["cache-0123456789abcdef.arrow", "state.json", "dataset_info.json"]
    touch(tmp_path, *data, "dataset_dict.json", *(f"{part}/{name}" for part in ("test", "train") for name in metadata))
    touch(tmp_path, "other/state.json")  # control: not in the folder of a saved dataset
    expected = [f"{scheme}{tmp_path}/{name}" for name in ("other/state.json", *data)]
    assert find_inputs([f"{scheme}{tmp_path}"]) == expected


def test_folder_gives_no_files_about_its_data_unless_they_are_named(tmp_path):
    about = ["README.md", "readme", "LICENSE", "LICENCE.txt", "SHA256SUMS", "md5sum.txt", "NOTICE", "COPYING"]
    about += ["a.jsonl.sha256", "a.jsonl.md5"]
    data = ["a.jsonl", "license_texts.jsonl", "licensed.jsonl", "notice.jsonl.gz", "readme-00000-of-00002.parquet"]
    data += ["readmes.txt", "summary.txt"]
    touch(tmp_path, *about, *data)
    assert find_inputs([str(tmp_path)]) == [str(tmp_path / name) for name in data]
    assert find_inputs([str(tmp_path / "LICENSE")]) == [str(tmp_path / "LICENSE")]


@pytest.fixture
def memory():
    """fsspec's file system in memory, whose files have URLs only, as in object stores."""
    file_system = fsspec.filesystem("memory")
    yield file_system
    file_system.rm("/bucket", recursive=True)


def test_urls_of_files_folders_and_globs_keep_their_full_address(memory):
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl", "_SUCCESS", ".hidden/d.jsonl"):
        memory.pipe(f"/bucket/{name}", b'{"content": "x"}')
    a, b, c = (f"memory:///bucket/{name}" for name in ("a.jsonl", "b.jsonl", "deep/c.jsonl"))
    assert find_inputs(["memory:///bucket"]) == find_inputs(["memory:///bucket/"]) == [a, b, c]
    assert find_inputs(["memory:///bucket/*.jsonl"]) == [a, b]
    assert find_inputs(["memory:///bucket/**/*.jsonl"]) == [a, b, c]
    assert find_inputs(["memory://bucket/b.jsonl"]) == ["memory://bucket/b.jsonl"]


def test_objects_that_mark_folders_are_no_files(memory):
    """S3's console and Spark write objects of zero bytes whose names end with "/", and file systems find them."""
    memory.pipe("/bucket/deep/c.jsonl", b'{"content": "x"}')
    for marker in ("/bucket/", "/bucket/deep/"):
        memory.store[marker] = MemoryFile(memory, marker)
    try:
        assert {"/bucket/", "/bucket/deep/"} <= {*memory.find("/bucket")}
        for pattern in ("memory:///bucket", "memory:///bucket/*", "memory:///bucket/deep/", "memory:///bucket/**"):
            assert find_inputs([pattern]) == ["memory:///bucket/deep/c.jsonl"]
    finally:
        for marker in ("/bucket/", "/bucket/deep/"):
            del memory.store[marker]


def test_urls_are_read_like_files(memory, tmp_path):
    table = pa.table({"content": TEXTS})
    pq.write_table(table, tmp_path / "parquet", row_group_size=1)
    with pa.ipc.new_stream(tmp_path / "arrow", table.schema) as writer:
        writer.write_table(table)
    lines = "".join(json.dumps({"content": text}) + "\n" for text in TEXTS).encode()
    (tmp_path / "jsonl").write_bytes(lines)
    (tmp_path / "gzip").write_bytes(gzip.compress(lines))
    for path in tmp_path.iterdir():
        url = f"memory://bucket/{path.name}"
        memory.pipe(f"/bucket/{path.name}", path.read_bytes())
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
