"""Whether all nodes of a run can start.

The launchers meet at a store on node 0 before any rank exists. A node that refuses its start says so there, and the
others end with its sentence and its exit code instead of waiting for its ranks; a node that never comes costs them the
time limit, no more. The store's address and port are those that torchrun uses afterwards.
"""

import contextlib
import errno
import json
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megatron_neobert.errors import EXIT_IO_ERROR, ConfigError
from megatron_neobert.runtime.nodes import Place

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # slow to import

_POLL_SECONDS = 0.2
_BACKLOG = 4096  # connections that wait to be accepted: the ranks of a large run come all together
_FAREWELL_SECONDS = 30  # how long a node that refuses its start tries to reach the others


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a node found before its start: `problem` with its exit code, or what it would start."""

    rank: int
    start: Mapping[str, Any]  # must be the same on all nodes
    problem: str = ""
    exit_code: int = 0
    host: str = field(default_factory=socket.gethostname)


class Meeting:
    """Where the launchers of all nodes agree to start. To be kept until the run is over: node 0 holds the store."""

    def __init__(self, place: Place, *, timeout_seconds: int) -> None:
        self.place = place
        self.timeout_seconds = timeout_seconds

    def agree(self, start: Mapping[str, Any]) -> Report:
        """What all nodes decided: a report without a problem if they start.

        Raises:
            TimeoutError: Not all nodes came in time.
            ConnectionError: Node 0 has gone, or its port is taken.

        Collective: all nodes.
        """
        place = self.place
        print(
            f"node {place.rank} of {place.nodes} on {socket.gethostname()} can start; meeting at {place.address} port "
            f"{place.port}, for at most {self.timeout_seconds} s",
            file=sys.stderr,
            flush=True,
        )
        with self._loss_in_words():
            deadline = self._enter(self.timeout_seconds)
            if self.store.add(f"start/arrivals/{place.rank}", 1) > 1:
                return self._refuse_duplicate()
            self._put(f"start/report/{place.rank}", Report(rank=place.rank, start=start))
            if place.rank > 0:
                return self._hear_verdict(deadline)
            verdict = self._judge(deadline)
            if verdict.problem:
                self._announce(verdict, late_nodes=time.monotonic() < deadline)
            else:
                self._put("start/verdict", verdict)
            return verdict

    def refuse(self, problem: str, *, exit_code: int) -> None:
        """Tells the other nodes that this one does not start, if they can be reached at all."""
        report = self._refusal(problem, exit_code=exit_code)
        try:
            with self._loss_in_words():
                self._enter(_FAREWELL_SECONDS)
                if self.place.rank == 0:
                    self._announce(report, late_nodes=True)
                else:
                    self._put("start/refusal", report)
                    self.store.add("start/heard", 1)
        except OSError as error:
            print(f"the other nodes could not be told: {error}", file=sys.stderr)

    def _refuse_duplicate(self) -> Report:
        """Ends this node whatever the others decide: the verdict may have been given without it."""
        place = self.place
        problem = (
            f"NODE_RANK {place.rank} was given to two nodes, or one node was started twice; number them from 0 to "
            f"{place.nodes - 1} and start each of them once."
        )
        refusal = self._refusal(problem, exit_code=ConfigError.exit_code)
        self._put("start/refusal", refusal)
        self.store.add("start/heard", 1)
        return refusal

    def _refusal(self, problem: str, *, exit_code: int) -> Report:
        return Report(rank=self.place.rank, start={}, problem=problem, exit_code=exit_code)

    def _enter(self, seconds: int) -> float:
        """Opens or finds the store; returns when the time is over, by `time.monotonic`."""
        from torch.distributed import TCPStore

        place, deadline = self.place, time.monotonic() + seconds
        if place.rank > 0:
            _wait_for_port(place, deadline)
            self.store = TCPStore(place.address, place.port, world_size=place.nodes, wait_for_workers=False)
        else:
            self.store = serve_store(place.address, place.port, nodes=place.nodes)
        return deadline

    @contextlib.contextmanager
    def _loss_in_words(self) -> Iterator[None]:
        """Turns what the store raises at any of its calls into a ConnectionError for the user."""
        from torch.distributed import DistError  # slow: whoever sets a clock does it after this

        place = self.place
        try:
            yield
        except DistError as error:
            raise ConnectionError(
                f"node 0 at {place.address} port {place.port} ended before the start; look at its output."
            ) from error

    def _judge(self, deadline: float) -> Report:
        keys = [f"start/report/{rank}" for rank in range(self.place.nodes)]
        while True:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            if self.store.check(["start/refusal"]):
                return self._get("start/refusal")
            if not missing:
                return _compare([self._get(key) for key in keys])
            if time.monotonic() > deadline:
                return self._refusal(self._describe_absence(missing), exit_code=EXIT_IO_ERROR)
            time.sleep(_POLL_SECONDS)

    def _describe_absence(self, missing: list[int]) -> str:
        named = ", ".join(str(rank) for rank in missing[:8]) + (", ..." if len(missing) > 8 else "")
        return (
            f"{self.place.nodes - len(missing)} of {self.place.nodes} nodes came to {self.place.address} port "
            f"{self.place.port} within {self.timeout_seconds} s; missing: node {named}. Look at their output; if they "
            "are only slow, raise RENDEZVOUS_TIMEOUT_SECONDS."
        )

    def _hear_verdict(self, deadline: float) -> Report:
        place = self.place
        while not self.store.check(["start/verdict"]):
            if time.monotonic() > deadline + _FAREWELL_SECONDS:  # node 0 may have started its clock later
                raise TimeoutError(
                    f"node 0 at {place.address} port {place.port} did not say within {self.timeout_seconds} s "
                    "whether to start; look at its output."
                )
            time.sleep(_POLL_SECONDS)
        verdict = self._get("start/verdict")
        self.store.add("start/heard", 1)
        return verdict

    def _announce(self, refusal: Report, *, late_nodes: bool) -> None:
        self._put("start/verdict", refusal)
        until = time.monotonic() + (_FAREWELL_SECONDS if late_nodes else 10 * _POLL_SECONDS)
        while time.monotonic() < until and self.store.add("start/heard", 0) < self.place.nodes - 1:
            time.sleep(_POLL_SECONDS)

    def _put(self, key: str, report: Report) -> None:
        self.store.set(key, json.dumps(asdict(report)))

    def _get(self, key: str) -> Report:
        return Report(**json.loads(self.store.get(key)))


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


def _wait_for_port(place: Place, deadline: float) -> None:
    """In short steps, so that a signal is answered at once."""
    started = time.monotonic()
    while True:
        try:
            socket.create_connection((place.address, place.port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"node 0 could not be reached at {place.address} port {place.port} for "
                    f"{time.monotonic() - started:.0f} s ({error}); look at its output, and check MASTER_ADDR, "
                    "MASTER_PORT and the firewall. If it is only slow, raise RENDEZVOUS_TIMEOUT_SECONDS."
                ) from error
        time.sleep(_POLL_SECONDS)


def _compare(reports: list[Report]) -> Report:
    first, *others = reports
    for other in others:
        names = [name for name in {**first.start, **other.start} if first.start.get(name) != other.start.get(name)]
        if names:
            differences = ", ".join(f"{name} {other.start.get(name)}, not {first.start.get(name)}" for name in names)
            problem = f"it differs from node 0 ({differences}); start all nodes with the same settings and ranks."
            return replace(other, problem=problem, exit_code=ConfigError.exit_code)
    return first
