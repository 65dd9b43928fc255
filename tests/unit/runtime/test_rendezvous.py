"""The launchers of several nodes agree to start, or hear why not: each node a thread of this process."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
import pytest
from torch.distributed import TCPStore

from megatron_neobert.runtime.environment import Node
from megatron_neobert.runtime.rendezvous import Report, agree_to_start, serve_store

START = {"--lr": "0.1", "NPROC_PER_NODE": "8"}
STORES: list[TCPStore | None] = []


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def agree(
    rank: int, port: int, *, nodes: int = 3, timeout_seconds: int = 30, start: dict | None = None, problem: str = ""
) -> Report:
    """The verdict that a node hears; `problem` is why it does not start itself, with 66."""
    own = Report(rank=rank, start=start or START, problem=problem, exit_code=66 if problem else 0)
    node = Node(nodes=nodes, rank=rank, address="127.0.0.1", port=port)
    verdict, store = agree_to_start(node, own, timeout_seconds=timeout_seconds)
    STORES.append(store)  # of node 0, as a launcher keeps it
    return verdict


def results(futures: list[Future[Report]]) -> list[Report]:
    return [future.result(timeout=600) for future in futures]


def test_nodes_that_are_alike_start(port, threads):
    for verdict in results([threads.submit(agree, rank, port) for rank in range(3)]):
        assert (verdict.problem, verdict.exit_code) == ("", 0)


def test_node_that_differs_is_named_with_both_values_on_every_node(port, threads):
    starts = [START, START, {**START, "--lr": "0.2"}]
    for verdict in results([threads.submit(agree, rank, port, start=start) for rank, start in enumerate(starts)]):
        assert (verdict.rank, verdict.exit_code) == (2, 2)
        assert "it differs from node 0 (--lr 0.2, not 0.1); start all nodes with" in verdict.problem


@pytest.mark.parametrize("refusing", [0, 2])
def test_refusal_of_one_node_is_what_all_others_hear(port, threads, refusing):
    problems = {refusing: "no corpus here"}
    futures = [threads.submit(agree, rank, port, problem=problems.get(rank, "")) for rank in range(3)]
    for verdict in results(futures):
        assert (verdict.rank, verdict.problem, verdict.exit_code) == (refusing, "no corpus here", 66)


def test_number_given_to_two_nodes_is_refused_on_all(port, threads):
    for verdict in results([threads.submit(agree, rank, port) for rank in (0, 1, 1)]):
        assert (verdict.rank, verdict.exit_code) == (1, 2)
        assert "NODE_RANK 1 was given to two nodes" in verdict.problem


def test_second_node_of_a_number_is_refused_after_all_have_agreed_and_does_not_disturb_them(port, threads):
    for verdict in results([threads.submit(agree, rank, port, nodes=2) for rank in (0, 1)]):
        assert verdict.problem == ""
    late = agree(1, port, nodes=2)
    assert (late.rank, late.exit_code) == (1, 2)
    assert "NODE_RANK 1 was given to two nodes, or one node was started twice; number them from 0 to 1" in late.problem


def test_nodes_that_do_not_come_are_named_to_those_that_did(port, threads):
    for verdict in results([threads.submit(agree, rank, port, nodes=4, timeout_seconds=1) for rank in (0, 2)]):
        assert verdict.exit_code == 74
        assert f"2 of 4 nodes came to 127.0.0.1 port {port} within 1 s; missing: node 1, 3." in verdict.problem


def test_node_0_that_is_not_there_ends_the_wait_with_its_address(port):
    with pytest.raises(TimeoutError, match=rf"node 0 could not be reached at 127\.0\.0\.1 port {port} for \d+ s"):
        agree(1, port, timeout_seconds=1)


def test_node_0_that_dies_while_another_waits_for_its_verdict_is_named_with_its_address(port, threads):
    servers = [TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)]
    waiting = threads.submit(agree, 1, port)
    while not servers[0].check(["start/report/1"]):
        time.sleep(0.05)
    servers.clear()
    with pytest.raises(ConnectionError, match=f"node 0 at 127.0.0.1 port {port} ended before the start; look at its"):
        waiting.result(timeout=600)


def test_port_that_somebody_else_uses_is_named():
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConnectionError, match=f"MASTER_PORT {port} cannot be used on node 0 .*choose a free port"):
            agree(0, port)


def test_store_listens_on_its_address_alone_and_torch_on_every_one():
    ours = serve_store("127.0.0.1", 0, nodes=1)
    torchs = TCPStore("127.0.0.1", 0, world_size=1, is_master=True, wait_for_workers=False)
    heard = {one.laddr.port: one.laddr.ip for one in psutil.Process().net_connections("inet") if one.status == "LISTEN"}
    assert heard[ours.port] == "127.0.0.1"
    assert heard[torchs.port] in ("::", "0.0.0.0")
