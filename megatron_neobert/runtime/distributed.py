"""Ranks and groups: where this process stands, and the few collectives that the loop itself needs.

gloo on CPU, NCCL where CUDA is present. `torchrun` gives the environment; without it a run is one process.
"""

import datetime
import ipaddress
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import psutil
import torch
from megatron.core import parallel_state, tensor_parallel

from megatron_neobert.cli import flag_of
from megatron_neobert.config.schema import Settings
from megatron_neobert.errors import ConfigError
from megatron_neobert.runtime import cpu_backend, environment, megatron_patches, signals
from megatron_neobert.text import parse_json

_NODE_0 = "address of node 0"  # key of the store
# Of gloo, which has no class for them; NCCL and the store raise torch.distributed.DistError.
_LOST_CONNECTION = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|Socket closed|"
    r"Application timeout caused pair closure|Timed out waiting"
)
_LEAVE_SECONDS = 5.0
_RECORDED_COLLECTIVES = "256"
# By which NCCL and gloo wait longer than the hang detector, which may need 44 s for its report.
MARGIN_SECONDS = 60


def initialize(settings: Settings) -> torch.device:
    """Join the process group, compare the settings of all ranks, form Megatron's groups, and return the device.

    Collective: all ranks; other settings than rank 0's are a ConfigError on all.
    """
    parallel = settings.parallel
    cpu_backend.install()
    megatron_patches.install()
    if torch.cuda.is_available():
        device = torch.device("cuda", environment.local_rank())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _RECORDED_COLLECTIVES)  # torch's flight recorder; 0 switches it off
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
    _refuse_different_settings(settings)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        distributed_timeout_minutes=timeout.total_seconds() / 60,
    )
    # Nothing is random in a step, but Megatron's sequence parallelism and recomputation want the states to exist.
    tensor_parallel.model_parallel_cuda_manual_seed(settings.training.seed)
    return device


def _refuse_different_settings(settings: Settings) -> None:
    """Compare the settings of all ranks with those of rank 0. Collective: all ranks."""
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    started = {flag_of(name): value for section in asdict(settings).values() for name, value in section.items()}
    started["NPROC_PER_NODE"] = os.environ.get("LOCAL_WORLD_SIZE")
    torch.distributed.all_gather_object(ranks, (socket.gethostname(), started))
    _, expected = ranks[0]
    for rank, (host, found) in enumerate(ranks):
        differences = [f"{name} {found[name]}, not {value}" for name, value in expected.items() if found[name] != value]
        if differences:
            raise ConfigError(
                f"rank {rank} on {host} differs from rank 0 ({', '.join(differences)}); start all ranks with the same "
                "settings."
            )


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
        if int(os.environ.get("GROUP_RANK", int(os.environ["RANK"]) // int(ranks_here))) > 0:
            store.set(_NODE_0, str(master[0]))
        elif ipaddress.ip_address(address).is_loopback:
            address = store.get(_NODE_0).decode()
    for interface, own in psutil.net_if_addrs().items():
        if any(one.address == address for one in own):
            for name in variables:
                os.environ.setdefault(name, interface)


def is_lost_connection(error: Exception) -> bool:
    """Return whether an error of a collective means that another rank is gone."""
    is_gloos = isinstance(error, RuntimeError) and _LOST_CONNECTION.search(str(error)) is not None
    return is_gloos or isinstance(error, torch.distributed.DistError)


def pending_collective() -> str:
    """Return the name of the oldest collective that has not ended, such as nccl:all_reduce; empty without one."""
    recorder = torch._C._distributed_c10d
    dump = getattr(recorder, "_dump_nccl_trace_json" if torch.cuda.is_available() else "_dump_fr_trace_json", None)
    if dump is None:  # another release of torch
        return ""
    entries = parse_json(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    return next((str(entry["profiling_name"]) for entry in entries if not entry["retired"]), "")


def shut_down() -> None:
    """Leave all groups. Collective: all ranks."""
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@contextmanager
def leaving_gloo() -> Iterator[None]:
    """Leave the groups after an error too: a process that ends with gloo's threads running may end by SIGABRT.

    A thread of gloo may wait for a lost rank, so this waits a few seconds at most. NCCL needs no such end.
    """
    try:
        yield
    except Exception:
        if torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo":
            signals.ask_within(_LEAVE_SECONDS, shut_down)
        raise
