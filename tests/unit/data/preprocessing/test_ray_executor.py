"""Preprocessing on Ray, with a real cluster on this machine."""

import os
import socket
import tempfile
import threading
from pathlib import Path

import pytest
from unit.data.preprocess_workspace import add_mixed_inputs
from unit.data.small_corpus import write_vocabulary

from megatron_neobert.errors import ConfigError

ray = pytest.importorskip("ray", reason="the extra [ray] is not installed")
psutil = pytest.importorskip("psutil")

ON_RAY = {"executor": "ray", "ray_address": "local", "workers": 2}


def test_ray_gives_the_bytes_of_a_local_run(workspace):
    add_mixed_inputs(workspace)
    workspace.run("local")
    workspace.run("ray", **ON_RAY)
    assert workspace.contents("ray") == workspace.contents("local")


@pytest.mark.slow
def test_chunk_of_a_killed_ray_worker_is_tokenized_again(workspace):
    write_vocabulary(workspace.vocab, [chr(code) for code in range(97, 123)])
    for name in ("a", "b"):
        workspace.add_texts(f"{name}.jsonl", *["x y z " * 5000] * 100)  # 3 MB: about a second
    workspace.run("local", tokenizer_backend="reference")
    killed = []

    def kill_one():
        while not killed and not ended.wait(0.05):
            for process in psutil.Process().children(recursive=True):
                if not killed and "ray::_run_remotely" in process.name():
                    process.kill()
                    killed.append(process.pid)

    ended = threading.Event()
    killer = threading.Thread(target=kill_one)
    killer.start()
    try:
        workspace.run("ray", tokenizer_backend="reference", **ON_RAY)
    finally:
        ended.set()
        killer.join()
    assert len(killed) == 1
    assert workspace.contents("ray") == workspace.contents("local")


def test_cluster_of_another_user_in_the_temporary_folder_is_not_joined(workspace, monkeypatch, capsys):
    workspace.add_texts("a.jsonl", "hello")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("", 0)) as stranger, tempfile.TemporaryDirectory(prefix="r") as temporary:
        monkeypatch.setenv("RAY_TMPDIR", temporary)  # short, because Ray creates sockets in it
        (Path(temporary) / "ray").mkdir()
        port = stranger.getsockname()[1]
        (Path(temporary) / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{port}")
        workspace.run("ray", executor="ray", workers=1)
        stranger.settimeout(0)
        with pytest.raises(BlockingIOError):
            stranger.accept()
        from ray._private.services import canonicalize_bootstrap_address

        assert str(canonicalize_bootstrap_address("auto")).endswith(f":{port}")  # control: Ray's choice
    assert "Ray: started a cluster for this command at " in capsys.readouterr().out
    assert len(workspace.corpus("ray")) == 1


def test_cluster_that_a_command_starts_requires_a_token(workspace, monkeypatch):
    workspace.add_texts("a.jsonl", "hello")
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    modes = []
    monkeypatch.setattr(ray, "init", lambda *_, **__: modes.append(os.environ["RAY_AUTH_MODE"]) or 1 / 0)
    with pytest.raises(ConfigError, match="no Ray cluster answers or starts"):
        workspace.run("ray", executor="ray", workers=1)
    assert modes == ["token"]


@pytest.mark.parametrize("source", ["flag", "environment"])
@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("auto", r"--ray-address auto may find the cluster of another user"),
        # Ray itself would try for two minutes and then end the process.
        ("127.0.0.1:1", r"--ray-address 127\.0\.0\.1:1: no Ray cluster answers"),
    ],
)
def test_automatic_search_and_an_absent_cluster_are_refused(workspace, monkeypatch, source, address, message):
    workspace.add_texts("a.jsonl", "hello")
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=message):
        workspace.run("ray", executor="ray", ray_address=address if source == "flag" else None)
