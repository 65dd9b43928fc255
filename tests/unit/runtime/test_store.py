"""The store by which nodes find each other: on which address it listens, and a port that is taken."""

import socket

import psutil
import pytest
from torch.distributed import TCPStore

from megatron_neobert.runtime.store import serve_store


def test_port_that_another_process_uses_is_named():
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConnectionError, match=f"MASTER_PORT {port} cannot be used on node 0 .*choose a free port"):
            serve_store("127.0.0.1", port, nodes=2)


def test_store_listens_on_its_address_alone_and_torch_on_every_one():
    ours = serve_store("127.0.0.1", 0, nodes=1)
    torchs = TCPStore("127.0.0.1", 0, world_size=1, is_master=True, wait_for_workers=False)
    heard = {one.laddr.port: one.laddr.ip for one in psutil.Process().net_connections("inet") if one.status == "LISTEN"}
    assert heard[ours.port] == "127.0.0.1"
    assert heard[torchs.port] in ("::", "0.0.0.0")
