# Copyright 2026 the megatron-neobert maintainers. Licensed under the Apache License, Version 2.0.
# Origin: megatron_neobert/huggingface/modeling_neobert.py of the Python package megatron-neobert.
"""NeoBERT for transformers 4.57 to 5.23, in one file that is stored with the weights.

Parameter names and conventions equal the published checkpoint's. A batch is either padded (`attention_mask`) or
one packed sequence of several documents (`cu_seqlens`), which never attend to each other, whatever the attention
implementation. The blocks compute a padded batch as a packed sequence, without its padding, where `may_unpad` is True.
There are no buffers: rotary angles are computed in fp32 in every forward, so that casts and lazy
loading cannot change them.

Shapes: `b` rows, `s` positions, `h` hidden, `n` heads, `d` head width, `v` vocabulary, `c` classes.
Source: arXiv 2502.19587 section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask
from transformers import PretrainedConfig, PreTrainedModel, modeling_outputs
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None  # type: ignore[assignment]

IGNORED_LABEL = -100
AUTO_MAP = {
    "AutoConfig": "modeling_neobert.NeoBERTConfig",
    "AutoModel": "modeling_neobert.NeoBERT",
    "AutoModelForMaskedLM": "modeling_neobert.NeoBERTForMaskedLM",
    "AutoModelForSequenceClassification": "modeling_neobert.NeoBERTForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_neobert.NeoBERTForTokenClassification",
}
PUBLISHED_MODEL = {
    "vocab_size": 30_522,
    "hidden_size": 768,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "intermediate_size": 3072,  # 3/2 of the width, see SwiGLU
    "max_position_embeddings": 4096,
    "norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "embedding_init_range": 0.02,
    "decoder_init_range": 0.02,
    "classifier_init_range": 0.02,
    "classifier_dropout": 0.1,  # in classification heads; the encoder has no dropout
    "classifier_pooling": "cls",  # what a head for whole texts reads: "cls" the first token, "mean" all tokens
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
logger = logging.get_logger(__name__)


class NeoBERTConfig(PretrainedConfig):
    """Settings of a NeoBERT model. PUBLISHED_MODEL lists their names and default values.

    `max_position_embeddings` (`max_length` in published folders) is the longest document that the model was trained
    for. Longer documents cause a warning only.
    Raises ValueError if rotary angles are scaled, if the head width is odd or does not fit the hidden size, or if the
    pooling is unknown.
    """

    model_type = "neobert"

    def __init__(self, **settings: Any) -> None:
        legacy_length = settings.pop("max_length", None)  # transformers 5 refuses to save a setting of this name
        if legacy_length is not None:
            settings.setdefault("max_position_embeddings", legacy_length)
        for name in ("rope_scaling", "rope_parameters"):  # transformers 5 saves the base in rope_parameters
            rotary = dict(settings.pop(name, None) or {})
            base = rotary.pop("rope_theta", None)
            if set(rotary.values()) - {"default"} or base not in (None, settings.get("rope_theta", base)):
                raise ValueError(
                    f"{name} {rotary} with rope_theta {base} is not supported beside rope_theta "
                    f"{settings.get('rope_theta')}. Remove {name}; rope_theta is the only rotary setting."
                )
            settings |= {} if base is None else {"rope_theta": base}
        settings |= {name: default for name, default in PUBLISHED_MODEL.items() if settings.get(name) is None}
        hidden_size, heads = settings["hidden_size"], settings["num_attention_heads"]
        width = settings.setdefault("dim_head", hidden_size // heads)
        if width % 2 or width * heads != hidden_size:
            raise ValueError(
                f"hidden_size {hidden_size}, num_attention_heads {heads}, dim_head {width}: hidden_size must be "
                "num_attention_heads x dim_head, and dim_head even. Change one of them, or remove dim_head."
            )
        if settings["classifier_pooling"] not in ("cls", "mean"):
            raise ValueError(f"classifier_pooling {settings['classifier_pooling']!r} is unknown; use 'cls' or 'mean'.")
        # A folder saved as one class can be loaded as any other. Paths with "--" are code of other repositories.
        auto_map = settings.get("auto_map") or {}
        local = {name: path for name, path in AUTO_MAP.items() if "--" not in str(auto_map.get(name))}
        super().__init__(**{**settings, "auto_map": {**auto_map, **local}})


class Packing(NamedTuple):
    """Documents of one packed sequence."""

    starts: Tensor  # int32: 0, ..., s
    longest: int  # tokens of the longest document, or more
    lengths: list[int] | None  # tokens of each document, if the host has read them


class Rotation(NamedTuple):
    """Cosine and sine of the rotary angles, fp32, [b or 1, 1, s, d/2]: one angle per pair of adjacent channels."""

    cosine: Tensor
    sine: Tensor


class SwiGLU(nn.Module):
    """Feed-forward layer. Its width is two thirds of intermediate_size, rounded up to a multiple of 8.

    The first half of the rows of `w12` is the gate projection.
    """

    def __init__(self, config: NeoBERTConfig) -> None:
        super().__init__()
        width = (2 * config.intermediate_size // 3 + 7) // 8 * 8
        self.w12 = nn.Linear(config.hidden_size, 2 * width, bias=False)
        self.w3 = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, hidden_bsh: Tensor) -> Tensor:
        gate, up = self.w12(hidden_bsh).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * up)


class EncoderBlock(GradientCheckpointingLayer):
    """Attention and feed-forward with pre-normalization and residual connections."""

    def __init__(self, config: NeoBERTConfig, layer_idx: int) -> None:
        super().__init__()
        # Attributes that the attention functions of transformers read.
        self.config, self.layer_idx, self.is_causal = config, layer_idx, False
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)  # rows: q, k, v within each head
        self.wo = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.ffn = SwiGLU(config)

    def forward(
        self, hidden_bsh: Tensor, rotation: Rotation, attend: Callable[..., Any], mask: Any, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the block's output [b, s, h] and, with eager attention, the attention weights [b, n, s, s].

        `attend`, `mask` and `options` are the results of `choose_attention`.
        """
        heads_bsnd = self.qkv(self.attention_norm(hidden_bsh)).unflatten(-1, (self.config.num_attention_heads, -1))
        query, key, value = heads_bsnd.transpose(1, 2).chunk(3, dim=-1)
        query, key = rotate_pairs(query, rotation), rotate_pairs(key, rotation)
        scaling = self.config.dim_head**-0.5
        context_bsnd, weights = attend(self, query, key, value, mask, scaling=scaling, is_causal=False, **options)
        hidden_bsh = hidden_bsh + self.wo(context_bsnd.flatten(2))
        return hidden_bsh + self.ffn(self.ffn_norm(hidden_bsh)), weights


class HeadLinear(nn.Linear):
    """Linear layer of a head for fine-tuning, initialized from a normal distribution, unlike all other layers."""


class NeoBERTPreTrainedModel(PreTrainedModel):
    """Base class of all NeoBERT models. Models with a head share its `forward`."""

    config_class = NeoBERTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    # Defined by models with a head.
    compute_logits: Any  # (hidden_bsh, inputs) -> logits
    compute_loss: Any  # (logits, labels, inputs) -> loss
    output_class: Any
    _no_split_modules = ["EncoderBlock"]  # noqa: RUF012
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = (
        _can_compile_fullgraph
    ) = True

    def _init_weights(self, module: nn.Module) -> None:
        # Functions of torch.nn.init only: transformers 5 makes them skip weights that have been loaded.
        if isinstance(module, HeadLinear):
            nn.init.normal_(module.weight, std=self.config.classifier_init_range)
        elif isinstance(module, nn.Linear):
            nn.init.uniform_(module.weight, -self.config.decoder_init_range, self.config.decoder_init_range)
        elif isinstance(module, nn.Embedding):
            nn.init.uniform_(module.weight, -self.config.embedding_init_range, self.config.embedding_init_range)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return an output object with logits and, given labels, the loss. If `return_dict` is False, return a tuple.

        Each class documents its shapes, and `NeoBERT.forward` the other arguments. Raises ValueError unless exactly one
        of input_ids and inputs_embeds is given, or if attention_mask or cu_seqlens is invalid.
        """
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds, return_dict=True, **kwargs)
        logits = self.compute_logits(outputs.last_hidden_state, {**kwargs, "attention_mask": attention_mask})
        loss = None if labels is None else self.compute_loss(logits, labels.to(logits.device), kwargs)
        return self.finish(self.output_class, outputs, return_dict, loss=loss, logits=logits)

    def finish(self, output_class: type, outputs: Any, return_dict: bool | None, **results: Any) -> Any:
        """Add hidden states and attentions from `outputs` to `results`. Return an `output_class` object or a tuple."""
        output = output_class(**results, hidden_states=outputs.hidden_states, attentions=outputs.attentions)
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()


class NeoBERT(NeoBERTPreTrainedModel):
    """Encoder without a head. `encoder` is the token embedding, as in the published model."""

    _input_embed_layer = "encoder"

    def __init__(self, config: NeoBERTConfig) -> None:
        super().__init__(config)
        self.encoder = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.transformer_encoder = nn.ModuleList(EncoderBlock(config, i) for i in range(config.num_hidden_layers))
        self.layer_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.post_init()

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return an output object with `last_hidden_state`: hidden states [b, s, h] after the final norm.

        Args:
            input_ids: Token ids [b, s].
            attention_mask: [b, s], 0 at padding and not 0 at tokens. Outputs at padding are undefined.
            position_ids: [b or 1, s]. If None, positions count from 0 in every document.
            inputs_embeds: Embeddings [b, s, h], instead of input_ids.
            output_attentions: Also return the attention weights of every block, computed with eager attention.
            output_hidden_states: Also return the embeddings and the output of each block, the last after the final
                norm.
            return_dict: If False, return a tuple. If this argument or one of the two above is None, config decides.
            cu_seqlens: Starts of the documents in a packed sequence (b = 1), then the sequence length: 0, ..., s.
                Position ids that restart do not separate documents.
            max_seqlen: Tokens of the longest document. If None, the host reads cu_seqlens and computes this length.
                If max_seqlen is given, values of cu_seqlens are checked only if cu_seqlens is on the CPU.
            kwargs: `cu_seq_lens_q` and `max_length_q`, the names that DataCollatorWithFlattening uses for cu_seqlens
                and max_seqlen. Inputs of other models, such as `token_type_ids`, are ignored.

        Raises:
            ValueError: Not exactly one of input_ids and inputs_embeds is given; attention_mask is not [b, s];
                cu_seqlens does not increase from 0 to s, or is given with padding or b > 1; or max_seqlen is too small.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids and inputs_embeds: give exactly one of them.")
        hidden_bsh = self.encoder(input_ids) if inputs_embeds is None else inputs_embeds
        length = hidden_bsh.shape[1]
        with_weights = self.config.output_attentions if output_attentions is None else output_attentions
        with_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        implementation = "eager" if with_weights else self.config._attn_implementation or "eager"

        cu_seqlens = find_documents({**kwargs, "cu_seqlens": cu_seqlens})
        packing = mask_bs = None
        if cu_seqlens is not None:
            longest = kwargs.get("max_length_q") if max_seqlen is None else max_seqlen
            packing = pack(hidden_bsh, cu_seqlens, longest, attention_mask)
        elif attention_mask is not None:
            mask_bs = find_padding(attention_mask, hidden_bsh)
        if position_ids is None:
            position_ids = torch.arange(length, device=hidden_bsh.device)
            if packing is not None:
                position_ids = position_ids - packing.starts[number_documents(packing.starts, length)]
        position_ids = position_ids.view(-1, length)
        embedded_bsh, token_t, shape = hidden_bsh, None, hidden_bsh.shape[:2]
        if mask_bs is not None and may_unpad(implementation, hidden_bsh, self.config):
            packing, token_t = unpad(mask_bs)
            hidden_bsh = hidden_bsh.flatten(0, 1)[token_t][None]
            position_ids = position_ids.expand(shape).flatten()[token_t][None]
        longest = length if packing is None else packing.longest
        if not is_tracing() and longest > self.config.max_position_embeddings:
            logger.warning_once(
                f"A document has {longest} tokens, more than max_position_embeddings "
                f"{self.config.max_position_embeddings}, for which the model was trained."
            )
        rotation = build_rotation(position_ids, self.config)
        attend, mask, options = choose_attention(implementation, mask_bs, packing, hidden_bsh, self.config)
        states, weights = [], []
        for block in self.transformer_encoder:
            hidden_bsh, block_weights = block(hidden_bsh, rotation, attend, mask, options)
            states += [hidden_bsh] if with_states else []
            weights += [block_weights] if with_weights else []
        states = [*states[:-1], self.layer_norm(hidden_bsh)]
        if token_t is not None:
            states = [restore_padding(state, token_t, shape) for state in states]
        hidden_bsh = states[-1]
        outputs = modeling_outputs.BaseModelOutput(
            hidden_states=(embedded_bsh, *states) if with_states else None,
            attentions=tuple(weights) if with_weights else None,
        )
        return self.finish(modeling_outputs.BaseModelOutput, outputs, return_dict, last_hidden_state=hidden_bsh)


class NeoBERTForMaskedLM(NeoBERTPreTrainedModel):
    """NeoBERT with a linear head: logits [b, s, v]. The loss is the mean over labels [b, s] that are not -100."""

    output_class = modeling_outputs.MaskedLMOutput
    _tied_weights_keys = {"decoder.weight": "model.encoder.weight"}  # noqa: RUF012  used with tie_word_embeddings

    def __init__(self, config: NeoBERTConfig) -> None:
        super().__init__(config)
        self.model = NeoBERT(config)
        self.decoder: nn.Module = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.decoder = new_embeddings

    def compute_logits(self, hidden_bsh: Tensor, inputs: dict[str, Any]) -> Tensor:
        return self.decoder(hidden_bsh)

    def compute_loss(self, logits: Tensor, labels: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Return the cross-entropy in nats (fp32): the sum over labels that are not -100, divided by their number.

        Trainer sets `num_items_in_batch`, the number of these labels in all micro-batches of an update. Without it, the
        labels of this batch are counted. If all labels are -100, the loss is 0.
        """
        flat, num_items = logits.float().flatten(0, -2), inputs.get("num_items_in_batch")
        total = F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
        count = (labels != IGNORED_LABEL).sum() if num_items is None else torch.as_tensor(num_items)
        return total / count.clamp(min=1)


class NeoBERTForSequenceClassification(NeoBERTPreTrainedModel):
    """NeoBERT with a head on the pooled tokens of each document: dropout, linear, tanh, dropout, linear.

    The published model pools the first token. Logits have the shape [documents, c].
    """

    output_class = modeling_outputs.SequenceClassifierOutput
    accepts_loss_kwargs = False  # the loss is a mean, which Trainer divides by the number of micro-batches

    def __init__(self, config: NeoBERTConfig) -> None:
        super().__init__(config)
        self.model = NeoBERT(config)
        self.dense = HeadLinear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = HeadLinear(config.hidden_size, config.num_labels)  # type: ignore[arg-type]
        self.post_init()

    def compute_logits(self, hidden_bsh: Tensor, inputs: dict[str, Any]) -> Tensor:
        starts, mask_bs = find_documents(inputs), inputs["attention_mask"]
        if self.config.classifier_pooling == "mean":
            pooled_bh = average_documents(hidden_bsh, starts, mask_bs)
        else:
            pooled_bh = hidden_bsh[:, 0] if starts is None else hidden_bsh[0, starts[:-1].long()]
        return self.classifier(self.dropout(torch.tanh(self.dense(self.dropout(pooled_bh)))))

    def compute_loss(self, logits: Tensor, labels: Tensor, inputs: dict[str, Any]) -> Tensor:
        kind: Any = self.config.problem_type
        if kind is None:
            kind = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
            kind = "regression" if self.config.num_labels == 1 else kind
            self.config.problem_type = kind
        if kind == "regression":
            return F.mse_loss(logits.float().flatten(), labels.float().flatten())
        if kind == "single_label_classification":
            return F.cross_entropy(logits.float(), labels.flatten())
        return F.binary_cross_entropy_with_logits(logits.float(), labels.float())


class NeoBERTForTokenClassification(NeoBERTPreTrainedModel):
    """NeoBERT with dropout and a linear layer: logits [b, s, c]. The loss is the mean over labels that are not -100."""

    output_class = modeling_outputs.TokenClassifierOutput

    def __init__(self, config: NeoBERTConfig) -> None:
        super().__init__(config)
        self.model = NeoBERT(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = HeadLinear(config.hidden_size, config.num_labels)  # type: ignore[arg-type]
        self.post_init()

    def compute_logits(self, hidden_bsh: Tensor, inputs: dict[str, Any]) -> Tensor:
        return self.classifier(self.dropout(hidden_bsh))

    compute_loss = NeoBERTForMaskedLM.compute_loss


def is_tracing() -> bool:
    """Return True during compilation or export, when the values of tensors are not available."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def find_documents(inputs: dict[str, Any]) -> Tensor | None:
    """Return the document starts of a packed sequence: `cu_seqlens`, else `cu_seq_lens_q`, else None."""
    starts = inputs.get("cu_seqlens")
    return inputs.get("cu_seq_lens_q") if starts is None else starts


def average_documents(hidden_bsh: Tensor, starts: Tensor | None, attention_mask: Tensor | None) -> Tensor:
    """Return the mean hidden state of each document, [documents, h]. If `starts` is None, each row is a document."""
    if starts is not None:
        token_s, starts = torch.arange(hidden_bsh.shape[1], device=hidden_bsh.device), starts.to(hidden_bsh.device)
        chosen = ((token_s >= starts[:-1, None]) & (token_s < starts[1:, None]))[None]  # [1, documents, s]
    elif attention_mask is not None:
        chosen = (attention_mask != 0)[:, None]  # [b, 1, s]
    else:
        return hidden_bsh.mean(dim=1)
    weights = chosen / chosen.sum(dim=-1, keepdim=True)
    return (weights.to(hidden_bsh.dtype) @ hidden_bsh).flatten(0, 1)


def build_rotation(positions_bs: Tensor, config: PretrainedConfig) -> Rotation:
    """Return the rotations for positions [b or 1, s]: pair i rotates by theta^(-2i/d) per position."""
    channels = torch.arange(0, config.dim_head, 2, device=positions_bs.device, dtype=torch.float32)
    angles = positions_bs[:, None, :, None].float() * (1.0 / config.rope_theta ** (channels / config.dim_head))
    return Rotation(angles.cos(), angles.sin())


def rotate_pairs(heads_bnsd: Tensor, rotation: Rotation) -> Tensor:
    """Rotate channels (0, 1), (2, 3), ... of every head in fp32, and return them in the input's dtype."""
    even, odd = heads_bnsd.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = (even * rotation.cosine - odd * rotation.sine, even * rotation.sine + odd * rotation.cosine)
    return torch.stack(rotated, dim=-1).flatten(-2).to(heads_bnsd.dtype)


def pack(hidden_bsh: Tensor, cu_seqlens: Tensor, max_seqlen: int | None, attention_mask: Tensor | None) -> Packing:
    """Return the documents of a packed sequence. `cu_seqlens` lists their starts and then s: 0, ..., s.

    Raises:
        ValueError: There are several rows or padding, cu_seqlens does not increase from 0 to s, or max_seqlen is too
            small. Values are checked if cu_seqlens is on the CPU or max_seqlen is None. During tracing, no values are
            checked, and any attention_mask is refused.
    """
    rows, length = hidden_bsh.shape[:2]
    if rows != 1:
        raise ValueError(f"cu_seqlens with {rows} rows: a packed sequence has one row. Use shape (1, tokens).")
    if attention_mask is not None and (is_tracing() or not bool((attention_mask != 0).all())):
        raise ValueError("attention_mask and cu_seqlens: a packed sequence has no padding. Remove one of them.")
    longest, lengths = max_seqlen or length, None
    # To read a tensor of another device, the host waits until the device has finished all its work.
    if not is_tracing() and (max_seqlen is None or cu_seqlens.device.type == "cpu"):
        starts = cu_seqlens.tolist()
        lengths = [end - start for start, end in pairwise(starts)]
        if not lengths or starts[0] != 0 or starts[-1] != length or min(lengths) < 1:
            raise ValueError(
                f"cu_seqlens {starts[:4]} ... {starts[-1:]} for {length} tokens: it must increase from 0 to the number "
                "of tokens."
            )
        longest = max(lengths)
        if max_seqlen is not None and max_seqlen < longest:
            raise ValueError(f"max_seqlen {max_seqlen}: the longest document in cu_seqlens has {longest} tokens.")
    return Packing(cu_seqlens.to(hidden_bsh.device, torch.int32), longest, lengths)


def number_documents(starts_n: Tensor, length: int) -> Tensor:
    """Return the document number of each of the `length` tokens of a packed sequence."""
    token_s = torch.arange(length, device=starts_n.device, dtype=torch.int32)
    return torch.searchsorted(starts_n[1:].contiguous(), token_s, right=True)


def find_padding(attention_mask: Tensor, hidden_bsh: Tensor) -> Tensor | None:
    """Return a mask that is True at tokens, or None if all are tokens. Raise ValueError if the mask is not [b, s]."""
    rows, length = hidden_bsh.shape[:2]
    if attention_mask.shape != (rows, length):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, but must have one value per token: "
            f"({rows}, {length})."
        )
    mask_bs = (attention_mask != 0).to(hidden_bsh.device)
    return None if not is_tracing() and bool(mask_bs.all()) else mask_bs


def may_unpad(implementation: str, hidden_bsh: Tensor, config: PretrainedConfig) -> bool:
    """Return True if the blocks compute a padded batch as a packed sequence.

    Tracing needs shapes that do not depend on the values of the mask. A GPU without a kernel for packed sequences would
    launch one kernel per document.
    """
    fast = "flash" in implementation or hidden_bsh.device.type == "cpu" or has_packed_kernel(hidden_bsh, config)
    return not is_tracing() and fast and ("flash" in implementation or implementation == "sdpa")


def has_packed_kernel(hidden_bsh: Tensor, config: PretrainedConfig) -> bool:
    """Return True if torch's kernel for packed sequences supports the model. It needs CUDA, 16 bits and torch 2.10."""
    device = hidden_bsh.device
    if varlen_attn is None or device.type != "cuda" or not torch.backends.cuda.is_flash_attention_available():
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else hidden_bsh.dtype
    width_fits = config.dim_head % 8 == 0 and config.dim_head <= 256
    new_enough = torch.cuda.get_device_capability(device) >= (8, 0)
    return width_fits and new_enough and dtype in (torch.bfloat16, torch.float16)


def unpad(mask_bs: Tensor) -> tuple[Packing, Tensor]:
    """Return a batch's rows as packed documents without padding, and the tokens' indices in the flattened batch."""
    lengths = mask_bs.sum(1).tolist()
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=mask_bs.device)
    return Packing(starts, max(lengths), lengths), mask_bs.flatten().nonzero()[:, 0]


def restore_padding(hidden_1th: Tensor, token_t: Tensor, shape: torch.Size) -> Tensor:
    """Reverse `unpad`: move hidden states of a packed sequence to the padded batch, [b, s, h], with 0 at padding."""
    flat = hidden_1th.new_zeros(shape.numel(), hidden_1th.shape[-1])
    return flat.index_copy(0, token_t.to(flat.device), hidden_1th[0]).unflatten(0, shape)


def choose_attention(
    implementation: str, mask_bs: Tensor | None, packing: Packing | None, hidden_bsh: Tensor, config: PretrainedConfig
) -> tuple[Callable[..., Any], Any, dict[str, Any]]:
    """Return an attention function, its mask, and its keyword arguments.

    With "sdpa", packed documents need no mask if torch has a packed kernel or the host has the documents' lengths. A
    mask is True where a query may attend: [b, s] for flash, a BlockMask for flex, else broadcastable to [b, n, s, s].
    If the mask is None, a query attends to all tokens, or to its own document if the arguments describe documents.
    """
    rows, length = hidden_bsh.shape[:2]
    attend = attend_eagerly if implementation == "eager" else ALL_ATTENTION_FUNCTIONS[implementation]
    if packing is None:
        if mask_bs is None or "flash" in implementation:
            return attend, mask_bs, {}
    elif "flash" in implementation:
        starts, longest = packing.starts, packing.longest
        lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}
        return attend, None, lengths
    elif implementation == "sdpa" and not is_tracing() and has_packed_kernel(hidden_bsh, config):
        return attend_packed, None, {"starts": packing.starts, "longest": packing.longest}
    elif implementation == "sdpa" and packing.lengths is not None:
        return attend_by_document, None, {"lengths": packing.lengths}
    document_s = None if packing is None else number_documents(packing.starts, length)
    if implementation == "flex_attention":

        def may_attend(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            if document_s is not None:
                return document_s[query] == document_s[key]
            return mask_bs[row, key]  # type: ignore[index]

        return attend, create_block_mask(may_attend, rows, None, length, length, hidden_bsh.device), {}
    if document_s is not None:
        return attend, (document_s[:, None] == document_s)[None, None], {}
    return attend, mask_bs[:, None, None], {}  # type: ignore[index]


def attend_packed(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, *, starts: Tensor, longest: int, **_: Any
) -> tuple[Tensor, None]:
    """Attend within each document by torch's packed kernel, and return [1, s, n, d]. Scores are scaled by d^(-1/2)."""
    heads = (heads_bnsd[0].transpose(0, 1) for heads_bnsd in (query, key, value))
    arguments: Any = (*heads, starts, starts, longest, longest)
    context_snd: Any = varlen_attn(*arguments)
    return context_snd[None], None


def attend_by_document(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, *, lengths: list[int], **_: Any
) -> tuple[Tensor, None]:
    """Return the context [1, s, n, d] of packed documents, with one call of torch's attention per document."""
    documents = zip(*(heads_bnsd.split(lengths, dim=2) for heads_bnsd in (query, key, value)), strict=True)
    contexts = [F.scaled_dot_product_attention(*document) for document in documents]
    return torch.cat(contexts, dim=2).transpose(1, 2), None


def attend_eagerly(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """Return the context [b, s, n, d] and the attention weights [b, n, s, s], computed with separate matrix products.

    `query`, `key` and `value` are [b, n, s, d]. `mask` is True where a query may attend; None masks nothing.
    """
    scores = query @ key.transpose(-1, -2) * scaling
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return (weights @ value).transpose(1, 2), weights


# `save_pretrained` then copies this file into the folder.
for auto_class, path in AUTO_MAP.items():
    globals()[path.split(".")[1]].register_for_auto_class(auto_class)
