"""Two nodes in network namespaces. Each resolves its own name to a loopback address, as Debian does."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from training_command import environment

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
