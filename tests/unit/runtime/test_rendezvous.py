"""The launchers of several nodes agree to start, or hear why not: each node a thread of this process."""

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
import pytest
from torch.distributed import TCPStore

from megatron_neobert.runtime.nodes import Place
from megatron_neobert.runtime.rendezvous import Meeting, Report, serve_store

START = {"--lr": "0.1", "NPROC_PER_NODE": "8"}


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def meeting(rank: int, port: int, *, nodes: int = 3, timeout_seconds: int = 30) -> Meeting:
    place = Place(nodes=nodes, rank=rank, address="127.0.0.1", port=port)
    return Meeting(place, timeout_seconds=timeout_seconds)


def results(futures: list[Future[Report]]) -> list[Report]:
    return [future.result(timeout=600) for future in futures]


def test_nodes_that_are_alike_start(port, threads):
    meetings = [meeting(rank, port) for rank in range(3)]
    for verdict in results([threads.submit(one.agree, START) for one in meetings]):
        assert (verdict.problem, verdict.exit_code) == ("", 0)


def test_node_that_differs_is_named_with_both_values_on_every_node(port, threads):
    meetings = [meeting(rank, port) for rank in range(3)]
    starts = [START, START, {**START, "--lr": "0.2"}]
    futures = [threads.submit(one.agree, start) for one, start in zip(meetings, starts, strict=True)]
    for verdict in results(futures):
        assert (verdict.rank, verdict.exit_code) == (2, 2)
        assert "it differs from node 0 (--lr 0.2, not 0.1); start all nodes with" in verdict.problem


@pytest.mark.parametrize("refusing", [0, 2])
def test_refusal_of_one_node_is_what_all_others_hear(port, threads, refusing):
    meetings = [meeting(rank, port) for rank in range(3)]
    futures = [threads.submit(one.agree, START) for one in meetings if one.place.rank != refusing]
    meetings[refusing].refuse("no corpus here", exit_code=66)
    for verdict in results(futures):
        assert (verdict.rank, verdict.problem, verdict.exit_code) == (refusing, "no corpus here", 66)


def test_number_given_to_two_nodes_is_refused_on_all(port, threads):
    meetings = [meeting(rank, port) for rank in (0, 1, 1)]
    for verdict in results([threads.submit(one.agree, START) for one in meetings]):
        assert (verdict.rank, verdict.exit_code) == (1, 2)
        assert "NODE_RANK 1 was given to two nodes" in verdict.problem


def test_second_node_of_a_number_is_refused_after_all_have_agreed_and_does_not_disturb_them(port, threads):
    meetings = [meeting(rank, port, nodes=2) for rank in (0, 1)]
    for verdict in results([threads.submit(one.agree, START) for one in meetings]):
        assert verdict.problem == ""
    late = meeting(1, port, nodes=2).agree(START)
    assert (late.rank, late.exit_code) == (1, 2)
    assert "NODE_RANK 1 was given to two nodes, or one node was started twice; number them from 0 to 1" in late.problem


def test_nodes_that_do_not_come_are_named_to_those_that_did(port, threads):
    meetings = [meeting(rank, port, nodes=4, timeout_seconds=1) for rank in (0, 2)]
    for verdict in results([threads.submit(one.agree, START) for one in meetings]):
        assert verdict.exit_code == 74
        assert f"2 of 4 nodes came to 127.0.0.1 port {port} within 1 s; missing: node 1, 3." in verdict.problem


def test_node_0_that_is_not_there_ends_the_wait_with_its_address(port):
    with pytest.raises(TimeoutError, match=rf"node 0 could not be reached at 127\.0\.0\.1 port {port} for \d+ s"):
        meeting(1, port, timeout_seconds=1).agree(START)


def test_node_0_that_dies_while_another_reports_is_named_with_its_address(port, monkeypatch):
    servers = [TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)]
    late = meeting(1, port)
    enter = late._enter

    def enter_and_lose_node_0(seconds: int) -> float:
        deadline = enter(seconds)
        servers.clear()
        return deadline

    monkeypatch.setattr(late, "_enter", enter_and_lose_node_0)
    with pytest.raises(ConnectionError, match=f"node 0 at 127.0.0.1 port {port} ended before the start; look at its"):
        late.agree(START)


def test_port_that_somebody_else_uses_is_named():
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConnectionError, match=f"MASTER_PORT {port} cannot be used on node 0 .*choose a free port"):
            meeting(0, port).agree(START)


def test_store_listens_on_its_address_alone_and_torch_on_every_one():
    ours = serve_store("127.0.0.1", 0, nodes=1)
    torchs = TCPStore("127.0.0.1", 0, world_size=1, is_master=True, wait_for_workers=False)
    heard = {one.laddr.port: one.laddr.ip for one in psutil.Process().net_connections("inet") if one.status == "LISTEN"}
    assert heard[ours.port] == "127.0.0.1"
    assert heard[torchs.port] in ("::", "0.0.0.0")
