"""Batches and reference model of benchmark_step.py: the same documents packed and padded."""

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from checkpoint_conversion.checkpoint import load_into_megatron, model_shape, reference_config
from checkpoint_conversion.mapping import NEOBERT, to_internal
from megatron_neobert.config.schema import Settings
from megatron_neobert.data.batches.batch import MicroBatch, RankBatches
from megatron_neobert.model.reference import IGNORED_LABEL, ReferenceNeoBERT, mlm_loss
from megatron_neobert.state import Run

Padded = tuple[Tensor, Tensor, Tensor]  # token ids, attention mask, labels; each [b, s]


class Reference:
    """Plain PyTorch model: SDPA with a padding mask, decoder at every position, torch's AdamW."""

    def __init__(self, settings: Settings, device: torch.device, *, vocab_size: int) -> None:
        torch.manual_seed(0)
        self.settings = settings
        self.device = device
        self.vocab_size = vocab_size
        self.model = ReferenceNeoBERT(reference_config(settings, vocab_size=vocab_size)).to(device)
        cfg = settings.optimizer
        betas = (cfg.adam_beta1, cfg.adam_beta2)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=cfg.lr, betas=betas, eps=cfg.adam_eps, weight_decay=cfg.weight_decay
        )

    def step(self, passes: list[Padded]) -> float:
        """Update the weights once with all passes' gradients. Return the mean loss in nats per masked token."""
        self.optimizer.zero_grad()
        masked = sum(int((labels_bs != IGNORED_LABEL).sum()) for *_, labels_bs in passes)
        loss = torch.zeros((), device=self.device)
        for tensors in passes:
            tokens_bs, present_bs, labels_bs = (tensor.to(self.device) for tensor in tensors)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.training.bf16):
                total, _ = mlm_loss(self.model(tokens_bs, present_bs), labels_bs)
            (total / masked).backward()
            loss += total.detach() / masked
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.optimizer.clip_grad)
        self.optimizer.step()
        return loss.item()

    def copy_weights_to(self, run: Run) -> None:
        """Load this model's weights into a run's model and optimizer."""
        shape = model_shape(self.settings, vocab_size=self.vocab_size)
        model = run.unwrapped_model
        load_into_megatron(model, to_internal(self.model.state_dict(), shape, NEOBERT))
        run.optimizer.reload_model_params()


def passes_in_each_layout(batches: RankBatches, capacity_per_pass: int) -> dict[str, Any]:
    """Return the documents of a step in three layouts, and the length of each document.

    Documents are padded to the longest document of the step. A pass contains as many padded documents as fit into
    `capacity_per_pass` tokens, at least one.

    Returns:
        "lengths": tokens of each document. "packed": `batches`, unchanged. "padded": RankBatches with one document per
        row. "reference": list of `Padded`, inputs of the reference model.
    """
    documents, labels = split_documents(batches.micro_batches)
    lengths_b = torch.tensor([len(document) for document in documents])
    tokens_bs = pad_sequence(documents, batch_first=True)  # the id of [PAD] is 0
    labels_bs = pad_sequence(labels, batch_first=True, padding_value=IGNORED_LABEL)
    width = tokens_bs.shape[1]
    inputs = (tokens_bs, torch.arange(width) < lengths_b[:, None], labels_bs)
    size = max(1, capacity_per_pass // width)
    padded = list(zip(*(tensor.split(size) for tensor in inputs), strict=True))
    return {
        "lengths": lengths_b.tolist(),
        "packed": batches,
        "padded": replace(batches, micro_batches=[one_document_per_row(*tensors) for tensors in padded]),
        "reference": padded,
    }


def split_documents(micro_batches: list[MicroBatch]) -> tuple[list[Tensor], list[Tensor]]:
    """Return each document's token ids, and labels, int64 [s]. Labels are IGNORED_LABEL except at masked tokens."""
    tokens: list[Tensor] = []
    labels: list[Tensor] = []
    for batch in micro_batches:
        labels_t = torch.full_like(batch.tokens_t, IGNORED_LABEL)
        labels_t[batch.masked_positions_m] = batch.labels_m
        bounds = [bound for bound in batch.cu_seqlens_n.unique().tolist() if bound <= batch.real_tokens]
        lengths = [end - start for start, end in itertools.pairwise(bounds)]
        tokens += batch.tokens_t[: batch.real_tokens].split(lengths)
        labels += labels_t[: batch.real_tokens].split(lengths)
    return tokens, labels


def one_document_per_row(tokens_bs: Tensor, present_bs: Tensor, labels_bs: Tensor) -> MicroBatch:
    """Convert padded documents to a MicroBatch, in which the padding of each row is a separate document."""
    rows, width = tokens_bs.shape
    starts_b = torch.arange(rows) * width
    bounds = torch.cat([starts_b, starts_b + present_bs.sum(1), torch.tensor([rows * width])])
    labels_t = labels_bs.flatten()
    positions_m = (labels_t != IGNORED_LABEL).nonzero().squeeze(1)
    return MicroBatch(
        tokens_t=tokens_bs.flatten(),
        labels_m=labels_t[positions_m],
        masked_positions_m=positions_m,
        cu_seqlens_n=bounds.unique().to(torch.int32),  # unique() sorts, and removes the empty padding of full rows
        max_seqlen=width,
        real_tokens=int(present_bs.sum()),
    )
