"""Start and end of the process group, over NCCL with CUDA and over gloo otherwise.

torchrun sets the environment. Without RANK in the environment, the run is one process.
"""

import datetime
import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeVar

import psutil
import torch
from megatron.core import parallel_state, tensor_parallel

from megatron_neobert.cli import flag_of
from megatron_neobert.config.rules import graph_obstacle
from megatron_neobert.config.schema import Settings
from megatron_neobert.errors import ConfigError
from megatron_neobert.runtime import cpu_backend, environment, megatron_patches

_NODE_0_KEY = "address of node 0"
_RECORDED_COLLECTIVES = "256"  # size of torch's flight recorder
# NCCL and gloo time out this much later than the watcher, which reports the rank at fault.
MARGIN_SECONDS = 90

Value = TypeVar("Value")


def initialize(settings: Settings, *, contents: Mapping[str, object] | None = None) -> torch.device:
    """Patch megatron.core, join the process group, form Megatron's groups, and return this rank's device.

    Raise ConfigError on all ranks if settings, `contents` or the numbers of ranks per node differ.

    Args:
        contents: Hashes of the files that every rank opens. The keys are the names used in error messages.

    Collective: all ranks.
    """
    parallel = settings.parallel
    cpu_backend.install()
    megatron_patches.install()
    backend, device = "gloo", torch.device("cpu")
    if torch.cuda.is_available():
        backend, device = "nccl", torch.device("cuda", environment.local_rank())
        torch.cuda.set_device(device)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _RECORDED_COLLECTIVES)
    timeout = datetime.timedelta(minutes=parallel.distributed_timeout_minutes, seconds=MARGIN_SECONDS)
    if "RANK" in os.environ:
        store, rank, size = next(torch.distributed.rendezvous("env://", timeout=timeout))
        # torchrun keeps its store when it restarts the ranks. The prefix hides the addresses of the earlier ranks.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = torch.distributed.PrefixStore(f"attempt_{attempt}", store)
        _listen_on_one_interface(store)
    else:
        store, rank, size = torch.distributed.HashStore(), 0, 1
    # Without device_id: NCCL would then split the group of all ranks for each group that Megatron forms, and every rank
    # takes part in every split. Megatron forms 11 groups per rank and a few others: 11,270 splits of 1,024 ranks.
    torch.distributed.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
    _refuse_different_settings(settings, contents or {})
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        distributed_timeout_minutes=timeout.total_seconds() / 60,
        create_gloo_process_groups=False,  # each rank would hold three sockets to every other rank, for no use
    )
    # A step draws no random numbers, but Megatron's sequence parallelism and recomputation need the states to exist.
    uses_graph = graph_obstacle(settings, on_cuda=device.type == "cuda") is None
    tensor_parallel.model_parallel_cuda_manual_seed(settings.training.seed, use_cudagraphable_rng=uses_graph)
    return device


def _refuse_different_settings(settings: Settings, contents: Mapping[str, object]) -> None:
    """Raise ConfigError on all ranks if settings, contents or ranks per node differ from rank 0's.

    Collective: all ranks.
    """
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    values = {flag_of(name): value for section in asdict(settings).values() for name, value in section.items()}
    values |= contents
    values["NPROC_PER_NODE"] = os.environ.get("LOCAL_WORLD_SIZE")
    torch.distributed.all_gather_object(ranks, (socket.gethostname(), values))
    _, expected = ranks[0]
    for rank, (host, values) in enumerate(ranks):
        differences = [
            f"{name} {values.get(name)}, not {value}" for name, value in expected.items() if values.get(name) != value
        ]
        if differences:
            raise ConfigError(
                f"rank {rank} on {host} differs from rank 0 ({', '.join(differences)}); start all ranks with the same "
                "settings and files."
            )


def _listen_on_one_interface(store: torch.distributed.Store) -> None:
    """Set the network interfaces GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, unless they are already set.

    On one node, both are loopback, so that no port is open to the network. On several nodes, gloo uses the interface
    that reaches MASTER_ADDR, and NCCL chooses an interface itself.

    Collective: all nodes.
    """
    variables = ["GLOO_SOCKET_IFNAME"]
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if local_ranks == os.environ["WORLD_SIZE"]:
        address = "127.0.0.1"
        variables.append("NCCL_SOCKET_IFNAME")
    else:
        family, *_, master = socket.getaddrinfo(os.environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Connecting a UDP socket sends nothing and chooses the local address.
            probe.connect(master)
            address = probe.getsockname()[0]
        # On Debian, a host resolves its own name to 127.0.1.1. If MASTER_ADDR is the name of node 0, node 0 would
        # listen on loopback, so another node stores the address that it sees.
        if int(os.environ.get("GROUP_RANK", int(os.environ["RANK"]) // int(local_ranks))) > 0:
            store.set(_NODE_0_KEY, str(master[0]))
        elif ipaddress.ip_address(address).is_loopback:
            address = store.get(_NODE_0_KEY).decode()
    for interface, interface_addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in interface_addresses):
            for variable in variables:
                os.environ.setdefault(variable, interface)


def broadcast(value: Value) -> Value:
    """Return rank 0's `value` on all ranks. Collective: all ranks."""
    values = [value]
    torch.distributed.broadcast_object_list(values)
    return values[0]


def first_of_ranks(value: Value | None) -> Value | None:
    """Return, on all ranks, the `value` of the lowest rank whose value is not None, or None. Collective: all ranks."""
    values: list[Value | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return next((each for each in values if each is not None), None)


def shut_down() -> None:
    """Destroy Megatron's groups and the process group. Collective: all ranks."""
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
