"""Runs of two nodes: two launchers on loopback, and two network namespaces."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import processes
import pytest
from processes import Ended
from ranks import SCRIPT, environment, flags_of, free_port, run_nodes, train_on_ranks
from tests_tiny import tiny_settings
from torch.multiprocessing import ProcessRaisedException

from megatron_neobert.data.batches.corpora import open_phases
from megatron_neobert.runtime.store import serve_store
from megatron_neobert.training import setup


def start_both(first: list[str], second: list[str], *, seconds: int = 60, ranks: Sequence[int] = (1, 1)) -> list[Ended]:
    """Run two launchers, in forked processes, until both have ended."""
    variables = [{"RENDEZVOUS_TIMEOUT_SECONDS": str(seconds), "NPROC_PER_NODE": str(nproc)} for nproc in ranks]
    return run_nodes([["megatron_neobert.launch", SCRIPT, *flags] for flags in (first, second)], variables)


def test_node_with_a_wrong_setting_ends_at_once_and_the_other_after_the_timeout(tiny_corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = flags_of(tiny_settings(tiny_corpus, save=tmp_path / "run"))
    first, second = start_both(good, [*good, "--tokenizer-model", "nowhere/vocab.txt"], seconds=2)
    assert (first.code, second.code) == (74, 66)
    assert "the 2 nodes did not all meet at localhost port " in first.output
    assert second.output.startswith("error: --tokenizer-model nowhere/vocab.txt: no such file or folder")
    assert "Traceback" not in first.output + second.output
    assert not (tmp_path / "run").exists(), "no rank must start"


def test_duplicate_node_rank_or_missing_node_ends_with_one_sentence(tiny_corpus):
    flags = flags_of(tiny_settings(tiny_corpus, training={"global_batch_size": 6}))
    store = serve_store("127.0.0.1", 0, nodes=3)
    node = {"NNODES": "3", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "RENDEZVOUS_TIMEOUT_SECONDS": "2"}
    for port, code, message in (
        (store.port, 74, "the 3 nodes did not all meet"),
        (store.port, 2, "NODE_RANK 1 was given to two nodes"),
        (free_port(), 74, "the 3 nodes did not all meet"),
    ):
        environment = {**node, "MASTER_PORT": str(port)}
        ended = processes.run_command("megatron_neobert.launch", SCRIPT, *flags, environment=environment)
        assert ended.refused(code) and message in ended.output, ended.output
        assert port == store.port or "frame #" not in ended.output


@pytest.mark.parametrize(
    ("flags", "ranks", "difference"),
    [
        (["--lr", "0.5"], (1, 1), "rank 1 on .* differs from rank 0 \\(--lr 0.5, not "),
        ([], (1, 2), "node 1 has NPROC_PER_NODE 2, node 0 has 1"),
    ],
)
def test_nodes_with_different_settings_end_with_both_values(tiny_corpus, tmp_path, flags, ranks, difference):
    common = flags_of(tiny_settings(tiny_corpus, save=tmp_path / "run"))
    common += ["--micro-batch-size", "1", "--global-batch-size", "12"]  # for 2, 3 and 4 ranks
    for ended in start_both(common, [*common, *flags], ranks=ranks):
        assert ended.refused(2) and re.search(difference, ended.output), ended.output
    assert not list((tmp_path / "run").glob("iter_*"))


def test_ranks_that_see_different_corpora_behind_one_path_end_with_both_hashes(tiny_corpus):
    def choose_documents_on_rank_1() -> None:
        if os.environ["RANK"] == "1":
            setup.open_phases = lambda settings: open_phases(settings.with_section("data", data_path=long_documents))

    long_documents = (f"{tiny_corpus.prefix}:min=9",)
    with pytest.raises(ProcessRaisedException, match=r"rank 1 on .* differs from rank 0 \(sha256 of --data-path \['"):
        train_on_ranks(tiny_settings(tiny_corpus), world_size=2, prepare=choose_documents_on_rank_1)


# --- two nodes in network namespaces; each resolves its own name to a loopback address, as Debian does


_HOSTS = "127.0.0.1 localhost\n127.0.1.1 {own}\n10.77.0.{number} {other}\n"


def _ip(*arguments: object) -> None:
    subprocess.run(["ip", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[list[str]]]:
    """Command prefixes that run a command on each of two connected nodes."""
    names = [f"neobert{os.getpid()}{end}" for end in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
        subprocess.run(["unshare", "--mount", "--uts", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs permission to create network namespaces ({error})")
    _ip("link", "add", "eth7", "netns", names[0], "type", "veth", "peer", "name", "eth7", "netns", names[1])
    prefixes = []
    for number, name in enumerate(names):
        _ip("-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", "eth7")
        for interface in ("lo", "eth7"):
            _ip("-n", name, "link", "set", interface, "up")
        hosts = tmp_path / name
        hosts.write_text(_HOSTS.format(own=f"node{number}", other=f"node{1 - number}", number=2 - number))
        script = f'mount --bind {hosts} /etc/hosts && hostname node{number} && exec "$@"'
        prefixes.append(["ip", "netns", "exec", name, "unshare", "--mount", "--uts", "bash", "-c", script, "bash"])
    yield prefixes
    for name in names:
        _ip("netns", "delete", name)


_RANK = """
import os
import torch
from megatron_neobert.config.schema import ParallelConfig, Settings, TrainingConfig
from megatron_neobert.runtime.distributed import initialize
initialize(Settings(training=TrainingConfig(global_batch_size=2), parallel=ParallelConfig()))
total = torch.ones(1)
torch.distributed.all_reduce(total)
print(total.item(), os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME"))
"""


@pytest.mark.skipif(shutil.which("ip") is None, reason="needs iproute2")
def test_gloo_uses_the_network_between_the_nodes_and_nccl_chooses_for_itself(nodes):
    variables = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "node0", "MASTER_PORT": 29511}
    started = [
        subprocess.Popen(
            [*prefix, sys.executable, "-c", _RANK],
            env=environment(1, RANK=rank, **variables),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, prefix in enumerate(nodes)
    ]
    outputs = [process.communicate(timeout=600)[0].splitlines()[-1:] for process in started]
    assert outputs == [["2.0 eth7 None"]] * 2
