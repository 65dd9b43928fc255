"""Memory of a rank, counted and planned."""

from megatron_neobert.checkpoint.shards import local_parts
from megatron_neobert.planning.memory import RankMemory
from megatron_neobert.state import Run


def memory(run: Run, *, kept: int) -> dict[str, int]:
    """Return the bytes of a rank. `kept` is what autograd keeps of all micro-batches in flight."""
    flats = [
        flat for part in local_parts(run) for flat in (*part.moments.values(), *([part.main] if part.has_main else []))
    ]
    return {
        "weights": sum(buffer.param_data.nbytes for buffer in run.model.buffers),
        "gradients": sum(buffer.grad_data.nbytes for buffer in run.model.buffers),
        "optimizer": sum(flat.nbytes for flat in flats),
        "activations": kept,
    }


def planned_memory(plan: RankMemory) -> dict[str, int]:
    return {
        "weights": plan.weights,
        "gradients": plan.gradients,
        "optimizer": plan.optimizer,
        "activations": plan.activations + plan.head,
    }
