"""The store by which the nodes and ranks of a run find each other; it listens on one address."""

import datetime
import errno
import os
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # slow to import

_BACKLOG = 4096  # connections that wait to be accepted: the ranks of a large run come all together


def connect_to_store(prefix: str, *, timeout_seconds: float) -> "Store":
    """Connect to the store of torchrun's environment, below a prefix of this attempt; one rank has a store of its own.

    torchrun keeps the store when it starts the ranks again; they must not read what their predecessors wrote.
    """
    from torch.distributed import HashStore, PrefixStore, TCPStore

    if os.environ.get("WORLD_SIZE", "1") == "1":
        return HashStore()
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )
    return PrefixStore(f"{prefix}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def reach_store(address: str, port: int, *, timeout_seconds: float) -> "TCPStore":
    """Connect to the store of node 0 as soon as it listens; torch's own waiting prints the frames of its C++.

    Raises:
        OSError, torch.distributed.DistError: It does not answer in time.
    """
    from torch.distributed import TCPStore

    until = time.monotonic() + timeout_seconds
    while True:
        try:
            remaining = max(0.5, until - time.monotonic())
            socket.create_connection((address, port), timeout=remaining).close()
            timeout = datetime.timedelta(seconds=remaining)
            return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


def serve_store(address: str, port: int, *, nodes: int) -> "TCPStore":
    """Serve the store at one address; torch's own listens on all addresses of the machine.

    torchrun's store for the same port shares its server (multi_tenant), so it must live as long as the ranks. An
    address that is not this machine's own (NAT), or that only this machine takes for loopback (a line of /etc/hosts),
    is served on all interfaces: no other node could connect otherwise. Port 0: the system chooses one.
    """
    from torch.distributed import TCPStore

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
