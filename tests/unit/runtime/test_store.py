"""A port of the store that is in use is reported. tests/distributed/test_launch.py tests the address."""

import socket

import pytest

from megatron_neobert.runtime.store import serve_store


def test_port_in_use_is_reported_with_its_number():
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConnectionError, match=f"MASTER_PORT {port} cannot be used on node 0 .*choose a free port"):
            serve_store("127.0.0.1", port, nodes=2)
