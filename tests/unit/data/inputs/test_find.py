"""Which shards a list of patterns stands for."""

import gzip
import json
import os
import sys

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from unit.data.inputs.reading import TEXTS, texts_of

from megatron_neobert.data.inputs.find import find_inputs, input_label
from megatron_neobert.errors import ConfigError, MissingInputError, MissingPackageError


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_shards_are_sorted_within_a_pattern_hidden_ones_left_out_and_repeated_ones_read_once(tmp_path):
    touch(tmp_path, "b.jsonl", "a.jsonl", "deep/c.jsonl", ".hidden", "_SUCCESS", ".cache/d.jsonl")
    a, b, c = (str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "deep/c.jsonl"))
    assert find_inputs([str(tmp_path)]) == [a, b, c]
    assert find_inputs([str(tmp_path / "*.jsonl")]) == [a, b]
    assert find_inputs([str(tmp_path / "**" / "*.jsonl")]) == [a, b, c]
    assert find_inputs([b, str(tmp_path)]) == [b, a, c]


@pytest.mark.parametrize(
    "pattern", ["*.parquet", "missing.jsonl", "empty", "file:*.parquet", "file:missing", "file:empty"]
)
def test_pattern_without_a_file_is_missing_input(tmp_path, pattern):
    (tmp_path / "empty").mkdir()
    start = f"file://{tmp_path}/" if pattern.startswith("file:") else f"{tmp_path}/"
    pattern = pattern.removeprefix("file:")
    with pytest.raises(MissingInputError, match=f"{pattern.lstrip('*')}: no file matches"):
        find_inputs([start + pattern])


# --- links and folders that cannot be read


def test_folders_behind_links_are_entered_and_a_link_that_leads_back_ends(tmp_path):
    touch(tmp_path, "other/b.jsonl", "data/a.jsonl", "data/deep/c.jsonl")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "data" / "link_again").symlink_to(tmp_path / "other")
    (tmp_path / "data" / "deep" / "back").symlink_to(tmp_path / "data")
    (tmp_path / "other" / "also_back").symlink_to(tmp_path / "data")
    names = ("a.jsonl", "deep/c.jsonl", "link/b.jsonl")
    assert find_inputs([str(tmp_path / "data")]) == [str(tmp_path / "data" / name) for name in names]


@pytest.mark.parametrize("pattern", ["data", "data/*", "data/lost.jsonl"])
def test_link_to_nowhere_is_missing_input(tmp_path, pattern):
    touch(tmp_path, "data/a.jsonl", "data/_gone")
    (tmp_path / "data" / ".hidden").symlink_to(tmp_path / "gone")
    assert find_inputs([str(tmp_path / "data")]) == [str(tmp_path / "data" / "a.jsonl")]
    (tmp_path / "data" / "lost.jsonl").symlink_to(tmp_path / "gone")
    with pytest.raises(MissingInputError, match=r"/data/lost\.jsonl is neither a file nor a folder"):
        find_inputs([str(tmp_path / pattern)])


def test_folder_that_may_not_be_read_is_an_error_not_a_gap(tmp_path, monkeypatch):
    touch(tmp_path, "a.jsonl", "closed/b.jsonl", ".trash/c.jsonl")
    scan = os.scandir

    def scan_as_a_stranger(path):  # who is root may read everything
        if os.path.basename(path) in ("closed", ".trash"):  # noqa: PTH119  (a string or a path)
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_as_a_stranger)
    with pytest.raises(PermissionError, match=r"Permission denied: '.*/closed'"):
        find_inputs([str(tmp_path)])


def test_file_named_in_several_spellings_is_read_once_under_the_first(tmp_path, monkeypatch):
    touch(tmp_path, "shards/a.jsonl", "shards/b.jsonl")
    monkeypatch.chdir(tmp_path)
    assert find_inputs(["shards", str(tmp_path / "shards"), "./shards/../shards/a.jsonl"]) == [
        "shards/a.jsonl",
        "shards/b.jsonl",
    ]
    (tmp_path / "shards" / "c.jsonl").symlink_to(tmp_path / "shards" / "a.jsonl")
    assert find_inputs(["shards"]) == ["shards/a.jsonl", "shards/b.jsonl"]
    assert find_inputs(["shards/c.jsonl", "shards"]) == ["shards/c.jsonl", "shards/b.jsonl"]


# --- lists


def test_list_gives_the_patterns_in_its_lines(tmp_path):
    touch(tmp_path, "a.jsonl", "b.jsonl", "more/c.jsonl", "with space.jsonl")
    lines = [f"{tmp_path}/more", "", f"{tmp_path}/?.jsonl\r", f"  {tmp_path}/with space.jsonl"]
    (tmp_path / "list.txt").write_text("\n".join(lines))
    names = ("more/c.jsonl", "a.jsonl", "b.jsonl", "with space.jsonl")
    assert find_inputs([f"@{tmp_path}/list.txt"]) == [str(tmp_path / name) for name in names]
    assert find_inputs([f"@file://{tmp_path}/list.txt"]) == [str(tmp_path / name) for name in names]


@pytest.mark.parametrize("start", ["", "file://"])
def test_folder_of_a_saved_dataset_gives_its_shards_alone(tmp_path, start):
    shards = ["test/data-00000-of-00001.arrow", "train/data-00000-of-00002.arrow", "train/data-00001-of-00002.arrow"]
    others = ["cache-0123456789abcdef.arrow", "state.json", "dataset_info.json"]
    touch(
        tmp_path, *shards, "dataset_dict.json", *(f"{split}/{name}" for split in ("test", "train") for name in others)
    )
    touch(tmp_path, "other/state.json")  # control: not of a saved data set
    expected = [f"{start}{tmp_path}/{name}" for name in ("other/state.json", *shards)]
    assert find_inputs([f"{start}{tmp_path}"]) == expected


# --- URLs


@pytest.fixture
def memory():
    """A store that has nothing but URLs, as object stores have."""
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


def test_shards_behind_urls_are_read_like_files(memory, tmp_path):
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
        assert texts_of(url, chunk_bytes=20) == TEXTS  # in several parts, where the format has them


def test_kind_of_address_that_nothing_can_open_is_a_setting_to_fix():
    with pytest.raises(ConfigError, match=r"nowhere://bucket/shard cannot be opened .Protocol not known"):
        find_inputs(["nowhere://bucket/shard"])


@pytest.mark.parametrize(("url", "package"), [("gs://bucket/shard", "gcsfs"), ("abfs://bucket@host/shard", "adlfs")])
def test_missing_package_of_an_address_ends_with_69_and_the_command_that_installs_it(monkeypatch, url, package):
    monkeypatch.setitem(sys.modules, package, None)  # as where it is not installed
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
        ("s3://bucket/part-?.jsonl", "s3://bucket/part-?.jsonl"),
        ("/data/what?/me:x@home.jsonl", "/data/what?/me:x@home.jsonl"),
    ],
)
def test_label_of_a_shard_keeps_no_secret(url, label):
    assert input_label(url) == label


def test_folder_gives_no_files_about_its_data_unless_they_are_named(tmp_path):
    about = ["README.md", "readme", "LICENSE", "LICENCE.txt", "SHA256SUMS", "md5sum.txt", "NOTICE", "COPYING"]
    data = ["a.jsonl", "license_texts.jsonl", "licensed.jsonl", "notice.jsonl.gz", "readme-00000-of-00002.parquet"]
    data += ["readmes.txt", "summary.txt"]
    for name in (*about, *data):
        (tmp_path / name).touch()
    assert find_inputs([str(tmp_path)]) == [str(tmp_path / name) for name in data]
    assert find_inputs([str(tmp_path / "LICENSE")]) == [str(tmp_path / "LICENSE")]
