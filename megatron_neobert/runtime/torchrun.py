"""The ranks of this node, started by torchrun and waited for, and the one exit code that they end with.

torchrun itself always ends with 1, so nobody could tell a preempted run from a broken one.
"""

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import replace

from megatron_neobert.errors import EXIT_INTERRUPTED, EXIT_IO_ERROR, EXIT_STOPPED_EARLY, EXIT_UNAVAILABLE
from megatron_neobert.runtime import signals
from megatron_neobert.runtime.environment import Node
from megatron_neobert.runtime.rendezvous import serve_store


def run_ranks(node: Node, words: list[str]) -> int:
    """The exit code of this node's ranks, all of which have ended."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if node.nodes == 1:
        # Not --standalone: its store listens on all interfaces, and torchrun unpickles what a stranger writes there.
        store = serve_store("127.0.0.1", 0, nodes=1)  # kept until the ranks have ended; a restart gets an empty one
        node = replace(node, address=store.host, port=store.port)
    options = [f"--nnodes={node.nodes}", f"--node-rank={node.rank}"]
    options += [f"--master-addr={node.address}", f"--master-port={node.port}"]
    options.append(f"--log-dir={os.devnull}")  # a folder below TMPDIR otherwise, for logs that nobody asked for
    # Not torchrun's way with the others: it would kill the ranks 30 s later, in the middle of saving.
    options.append("--signals-to-handle=SIGHUP,SIGQUIT")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the rank's own message is clearer
    try:
        torchrun.run(torchrun.parse_args([*options, *words]))
    except ChildFailedError as error:
        return exit_code_of_node({rank: failure.exitcode for rank, failure in error.failures.items()})
    except SignalException as error:  # a closed terminal, or SIGQUIT; the ranks got it as well
        signals.passed_on.add(error.sigval)
        return 128 + error.sigval
    return 0


def exit_code_of_node(codes: Mapping[int, int]) -> int:
    """That of the rank that failed for a reason of its own; 128 + the signal if one ended it, as shells report it.

    Args:
        codes: By rank, those that torchrun found failed first. A rank that lost another one waits for its end, but
            both may have ended by then.
    """
    if len(signals.interrupts) > 1:
        return EXIT_INTERRUPTED
    own_reasons = {rank: code for rank, code in codes.items() if code != EXIT_UNAVAILABLE}
    rank, code = next(iter((own_reasons or codes).items()))
    if code >= 0:
        if code not in (EXIT_UNAVAILABLE, EXIT_STOPPED_EARLY, EXIT_INTERRUPTED):
            print(f"rank {rank} ended first, with exit code {code}", file=sys.stderr, flush=True)
        return code
    if -code in signals.passed_on:  # it came before the rank could prepare for it: nothing had begun, nothing is lost
        return EXIT_STOPPED_EARLY
    print(f"error: rank {rank} was ended by signal {-code}", file=sys.stderr, flush=True)
    return 128 - code


def is_crash(code: int) -> bool:
    """Whether another start may get further: the program, another rank, the file system or a signal ended this one."""
    return code in (1, EXIT_UNAVAILABLE, EXIT_IO_ERROR) or (code > 128 and code != EXIT_INTERRUPTED)
