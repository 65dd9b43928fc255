"""A probe at validations: what the hidden states are good for, without training anything on them.

Each labelled text is embedded as the evaluation on MTEB does it, by the mean of its tokens' last hidden states, [CLS]
and [SEP] among them, and is given the label of its nearest other text. The texts are packed and shared by the ranks as
those of a validation are; micro-batches are the same for any number of ranks, and so is the figure.

Letters: `t` tokens of a micro-batch (of this context-parallel rank), `n` documents or texts, `h` hidden.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.nn.functional import normalize

from megatron_neobert.data.batches.labelled import LabelledTexts
from megatron_neobert.data.batches.masking import MaskingScheme
from megatron_neobert.data.batches.rows import Source
from megatron_neobert.data.batches.stream import BatchStream, PackedBatch, StepBatches
from megatron_neobert.state import Run
from megatron_neobert.training.step import run_schedule

_COMPARED_AT_ONCE = 1024  # texts with all others


def build_probe_stream(stream: BatchStream, texts: LabelledTexts, *, stages: int) -> BatchStream:
    """The texts as this rank's batches, cut at the sequence length and with no token masked.

    Args:
        stream: Of the run; sequence length, micro-batch size and place among the ranks are its.
        stages: Pipeline stages, of which an interleaved pipeline wants a multiple of micro-batches.
    """
    settings = replace(
        stream.settings,
        global_batch_size=stream.settings.micro_batch_size * stream.data_parallel_size * stages,
        long_documents="truncate",
        batch_layout="packed",
        document_block_size=1,
        masking=MaskingScheme(stream.settings.masking.probability, mask_share=0.0, keep_share=1.0),
    )
    return replace(stream, sources=(Source(texts, range(len(texts.lengths))),), settings=settings)


@torch.no_grad()
def probe_accuracy(run: Run) -> float:
    """Share of the labelled texts whose nearest other text has their label; the same on all ranks.

    Collective: all ranks.
    """
    assert run.probe_stream is not None, "only runs with --probe-data-path are probed"
    texts = cast(LabelledTexts, run.probe_stream.sources[0].corpus)
    embeddings_nh = embed(run, run.probe_stream)  # collective: all ranks
    return nearest_neighbour_accuracy(embeddings_nh, torch.from_numpy(texts.labels_n).to(run.device))


def embed(run: Run, stream: BatchStream) -> Tensor:
    """The mean hidden state of each text, [n, h] fp32, on all ranks. Collective: all ranks."""
    count, width = len(stream.sources[0].documents), run.settings.model.hidden_size
    embeddings_nh = torch.zeros(count, width, device=run.device)
    for rows, cursor in stream.global_batches():
        batches = StepBatches(stream.build(rows), cursor)
        # Nothing on a stage without the head. Micro-batches are whole, so the last ones begin with the texts again.
        means = run_schedule(run, batches, _forward_step, forward_only=True, collect_non_loss_data=True)
        for part, means_nh in zip(stream.own_micro_batches(rows), means, strict=False):
            segments = part.segments
            (is_new,) = (segments.epochs_n == 0).nonzero()
            numbers = torch.from_numpy(segments.numbers_n[is_new]).to(run.device)
            embeddings_nh[numbers] = means_nh[torch.from_numpy(is_new).to(run.device)]
        if cursor.epoch > 0:
            break
    if parallel_state.get_tensor_model_parallel_rank() > 0:
        embeddings_nh.zero_()  # its ranks hold the same
    torch.distributed.all_reduce(embeddings_nh)  # one rank holds the mean of a text, or context-parallel ranks shares
    return embeddings_nh


def nearest_neighbour_accuracy(embeddings_nh: Tensor, labels_n: Tensor) -> float:
    """Share of the rows whose nearest other row by cosine has the same label; of equally near ones the first counts."""
    unit_nh = normalize(embeddings_nh, dim=1)
    correct = torch.zeros((), dtype=torch.int64, device=unit_nh.device)
    for first in range(0, len(unit_nh), _COMPARED_AT_ONCE):
        similarity = unit_nh[first : first + _COMPARED_AT_ONCE] @ unit_nh.T
        similarity.diagonal(first).fill_(-torch.inf)  # a text is no neighbour of its own
        nearest = similarity.argmax(dim=1)
        correct += (labels_n[nearest] == labels_n[first : first + _COMPARED_AT_ONCE]).sum()
    return correct.item() / len(unit_nh)


def _forward_step(run: Run, data: Iterator[PackedBatch], model: torch.nn.Module) -> tuple[Tensor, Any]:
    run.tick()
    batch = next(data).to(run.device, non_blocking=True)
    return model(batch.tokens_t, batch.cu_seqlens_n, batch.max_seqlen), partial(_mean_of_documents, batch)


def _mean_of_documents(batch: PackedBatch, hidden_th: Tensor, *, non_loss_data: bool) -> Tensor:
    """Of each document [n, h] fp32; of a context-parallel rank's tokens their share of it."""
    own = len(hidden_th)
    first = parallel_state.get_context_parallel_rank() * own
    own_lengths_n = batch.cu_seqlens_n.clamp(first, first + own).diff()
    sums_nh = torch.segment_reduce(hidden_th.float(), "sum", lengths=own_lengths_n, axis=0, unsafe=True)
    return sums_nh / batch.cu_seqlens_n.diff().clamp(min=1).unsqueeze(1)
