"""NeoBERT as a bidirectional GPTModel of Megatron-Core.

What it changes: every row is packed and bidirectional, the decoder is untied and has a bias, and decoder and loss are
computed at the masked positions only (a fifth of the tokens). Everything else is megatron.core's.
"""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from megatron_neobert.config import Settings
from megatron_neobert.model.initialization import initialize_weights
from megatron_neobert.model.layer_specs import local_layer_spec
from megatron_neobert.model.loss import masked_token_losses
from megatron_neobert.model.transformer_config import to_transformer_config


class NeoBERTModel(GPTModel):
    """The encoder with its masked-language-model head; weights are those of the run's seed.

    Shape letters: `t` tokens of a packed row, `n` documents + 1, `m` masked positions, `v` this rank's share of the
    padded vocabulary, `h` hidden.

    Args:
        vocab_size: Number of tokens of the tokenizer, unpadded.
    """

    def __init__(self, settings: Settings, *, vocab_size: int) -> None:
        model = settings.model
        tensor_parallel = settings.parallel.tensor_model_parallel_size
        super().__init__(
            config=to_transformer_config(settings),
            transformer_layer_spec=local_layer_spec(model.num_layers),
            vocab_size=model.padded_vocab_size(vocab_size, tensor_parallel=tensor_parallel),
            max_sequence_length=model.max_position_embeddings,
            position_embedding_type="rope",
            rotary_base=model.rotary_base,
            share_embeddings_and_output_weights=False,
        )
        self._add_decoder_bias()
        self.padded_columns = self._padded_columns_of_this_rank(vocab_size)
        initialize_weights(self, seed=settings.training.seed, init_range=model.init_method_range, vocab_size=vocab_size)

    def forward(
        self,
        tokens_t: Tensor,
        cu_seqlens_n: Tensor,
        max_seqlen: int,
        masked_positions_m: Tensor,
        labels_m: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | Tensor:
        """Loss at the masked positions of a packed row, or the logits there.

        Args:
            tokens_t: Token ids, documents end to end.
            cu_seqlens_n: Where each document starts, and `t` at the end; int32.
            max_seqlen: At least the longest document, in tokens.
            masked_positions_m: Indices into the row.
            labels_m: Original ids at these positions.

        Returns:
            With labels (losses_m, correct_m), both fp32; without, logits_mv.

        Collective: the tensor-parallel group.
        """
        hidden_t1h = super().forward(
            input_ids=tokens_t.unsqueeze(0),
            position_ids=None,
            attention_mask=None,
            packed_seq_params=_packed_seq_params(cu_seqlens_n, max_seqlen, tokens=tokens_t.size(0)),
        )
        logits_m1v, _ = self.output_layer(hidden_t1h.index_select(0, masked_positions_m))
        logits_mv = logits_m1v.squeeze(1)
        if self.padded_columns:
            logits_mv[:, -self.padded_columns :] = torch.finfo(logits_mv.dtype).min
        return logits_mv if labels_m is None else masked_token_losses(logits_mv, labels_m)

    def _postprocess(self, hidden_states: Tensor, **unused: Any) -> Tensor:
        """Hands the hidden states through: the head in `forward` wants only some of them."""
        return hidden_states

    def _add_decoder_bias(self) -> None:
        """GPTModel's output layer has no bias, but adds and checkpoints one if it is there."""
        layer = self.output_layer
        layer.bias = nn.Parameter(torch.zeros_like(layer.weight[:, 0]))
        set_tensor_model_parallel_attributes(layer.bias, True, 0, 1)

    def _padded_columns_of_this_rank(self, vocab_size: int) -> int:
        """How many of this rank's decoder columns stand for no token; they are the last ones."""
        columns = self.output_layer.weight.size(0)
        first = self.pg_collection.tp.rank() * columns
        return min(columns, max(0, first + columns - vocab_size))


def _packed_seq_params(cu_seqlens_n: Tensor, max_seqlen: int, *, tokens: int) -> PackedSeqParams:
    # megatron.core takes a rotary table exactly as long as the row for one of absolute positions in the row, and then
    # positions would not restart at each document (rope_utils.py of 0.16.1, `_apply_rotary_pos_emb_thd`).
    max_seqlen += max_seqlen == tokens
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens_n,
        cu_seqlens_kv=cu_seqlens_n,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
    )
