"""Commands with a corpus at a URL."""

from pathlib import Path

import pytest
from commands import run_forked
from object_server import ObjectServer
from processes import run_command


@pytest.fixture
def server(tiny_corpus):
    with ObjectServer(Path(tiny_corpus.prefix).parent).running() as running:
        yield running


def url_of(server, tiny_corpus):
    return f"{server.url}/{Path(tiny_corpus.prefix).name}"


def test_dry_run_fetches_manifest_and_index_but_no_tokens(server, tiny_corpus, tmp_path):
    url = url_of(server, tiny_corpus)
    flags = ["--data-path", "0.3", url, "0.7", f"{url}:min=20:max=90", "--tokenizer-model", tiny_corpus.tokenizer]
    ended = run_command(
        "megatron_neobert.pretrain", "--dry-run", *flags, "--object-storage-cache-path", tmp_path / "cache"
    )
    assert ended.code == 0 and "594 of 600 documents" in ended.output, ended.output
    assert {Path(r.name).suffix for r in server.requests if r.method == "GET"} == {".json", ".idx"}


@pytest.mark.parametrize(
    ("tool", "more"),
    [("validate", []), ("validate", ["--full"]), ("inspect data", []), ("inspect data", ["--document", 7])],
)
def test_corpus_at_a_url_is_validated_and_shown_like_a_local_one(server, tiny_corpus, tmp_path, tool, more):
    url = url_of(server, tiny_corpus)
    more = [*more, *(["--tokenizer-model", tiny_corpus.tokenizer] if tool == "inspect data" else [])]
    remote = run_forked(tool, url, "--object-storage-cache-path", tmp_path / "cache", *more)
    local = run_forked(tool, tiny_corpus.prefix, *more)
    assert (remote.code, local.code) == (0, 0), remote.output
    assert remote.output.replace(url, "").split() == local.output.replace(tiny_corpus.prefix, "").split()


@pytest.mark.parametrize("command", ["validate", "inspect data", "find-duplicates --output L", "train --data-path"])
def test_url_without_a_cache_folder_is_refused(server, tiny_corpus, command):
    url = url_of(server, tiny_corpus)
    ended = run_command("megatron_neobert.__main__", *command.split(), url)
    assert ended.refused(2) and url in ended.output and "--object-storage-cache-path" in ended.output
    assert not server.requests
