"""NeoBERT as a bidirectional GPTModel of Megatron-Core.

What it changes: every row is packed and bidirectional, the decoder is untied and has a bias, and decoder and loss are
computed at the masked positions only (a fifth of the tokens). Everything else is megatron.core's.
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
from megatron_neobert.model.attention import pack_row, positions_in_documents
from megatron_neobert.model.initialization import initialize_weights
from megatron_neobert.model.loss import masked_token_losses
from megatron_neobert.model.transformer_config import layer_spec, to_transformer_config


class NeoBERTModel(GPTModel):
    """The encoder with its masked-language-model head, or a pipeline stage of it; weights are those of the run's seed.

    Shape letters: `t` tokens of a packed row (`t/c` of this context-parallel rank), `n` documents + 1, `m` masked
    positions of this rank, `v` this rank's share of the padded vocabulary, `h` hidden.

    A stage has the embedding with `pre_process`, the final norm and the head with `post_process`.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        vocab_size: int,
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
            position_embedding_type="none" if rotates else "learned_absolute",  # rotation is CoreAttention's
            share_embeddings_and_output_weights=False,
            pre_process=pre_process,
            post_process=post_process,
        )
        self.rotary = RotaryEmbedding(self.config.kv_channels, 1.0, rotary_base=model.rotary_base) if rotates else None
        if post_process:
            self._prepare_head(vocab_size)
        initialize_weights(self, seed=settings.training.seed, init_range=model.init_method_range, vocab_size=vocab_size)

    def forward(
        self,
        tokens_t: Tensor,
        cu_seqlens_n: Tensor,
        max_seqlen: int,
        masked_positions_m: Tensor | None = None,
        labels_m: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | Tensor:
        """Loss at the masked positions of a packed row, or the logits there, or the hidden states of every token.

        Args:
            tokens_t: Token ids, documents end to end; under context parallelism this rank's slice of them.
            cu_seqlens_n: Where each document of the whole row starts, and where the last one ends; int32. Documents of
                no token may follow.
            max_seqlen: At least the longest document, in tokens.
            masked_positions_m: Indices into `tokens_t`.
            labels_m: Original ids at these positions; below 0 for a filler.

        Returns:
            With labels (losses_m, correct_m), both fp32; without, logits_mv; without masked positions the normalized
            hidden states [t/c, h]. On a stage without the head, hidden states for the next one.

        Collective: the tensor- and context-parallel groups.
        """
        ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        own = tokens_t.size(0)
        positions_t = positions_in_documents(cu_seqlens_n, slots=own * ranks)
        rotation = None
        if self.rotary is not None:
            angles_s1e = self.rotary(max_seqlen, packed_seq=True)[:, 0].chunk(2, dim=-1)[0]  # both halves are equal
            rotation = (angles_s1e.cos()[positions_t], angles_s1e.sin()[positions_t])
        embedded_t1h = None  # a later stage has the hidden states of the one before
        if self.pre_process:
            # Row 0 of the learned positions is padding's, as in the released ablation.
            position_ids_1t = 1 + positions_t[rank * own : (rank + 1) * own].unsqueeze(0)
            embedded_t1h = self.embedding(tokens_t.unsqueeze(0), position_ids_1t)
        hidden_t1h = self.decoder(
            hidden_states=embedded_t1h,
            attention_mask=None,
            packed_seq_params=pack_row(cu_seqlens_n, max_seqlen, rotation=rotation),
        )
        if not self.post_process:
            return hidden_t1h
        if self.config.sequence_parallel:
            # The gradient of each rank's share of the vocabulary is summed by the output layer itself.
            hidden_t1h = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_t1h, tensor_parallel_output_grad=False
            )
        if masked_positions_m is None:
            return hidden_t1h.squeeze(1)
        logits_mv = self._decode(hidden_t1h, masked_positions_m)
        return logits_mv if labels_m is None else masked_token_losses(logits_mv, labels_m, self.config)

    def _set_attention_backend(self) -> None:
        """Tell Transformer Engine which kernels it may choose from: never the unfused one, which stores all scores.

        Megatron's own allows it with `auto`, and fails an assertion if the environment says otherwise.
        """
        allowed = {"auto": ("FLASH", "FUSED"), "flash": ("FLASH",), "fused": ("FUSED",)}[
            self.config.attention_backend.name
        ]
        for kernel in ("FLASH", "FUSED", "UNFUSED"):
            os.environ[f"NVTE_{kernel}_ATTN"] = str(int(kernel in allowed))

    def _decode(self, hidden_t1h: Tensor, masked_positions_m: Tensor) -> Tensor:
        logits_m1v, bias_v = self.output_layer(hidden_t1h.index_select(0, masked_positions_m))
        if self.padded_columns:
            # Not -inf: a rank may hold nothing else, and infinity less infinity is no number. Not by overwriting the
            # logits, whose backward pass would copy the gradient of them all.
            bias_v = pad(bias_v[: -self.padded_columns], (0, self.padded_columns), value=torch.finfo(bias_v.dtype).min)
        return logits_m1v.squeeze(1) + bias_v

    def _prepare_head(self, vocab_size: int) -> None:
        """Adds the bias that GPTModel's output layer does not have, but returns and checkpoints if it is there."""
        layer = self.output_layer
        layer.bias = nn.Parameter(torch.zeros_like(layer.weight[:, 0]))
        set_tensor_model_parallel_attributes(layer.bias, True, 0, 1)
        layer.skip_bias_add = True  # it is returned beside the logits
        layer.sequence_parallel = False  # it reads masked positions of the whole row
        layer.allreduce_dgrad = parallel_state.get_tensor_model_parallel_world_size() > 1
        columns = layer.weight.size(0)
        first = self.pg_collection.tp.rank() * columns
        self.padded_columns = min(columns, max(0, first + columns - vocab_size))  # they stand for no token
