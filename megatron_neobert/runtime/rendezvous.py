"""Whether all nodes of a run can start, before any rank exists.

Every launcher reports to a store on node 0 what it would start, or why it cannot; node 0 compares the reports, and its
verdict ends all nodes with the same sentence and exit code. A node that never comes costs the others the time limit, no
more. torchrun's static rendezvous then uses the store's address and port.
"""

import errno
import json
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megatron_neobert.errors import EXIT_IO_ERROR, ConfigError
from megatron_neobert.runtime.environment import Node

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # slow to import

_POLL_SECONDS = 0.2  # between two looks into the store
_BACKLOG = 4096  # connections that wait to be accepted: the ranks of a large run come all together
_FAREWELL_SECONDS = 30  # how long a node that refuses its start tries to reach the others


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a node would start, or why it cannot: `problem` with its exit code."""

    rank: int
    start: Mapping[str, Any] = field(default_factory=dict)  # must be the same on all nodes
    problem: str = ""
    exit_code: int = 0
    host: str = field(default_factory=socket.gethostname)


def agree_to_start(node: Node, own: Report, *, timeout_seconds: int) -> "tuple[Report, TCPStore | None]":
    """What all nodes decided, a report without a problem if they start; and the store, to be kept until the run ends.

    A node that has a problem itself tells the others, if they can be reached within half a minute.

    Raises:
        TimeoutError: Node 0 did not come in time.
        ConnectionError: Node 0 has gone, or its port is taken.

    Collective: all nodes.
    """
    from torch.distributed import DistError, TCPStore  # slow: the clock starts after it

    deadline = time.monotonic() + (_FAREWELL_SECONDS if own.problem else timeout_seconds)
    try:
        if node.rank == 0:
            store = serve_store(node.address, node.port, nodes=node.nodes)
        else:
            _wait_for_port(node, deadline)
            store = TCPStore(node.address, node.port, world_size=node.nodes, wait_for_workers=False)
        return _exchange(store, node, own, deadline), store
    except (DistError, OSError) as error:
        if own.problem:
            print(f"the other nodes could not be told: {error}", file=sys.stderr)
            return own, None
        if isinstance(error, OSError):
            raise
        raise ConnectionError(
            f"node 0 at {node.address} port {node.port} ended before the start; look at its output."
        ) from error


def _exchange(store: "TCPStore", node: Node, own: Report, deadline: float) -> Report:
    """Reports, and waits for the verdict, which node 0 gives."""
    if store.add(f"start/arrivals/{node.rank}", 1) > 1:  # ends this node in any case
        problem = (
            f"NODE_RANK {node.rank} was given to two nodes, or one node was started twice; number them from 0 to "
            f"{node.nodes - 1} and start each of them once."
        )
        own = replace(own, problem=problem, exit_code=ConfigError.exit_code)
    key = "start/refusal" if own.problem else f"start/report/{node.rank}"
    store.compare_set(key, "", json.dumps(asdict(own)))  # the first refusal counts
    if node.rank == 0:
        return _judge(store, node, deadline)
    # Node 0 may have started its clock later.
    while not own.problem and not store.check(["start/verdict"]):
        if time.monotonic() > deadline + _FAREWELL_SECONDS:
            raise TimeoutError(
                f"node 0 at {node.address} port {node.port} gave no verdict on the start in time; look at its output."
            )
        time.sleep(_POLL_SECONDS)
    verdict = own if own.problem else Report(**json.loads(store.get("start/verdict")))
    store.add("start/heard", 1)
    return verdict


def _judge(store: "TCPStore", node: Node, deadline: float) -> Report:
    started = time.monotonic()
    keys = [f"start/report/{rank}" for rank in range(node.nodes)]
    listeners = node.nodes - 1
    while not (store.check(["start/refusal"]) or store.check(keys) or time.monotonic() > deadline):
        time.sleep(_POLL_SECONDS)
    if store.check(["start/refusal"]):
        verdict = Report(**json.loads(store.get("start/refusal")))
    elif missing := [rank for rank, key in enumerate(keys) if not store.check([key])]:
        listeners -= len(missing)
        named = ", ".join(str(rank) for rank in missing[:8]) + (", ..." if len(missing) > 8 else "")
        problem = (
            f"{node.nodes - len(missing)} of {node.nodes} nodes came to {node.address} port {node.port} within "
            f"{time.monotonic() - started:.0f} s; missing: node {named}. Look at their output; if they are only slow, "
            "raise RENDEZVOUS_TIMEOUT_SECONDS."
        )
        verdict = Report(rank=0, problem=problem, exit_code=EXIT_IO_ERROR)
    else:
        verdict = _compare([Report(**json.loads(store.get(key))) for key in keys])
    store.set("start/verdict", json.dumps(asdict(verdict)))
    until = time.monotonic() + _FAREWELL_SECONDS
    while verdict.problem and time.monotonic() < until and store.add("start/heard", 0) < listeners:
        time.sleep(_POLL_SECONDS)  # this process holds the store in which the others read it
    return verdict


def _compare(reports: list[Report]) -> Report:
    first, *others = reports
    for other in others:
        names = [name for name in {**first.start, **other.start} if first.start.get(name) != other.start.get(name)]
        if names:
            differences = ", ".join(f"{name} {other.start.get(name)}, not {first.start.get(name)}" for name in names)
            problem = f"it differs from node 0 ({differences}); start all nodes with the same settings and ranks."
            return replace(other, problem=problem, exit_code=ConfigError.exit_code)
    return first


def _wait_for_port(node: Node, deadline: float) -> None:
    """In short steps, so that a signal is answered soon."""
    started = time.monotonic()
    while True:
        try:
            socket.create_connection((node.address, node.port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"node 0 could not be reached at {node.address} port {node.port} for "
                    f"{time.monotonic() - started:.0f} s ({error}); look at its output, and check MASTER_ADDR, "
                    "MASTER_PORT and the firewall. If it is only slow, raise RENDEZVOUS_TIMEOUT_SECONDS."
                ) from error
        time.sleep(_POLL_SECONDS)


def serve_store(address: str, port: int, *, nodes: int) -> "TCPStore":
    """The store at which nodes and ranks find each other; it listens on this one address, torch's own on all.

    torchrun's store for the same port shares its server (multi_tenant), so it must live as long as the ranks.

    Args:
        address: Of this machine as the others know it. One that is not this machine's own (NAT), or that only this
            machine takes for loopback (a line of /etc/hosts), is served on all interfaces: nobody could connect else.
        port: 0 for one that the system chooses.

    Raises:
        OSError: The address cannot be resolved, or the port is taken.
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
