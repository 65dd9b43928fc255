"""The store of a run. tests/distributed/test_launch.py tests its address."""

import resource
import socket
from collections.abc import Iterator

import pytest

from megatron_neobert.runtime.store import reach_store, serve_store


def test_port_in_use_is_reported_with_its_number():
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConnectionError, match=f"MASTER_PORT {port} cannot be used on node 0 .*choose a free port"):
            serve_store("127.0.0.1", port, nodes=2)


@pytest.fixture
def low_limit() -> Iterator[int]:
    """Limit of open files of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield 256
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_store_accepts_more_connections_than_the_soft_limit_of_open_files(low_limit):
    store = serve_store("127.0.0.1", 0, nodes=1)
    clients = [reach_store("127.0.0.1", store.port, timeout_seconds=60) for _ in range(low_limit)]
    assert clients[-1].add("connections", 1) == 1
