"""The key-value store through which the nodes and ranks of a run find each other."""

import datetime
import errno
import os
import resource
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # slow to import

_OPEN_FILES = 1 << 16  # limit of a process that serves the store
_BACKLOG = 4096  # connections waiting to be accepted: all ranks of a large run connect at the same time


def connect_to_store(prefix: str, *, timeout_seconds: float) -> "Store":
    """Connect to the run's store, and return a view that adds `prefix` and torchrun's restart count to all keys.

    In a run of one rank, return a new store in this process. If no launcher serves the store, rank 0 serves it.
    Raise OSError or torch.distributed.DistError if the store does not answer in time.
    """
    from torch.distributed import HashStore, PrefixStore

    if os.environ.get("WORLD_SIZE", "1") == "1":
        return HashStore()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store = serve_store(address, port, nodes=int(os.environ["WORLD_SIZE"]))
    else:
        store = reach_store(address, port, timeout_seconds=timeout_seconds)
    # torchrun keeps the store when it restarts the ranks. The restart count hides the keys of the earlier ranks.
    return PrefixStore(f"{prefix}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def reach_store(address: str, port: int, *, timeout_seconds: float) -> "TCPStore":
    """Wait until the store of node 0 listens, and return a connection.

    Raise OSError or torch.distributed.DistError if the store does not listen or answer in time.
    """
    from torch.distributed import TCPStore

    until = time.monotonic() + timeout_seconds
    while True:
        try:
            remaining = max(0.5, until - time.monotonic())
            # While it waits, TCPStore would print C++ stack frames.
            socket.create_connection((address, port), timeout=remaining).close()
            timeout = datetime.timedelta(seconds=remaining)
            return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


def serve_store(address: str, port: int, *, nodes: int) -> "TCPStore":
    """Start and return a store that listens on one address only. torch's own store would listen on all addresses.

    If `address` is not an address of this machine (NAT), or /etc/hosts maps it to loopback, the store listens on all
    interfaces, because no other node could connect otherwise. The caller must keep the returned store until all ranks
    have ended, because torch's env:// uses the same server (multi_tenant). The limit of open files is raised to 65,536,
    or to the hard limit if this is lower. Raise ConnectionError if the address or port cannot be used.

    Args:
        port: Port number; 0 to let the system choose.
    """
    from torch.distributed import TCPStore

    # Each rank has two connections. A limit of 1,024 open files, which is common, would end at 512 ranks.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    try:
        family, *_, resolved = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        host = str(resolved[0])
        if host.startswith("127.") and address not in ("localhost", host):
            host = ""
        try:
            listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listener = socket.create_server(("", port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConnectionError(
            f"MASTER_PORT {port} cannot be used on node 0 at {address} ({error.strerror}); choose a free port, the "
            "same on all nodes, and check MASTER_ADDR."
        ) from error
    return TCPStore(
        address,
        listener.getsockname()[1],
        world_size=nodes,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
