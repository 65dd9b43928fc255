"""State of collectives, read from torch without Megatron, which a rank imports later than it starts its watcher."""

import re
import sys
import threading

import torch

from megatron_neobert.text import parse_json

# gloo raises RuntimeError with these messages; NCCL and the store raise torch.distributed.DistError.
_LOST_CONNECTION = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|Socket closed|"
    r"Application timeout caused pair closure|Timed out waiting"
)


def is_lost_connection(error: Exception) -> bool:
    """Return True if an error of a collective means that the connection to another rank is lost."""
    if isinstance(error, torch.distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and _LOST_CONNECTION.search(str(error)) is not None


def pending_collective() -> str:
    """Return the name of this rank's oldest collective that has not ended, such as "nccl:all_reduce".

    Return "" if all have ended, or if this release of torch records collectives in another way.
    """
    name = "_dump_nccl_trace_json" if torch.cuda.is_available() else "_dump_fr_trace_json"
    dump = getattr(torch._C._distributed_c10d, name, None)
    if dump is None:
        return ""
    entries = parse_json(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    return next((str(entry["profiling_name"]) for entry in entries if not entry["retired"]), "")


def main_thread_waits() -> bool:
    """Return True if the main thread is in code that waits for other ranks: Megatron's or torch.distributed's."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    name = "" if frame is None else frame.f_code.co_filename
    # The last is the start of the process group, which waits for the store.
    return any(part in name for part in ("torch/distributed", "megatron/core", "megatron_neobert/runtime/distributed"))
