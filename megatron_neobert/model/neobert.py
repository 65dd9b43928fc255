"""NeoBERT as a subclass of Megatron-Core's GPTModel.

Differences from GPTModel: micro-batches are packed documents with bidirectional attention, the decoder has its own
weights and a bias, and decoder and loss are computed at the masked positions only (a fifth of the tokens).
"""

import os

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn
from torch.nn.functional import pad

from megatron_neobert.config.schema import Settings
from megatron_neobert.model.attention import RotaryPackedSeqParams
from megatron_neobert.model.initialization import initialize_weights
from megatron_neobert.model.loss import masked_token_losses
from megatron_neobert.model.transformer_config import layer_spec, to_transformer_config


class NeoBERTModel(GPTModel):
    """Encoder with masked-language-model head, or one pipeline stage of this model, with a run's initial weights.

    Shapes: `t` tokens of the micro-batch (`t/c` on one context-parallel rank), `n` documents + 1, `m` masked positions
    of this rank, `v` this rank's share of the padded vocabulary, `h` hidden.

    Args:
        vocab_size: Number of tokens, without padding.
        draws_weights: If False, weights are zero instead of random; the caller loads a checkpoint afterwards.
        pre_process: True if the stage contains the embedding.
        post_process: True if the stage contains the final norm and the head.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        vocab_size: int,
        draws_weights: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
    ) -> None:
        model = settings.model
        rotates = model.position_embedding_type == "rope"
        super().__init__(
            config=to_transformer_config(settings),
            transformer_layer_spec=layer_spec(settings),
            vocab_size=model.padded_vocab_size(
                vocab_size, tensor_parallel=settings.parallel.tensor_model_parallel_size
            ),
            max_sequence_length=model.position_rows,
            position_embedding_type="none" if rotates else "learned_absolute",  # CoreAttention rotates
            share_embeddings_and_output_weights=False,
            pre_process=pre_process,
            post_process=post_process,
        )
        self.rotary = RotaryEmbedding(self.config.kv_channels, 1.0, rotary_base=model.rotary_base) if rotates else None
        if post_process:
            # The layer is built without a bias, but has one in its checkpoints.
            layer = self.output_layer
            layer.bias = nn.Parameter(torch.zeros_like(layer.weight[:, 0]))
            set_tensor_model_parallel_attributes(layer.bias, True, 0, 1)
            layer.skip_bias_add = True  # it returns the bias beside the logits, and `forward` adds it
            layer.sequence_parallel = False  # its input has masked positions of all tensor-parallel ranks
            layer.allreduce_dgrad = parallel_state.get_tensor_model_parallel_world_size() > 1
            columns = layer.weight.size(0)
            first = self.pg_collection.tp.rank() * columns
            self.padded_columns = min(columns, max(0, first + columns - vocab_size))  # only pad the vocabulary
        seed = settings.training.seed if draws_weights else None
        initialize_weights(self, seed=seed, init_range=model.init_method_range, vocab_size=vocab_size)

    def forward(
        self,
        tokens_t: Tensor,
        cu_seqlens_n: Tensor,
        max_seqlen: int,
        masked_positions_m: Tensor | None = None,
        labels_m: Tensor | None = None,
        *,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor] | Tensor:
        """Return losses, logits or hidden states of one micro-batch.

        Args:
            tokens_t: Token ids of the documents, end to end; with context parallelism, this rank's slice.
            cu_seqlens_n: Start of each document in the whole micro-batch, then the end of the last document; int32.
                Empty documents may follow at the end.
            max_seqlen: Length of the longest document in tokens, or more.
            masked_positions_m: Indices into `tokens_t`.
            labels_m: Token ids to predict at these positions; below 0 for a filler.
            is_causal: If True, a token attends only to itself and to the tokens before it.

        Returns:
            - With labels: (losses_m, correct_m), fp32: losses in nats, and 1 for a correct prediction, else 0.
            - With masked positions, but no labels: logits_mv of this rank's share of the vocabulary.
            - Without masked positions: hidden states after the final norm, [t/c, h].
            - On a stage without the head, always: hidden states for the next stage, [t/c, 1, h]. With sequence
              parallelism, only this rank's share of the tokens.

        Collective: the tensor- and context-parallel groups.
        """
        ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        rank_tokens = tokens_t.size(0)
        # Without output_size, the host would wait for the device.
        starts_t = torch.repeat_interleave(cu_seqlens_n[:-1], cu_seqlens_n.diff(), output_size=rank_tokens * ranks)
        positions_t = torch.arange(rank_tokens * ranks, device=cu_seqlens_n.device) - starts_t
        rotation = None
        if self.rotary is not None:
            # Megatron returns the angles twice, once for each half of a head.
            angles_s1e = self.rotary(max_seqlen, packed_seq=True)[:, 0].chunk(2, dim=-1)[0]
            rotation = (angles_s1e.cos()[positions_t], angles_s1e.sin()[positions_t])
        embedded_t1h = None  # later stages receive hidden states from Megatron's schedule
        if self.pre_process:
            # Row 0 of the learned positions belongs to padding, as in the released ablation.
            position_ids_1t = 1 + positions_t[rank * rank_tokens : (rank + 1) * rank_tokens].unsqueeze(0)
            embedded_t1h = self.embedding(tokens_t.unsqueeze(0), position_ids_1t)
        hidden_t1h = self.decoder(
            hidden_states=embedded_t1h,
            attention_mask=None,
            packed_seq_params=RotaryPackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=cu_seqlens_n,
                cu_seqlens_kv=cu_seqlens_n,
                max_seqlen_q=max_seqlen,
                max_seqlen_kv=max_seqlen,
                rotation=rotation,
                is_causal=is_causal,
            ),
        )
        if not self.post_process:
            return hidden_t1h
        if self.config.sequence_parallel:
            # The output layer sums the gradients of all shares of the vocabulary (allreduce_dgrad in `__init__`).
            hidden_t1h = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_t1h, tensor_parallel_output_grad=False
            )
        if masked_positions_m is None:
            return hidden_t1h.squeeze(1)
        logits_m1v, bias_v = self.output_layer(hidden_t1h.index_select(0, masked_positions_m))
        if self.padded_columns:
            # The smallest finite number, because a rank may have padding columns only, and inf - inf is NaN. Added to
            # the bias, because overwriting logits would copy all their gradients in backward.
            bias_v = pad(bias_v[: -self.padded_columns], (0, self.padded_columns), value=torch.finfo(bias_v.dtype).min)
        logits_mv = logits_m1v.squeeze(1) + bias_v
        return logits_mv if labels_m is None else masked_token_losses(logits_mv, labels_m, self.config)

    def _set_attention_backend(self) -> None:
        """Set the variables NVTE_*_ATTN: "1" for each kernel that --attention-backend allows, "0" for the others.

        The unfused kernel, which stores all scores, is always off. Megatron's own method can enable this kernel.
        """
        allowed = {"auto": ("FLASH", "FUSED"), "flash": ("FLASH",), "fused": ("FUSED",)}[
            self.config.attention_backend.name
        ]
        for kernel in ("FLASH", "FUSED", "UNFUSED"):
            os.environ[f"NVTE_{kernel}_ATTN"] = str(int(kernel in allowed))
