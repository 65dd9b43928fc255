"""Ranks and groups: where this process stands, and the few collectives that the loop itself needs.

gloo on CPU, NCCL where CUDA is present. `torchrun` gives the environment; without it a run is one process.
"""

import datetime
import ipaddress
import os
import socket

import psutil
import torch
from megatron.core import parallel_state, tensor_parallel

from megatron_neobert.config.schema import Settings
from megatron_neobert.runtime import cpu_backend, environment, megatron_patches

_NODE_0 = "address of node 0"  # key of the store
# By which NCCL and gloo wait longer than the hang detector, which may need 44 s for its report.
MARGIN_SECONDS = 60


def initialize(settings: Settings) -> torch.device:
    """Joins the process group, forms Megatron's groups, and returns this rank's device.

    Collective: all ranks.
    """
    parallel = settings.parallel
    cpu_backend.install()
    megatron_patches.install()
    if torch.cuda.is_available():
        device = torch.device("cuda", environment.local_rank())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    # Later than the hang detector, whose message names the rank.
    timeout = datetime.timedelta(minutes=parallel.distributed_timeout_minutes, seconds=MARGIN_SECONDS)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        store, rank, size = next(torch.distributed.rendezvous("env://", timeout=timeout))
        # torchrun keeps its store when it starts the ranks again; they would read their predecessors' addresses there.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = torch.distributed.PrefixStore(f"attempt_{attempt}", store)
        _listen_on_one_interface(store)
        torch.distributed.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
    else:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=(
            settings.virtual_stages_per_rank if settings.virtual_stages_per_rank > 1 else None
        ),
        context_parallel_size=parallel.context_parallel_size,
        distributed_timeout_minutes=timeout.total_seconds() / 60,
    )
    # Nothing is random in a step, but Megatron's sequence parallelism and recomputation want the states to exist.
    tensor_parallel.model_parallel_cuda_manual_seed(settings.training.seed)
    return device


def _listen_on_one_interface(store: torch.distributed.Store) -> None:
    """Keep gloo's sockets off the other networks: on one node loopback, else the way to MASTER_ADDR.

    gloo would listen on the address of the host's name, which is 127.0.1.1 on a Debian machine. There the way to
    MASTER_ADDR, if that is the host's name, is loopback as well, so node 0 asks the other nodes where they see it.
    NCCL knows the networks of several nodes better; on one node it would listen on the first interface.

    Collective: all nodes.
    """
    variables = ["GLOO_SOCKET_IFNAME"]
    ranks_here = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if ranks_here == os.environ["WORLD_SIZE"]:
        address = "127.0.0.1"
        variables.append("NCCL_SOCKET_IFNAME")
    else:
        family, *_, master = socket.getaddrinfo(os.environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as way:  # sends nothing
            way.connect(master)
            address = way.getsockname()[0]
        if int(os.environ["RANK"]) >= int(ranks_here):
            store.set(_NODE_0, str(master[0]))
        elif ipaddress.ip_address(address).is_loopback:
            address = store.get(_NODE_0).decode()
    for interface, own in psutil.net_if_addrs().items():
        if any(one.address == address for one in own):
            for name in variables:
                os.environ.setdefault(name, interface)


def shut_down() -> None:
    """Leaves all groups. Collective: all ranks."""
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def data_parallel_rank() -> int:
    return parallel_state.get_data_parallel_rank()


def data_parallel_size() -> int:
    return parallel_state.get_data_parallel_world_size()


def context_parallel_rank() -> int:
    return parallel_state.get_context_parallel_rank()


def context_parallel_size() -> int:
    return parallel_state.get_context_parallel_world_size()
