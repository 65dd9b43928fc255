"""Preprocessing on Ray: a real cluster on this machine, whose workers may die."""

import os
import signal
import socket
import tempfile
import threading
from pathlib import Path

import pytest
from unit.data.preprocess_place import add_mixed_shards
from unit.data.small_corpus import write_vocabulary

from megatron_neobert.data.preprocessing.plan import plan_preprocessing
from megatron_neobert.data.preprocessing.run import preprocess
from megatron_neobert.errors import ConfigError

ray = pytest.importorskip("ray", reason="the extra [ray] is not installed")
psutil = pytest.importorskip("psutil")

ON_RAY = {"executor": "ray", "ray_address": "local", "workers": 2}


def test_ray_gives_the_bytes_of_a_local_run(place):
    add_mixed_shards(place)
    place.run("local")
    place.run("ray", **ON_RAY)
    assert place.contents("ray") == place.contents("local")


def ray_workers():
    return [process for process in psutil.Process().children(recursive=True) if "ray::_run_remotely" in process.name()]


@pytest.mark.slow
def test_ray_worker_that_is_killed_costs_its_chunk_another_try(place):
    write_vocabulary(place.vocab, [chr(code) for code in range(97, 123)])
    for name in ("a", "b"):
        place.add_texts(f"{name}.jsonl", *["x y z " * 5000] * 100)  # 3 MB: about a second
    place.run("local", tokenizer_backend="reference")
    killed = []

    def kill_one():
        while not killed and not ended.wait(0.05):
            for worker in ray_workers()[:1]:
                worker.send_signal(signal.SIGKILL)
                killed.append(worker.pid)

    ended = threading.Event()
    killer = threading.Thread(target=kill_one)
    killer.start()
    try:
        place.run("ray", tokenizer_backend="reference", **ON_RAY)
    finally:
        ended.set()
        killer.join()
    assert len(killed) == 1
    assert place.contents("ray") == place.contents("local")


def test_cluster_that_another_user_has_left_in_the_temporary_folder_is_not_joined(place, monkeypatch, capsys):
    place.add_texts("a.jsonl", "hello")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("", 0)) as stranger, tempfile.TemporaryDirectory(prefix="r") as temporary:
        monkeypatch.setenv("RAY_TMPDIR", temporary)  # short: Ray makes sockets below it
        (Path(temporary) / "ray").mkdir()
        port = stranger.getsockname()[1]
        (Path(temporary) / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{port}")
        place.run("ray", executor="ray", workers=1)
        stranger.settimeout(0)
        with pytest.raises(BlockingIOError):
            stranger.accept()
        from ray._private.services import canonicalize_bootstrap_address

        assert str(canonicalize_bootstrap_address("auto")).endswith(f":{port}")  # control: Ray would have gone there
    assert "Ray: started a cluster for this command at " in capsys.readouterr().out
    assert len(place.corpus("ray")) == 1


def test_cluster_of_a_command_asks_for_a_token(place, monkeypatch):
    place.add_texts("a.jsonl", "hello")
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    modes = []
    monkeypatch.setattr(ray, "init", lambda *_, **__: modes.append(os.environ["RAY_AUTH_MODE"]) or 1 / 0)
    with pytest.raises(ConfigError, match="no Ray cluster answers or starts"):
        place.run("ray", executor="ray", workers=1)
    assert modes == ["token"]


@pytest.mark.parametrize("told_by", ["flag", "environment"])
def test_automatic_search_for_a_cluster_is_refused(place, monkeypatch, told_by):
    place.add_texts("a.jsonl", "hello")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ConfigError, match=r"--ray-address auto may find the cluster of another user"):
        place.run("ray", executor="ray", ray_address="auto" if told_by == "flag" else None)


@pytest.mark.parametrize("told_by", ["flag", "environment"])
def test_absent_cluster_is_a_wrong_setting(place, monkeypatch, told_by):
    place.add_texts("a.jsonl", "hello")
    address = "127.0.0.1:1" if told_by == "flag" else None
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # asked directly, Ray tries for two minutes and ends the process
    plan = plan_preprocessing(place.settings(executor="ray", ray_address=address))
    with pytest.raises(ConfigError, match=r"--ray-address 127\.0\.0\.1:1: no Ray cluster answers"):
        preprocess(plan)
