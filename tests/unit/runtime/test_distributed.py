"""Sockets of a rank between its start and its first step."""

import psutil
import pytest
import torch
from processes import run_on_ranks

from megatron_neobert.config.schema import Settings
from megatron_neobert.runtime.distributed import initialize

GROUPS_OF_ALL_RANKS = 7  # torch's own, and six of megatron.core 0.16 and 0.19; none of them beside another for gloo


def count_sockets() -> None:
    initialize(Settings())
    torch.distributed.barrier()
    sockets = psutil.Process().net_connections("inet")
    connected = sum(socket.status == psutil.CONN_ESTABLISHED for socket in sockets)
    torch.distributed.barrier()
    # One to the store, and in each group one to every other rank. Over NCCL these groups have none.
    assert connected == 1 + GROUPS_OF_ALL_RANKS * (torch.distributed.get_world_size() - 1)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_has_one_socket_to_every_other_rank_per_group_that_megatron_uses(world_size):
    run_on_ranks(count_sockets, world_size=world_size)
