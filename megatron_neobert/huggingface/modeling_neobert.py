"""NeoBERT for transformers 4.57 to 5.23 and PyTorch, in one file that is stored beside the weights.

Parameter names and conventions are those of the published checkpoint. A batch is padded (`attention_mask`) or one row
of documents laid end to end (`cu_seqlens`), which then never attend to each other under any attention.
There are no buffers: rotary angles are computed in fp32 once per forward, so no cast and no lazy loading spoils them.

Shapes: `b` rows, `s` tokens of a row, `h` hidden, `n` heads, `d` head width, `v` vocabulary, `c` classes.
Source: arXiv 2502.19587 section 3.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask
from transformers import PretrainedConfig, PreTrainedModel, modeling_outputs
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

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
    "intermediate_size": 3072,  # 3/2 of the width of SwiGLU, see SwiGLU
    "max_position_embeddings": 4096,
    "norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "embedding_init_range": 0.02,
    "decoder_init_range": 0.02,
    "classifier_init_range": 0.02,
    "classifier_dropout": 0.1,  # of the classification heads; the model itself has no dropout
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
logger = logging.get_logger(__name__)


class NeoBERTConfig(PretrainedConfig):
    """Settings as in PUBLISHED_MODEL, which holds the defaults, and those that every model of transformers has.

    `max_position_embeddings`, `max_length` in published folders, is the longest document that the model was trained
    for; the code has no limit.
    """

    model_type = "neobert"

    def __init__(self, **settings: Any) -> None:
        legacy_length = settings.pop("max_length", None)  # transformers 5 refuses to save a setting of this name
        if legacy_length is not None:
            settings.setdefault("max_position_embeddings", legacy_length)
        for name in ("rope_scaling", "rope_parameters"):  # transformers 5 writes the base into the second
            given = dict(settings.pop(name, None) or {})
            base = given.pop("rope_theta", None)
            if set(given.values()) - {"default"} or base not in (None, settings.get("rope_theta", base)):
                raise ValueError(
                    f"rotary settings {name} {given}, rope_theta {base} are not supported beside rope_theta "
                    f"{settings.get('rope_theta')}. Leave {name} out; rope_theta is the only one."
                )
            settings |= {} if base is None else {"rope_theta": base}
        settings = {**PUBLISHED_MODEL, **settings}
        hidden_size, heads = settings["hidden_size"], settings["num_attention_heads"]
        width = settings.setdefault("dim_head", hidden_size // heads)
        if width % 2 or width * heads != hidden_size:
            raise ValueError(
                f"hidden_size {hidden_size}, num_attention_heads {heads}, dim_head {width}: the heads share the hidden "
                "size equally, and each needs an even width. Change one of them; dim_head may be left out."
            )
        # All of the map, so that what is saved as one class loads as every other; code kept elsewhere stays there.
        given = settings.get("auto_map") or {}
        own = {name: path for name, path in AUTO_MAP.items() if "--" not in str(given.get(name))}
        super().__init__(**{**settings, "auto_map": {**given, **own}})


class Packing(NamedTuple):
    """Documents laid end to end in one row."""

    starts: Tensor  # int32, 0, ..., s
    longest: int  # tokens, at least those of the longest document
    document_s: Tensor  # which document each token belongs to
    position_s: Tensor  # of each token within its document


class Rotation(NamedTuple):
    """Cosine and sine of every angle, fp32, [b or 1, 1, s, d/2]: one angle per pair of adjacent channels."""

    cosine: Tensor
    sine: Tensor


class SwiGLU(nn.Module):
    """Two thirds of intermediate_size wide, rounded up to a multiple of 8; `w12` holds the gate's rows first."""

    def __init__(self, config: NeoBERTConfig) -> None:
        super().__init__()
        width = (2 * config.intermediate_size // 3 + 7) // 8 * 8
        self.w12 = nn.Linear(config.hidden_size, 2 * width, bias=False)
        self.w3 = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, hidden_bsh: Tensor) -> Tensor:
        gate, up = self.w12(hidden_bsh).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * up)


class EncoderBlock(GradientCheckpointingLayer):
    """Attention, then feed-forward; each reads its input through an RMSNorm and adds its output to it."""

    def __init__(self, config: NeoBERTConfig, layer_idx: int) -> None:
        super().__init__()
        # The attention functions of transformers read these three.
        self.config, self.layer_idx, self.is_causal = config, layer_idx, False
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)  # rows: q, k, v within each head
        self.wo = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.ffn = SwiGLU(config)

    def forward(
        self, hidden_bsh: Tensor, rotation: Rotation, implementation: str, mask: Any, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """The block's output and, if computed the eager way, the attention weights [b, n, s, s]."""
        heads_bsnd = self.qkv(self.attention_norm(hidden_bsh)).unflatten(-1, (self.config.num_attention_heads, -1))
        query, key, value = heads_bsnd.transpose(1, 2).chunk(3, dim=-1)
        attend = attend_eagerly if implementation == "eager" else ALL_ATTENTION_FUNCTIONS[implementation]
        query, key = rotate_pairs(query, rotation), rotate_pairs(key, rotation)
        scaling = self.config.dim_head**-0.5
        context_bsnd, weights = attend(self, query, key, value, mask, scaling=scaling, is_causal=False, **options)
        hidden_bsh = hidden_bsh + self.wo(context_bsnd.flatten(2))
        return hidden_bsh + self.ffn(self.ffn_norm(hidden_bsh)), weights


class HeadLinear(nn.Linear):
    """A layer that fine-tuning adds: drawn from a normal distribution, unlike all others."""


class NeoBERTPreTrainedModel(PreTrainedModel):
    """Base of every NeoBERT class, with the forward of classes whose head returns logits."""

    config_class = NeoBERTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    compute_logits: Any  # by every class that uses this forward: (hidden states, other inputs)
    compute_loss: Any  # (logits, labels, other inputs)
    output_class: Any
    _no_split_modules = ["EncoderBlock"]  # noqa: RUF012
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = (
        _can_compile_fullgraph
    ) = True

    def _init_weights(self, module: nn.Module) -> None:
        # torch.nn.init alone: transformers 5 keeps these away from weights that have been loaded.
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
        """Logits and, with labels, their loss; the other inputs are those of NeoBERT."""
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds, return_dict=True, **kwargs)
        logits = self.compute_logits(outputs.last_hidden_state, kwargs)
        loss = None if labels is None else self.compute_loss(logits, labels.to(logits.device), kwargs)
        return self.finish(self.output_class, outputs, return_dict, loss=loss, logits=logits)

    def finish(self, kind: type, outputs: Any, return_dict: bool | None, **results: Any) -> Any:
        """The results with what else the backbone gave, as one object or as a tuple of what is there."""
        output = kind(**results, hidden_states=outputs.hidden_states, attentions=outputs.attentions)
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()


class NeoBERT(NeoBERTPreTrainedModel):
    """Embedding, blocks and final norm (`encoder` is the embedding)."""

    def __init__(self, config: NeoBERTConfig) -> None:
        super().__init__(config)
        self.encoder: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.transformer_encoder = nn.ModuleList(EncoderBlock(config, i) for i in range(config.num_hidden_layers))
        self.layer_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder = value

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
        """Hidden states [b, s, h] after the final norm; what other models need (`token_type_ids`) is left alone.

        Args:
            input_ids: [b, s].
            attention_mask: [b, s], not zero where there is a token. Padding is never attended to; its own outputs mean
                nothing.
            position_ids: [b or 1, s]; None counts from 0 in every document.
            inputs_embeds: [b, s, h], instead of input_ids.
            output_attentions: Also the weights of every block; this forward then computes attention the eager way.
            output_hidden_states: Also the embeddings and the output of every block, the last one after the final norm.
            return_dict: False gives a tuple.
            cu_seqlens: Where the documents of a single row start and the row ends: 0, ..., s. `cu_seq_lens_q` of
                DataCollatorWithFlattening is the same. Positions that restart do not separate documents by themselves.
            max_seqlen: Tokens of the longest document; None counts them.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids and inputs_embeds: give one of them and not both.")
        hidden_bsh = self.encoder(input_ids) if inputs_embeds is None else inputs_embeds
        length = hidden_bsh.shape[1]
        cu_seqlens = find_documents({**kwargs, "cu_seqlens": cu_seqlens})
        packing = None if cu_seqlens is None else pack(hidden_bsh, cu_seqlens, max_seqlen, attention_mask)
        longest = length if packing is None else packing.longest
        if not is_tracing() and longest > self.config.max_position_embeddings:
            logger.warning_once(
                f"A document of {longest} tokens is longer than max_position_embeddings, "
                f"{self.config.max_position_embeddings}: the model was not trained for that."
            )
        if position_ids is None:
            position_ids = torch.arange(length, device=hidden_bsh.device) if packing is None else packing.position_s
        rotation = build_rotation(position_ids.view(-1, length), self.config)

        with_weights = self.config.output_attentions if output_attentions is None else output_attentions
        with_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        implementation = "eager" if with_weights else self.config._attn_implementation or "eager"
        mask, options = build_mask(implementation, attention_mask, packing, hidden_bsh)
        states, weights = [hidden_bsh], []
        for block in self.transformer_encoder:
            hidden_bsh, block_weights = block(hidden_bsh, rotation, implementation, mask, options)
            states += [hidden_bsh] if with_states else []
            weights += [block_weights] if with_weights else []
        hidden_bsh = self.layer_norm(hidden_bsh)
        outputs = modeling_outputs.BaseModelOutput(
            hidden_states=(*states[:-1], hidden_bsh) if with_states else None,
            attentions=tuple(weights) if with_weights else None,
        )
        return self.finish(modeling_outputs.BaseModelOutput, outputs, return_dict, last_hidden_state=hidden_bsh)


class NeoBERTForMaskedLM(NeoBERTPreTrainedModel):
    """Logits [b, s, v] of a linear layer with a bias; the loss is the mean over the labels [b, s] that are not -100."""

    output_class = modeling_outputs.MaskedLMOutput
    _tied_weights_keys = {"decoder.weight": "model.encoder.weight"}  # noqa: RUF012  where tie_word_embeddings asks for it

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
        return mean_token_loss(logits, labels, inputs.get("num_items_in_batch"))


NeoBERTLMHead = NeoBERTForMaskedLM  # the published name, which older folders have in their auto_map


class NeoBERTForSequenceClassification(NeoBERTPreTrainedModel):
    """Logits [documents, c] of dropout, linear, tanh, dropout, linear on every document's first token."""

    output_class = modeling_outputs.SequenceClassifierOutput
    accepts_loss_kwargs = False  # the loss is a plain mean, which Trainer divides by its micro-batches

    def __init__(self, config: NeoBERTConfig) -> None:
        super().__init__(config)
        self.model = NeoBERT(config)
        self.dense = HeadLinear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = HeadLinear(config.hidden_size, config.num_labels)  # type: ignore[arg-type]
        self.post_init()

    def compute_logits(self, hidden_bsh: Tensor, inputs: dict[str, Any]) -> Tensor:
        starts = find_documents(inputs)
        first_bh = hidden_bsh[:, 0] if starts is None else hidden_bsh[0, starts[:-1].long()]
        return self.classifier(self.dropout(torch.tanh(self.dense(self.dropout(first_bh)))))

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
    """Logits [b, s, c] of dropout and a linear layer; the loss is the mean over the labels that are not -100."""

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
    """Return True while the forward is compiled or exported, when tensor values are not available."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def find_documents(inputs: dict[str, Any]) -> Tensor | None:
    """Return the starts of documents, given under either name."""
    starts = inputs.get("cu_seqlens")
    return inputs.get("cu_seq_lens_q") if starts is None else starts


def build_rotation(positions_bs: Tensor, config: PretrainedConfig) -> Rotation:
    """The rotation of every position: pair i turns by theta^(-2i/d) per token."""
    channels = torch.arange(0, config.dim_head, 2, device=positions_bs.device, dtype=torch.float32)
    angles = positions_bs[:, None, :, None].float() * (1.0 / config.rope_theta ** (channels / config.dim_head))
    return Rotation(angles.cos(), angles.sin())


def rotate_pairs(heads_bnsd: Tensor, rotation: Rotation) -> Tensor:
    """Rotates channels (0, 1), (2, 3), ... of every head in fp32; same dtype as given."""
    even, odd = heads_bnsd.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = (even * rotation.cosine - odd * rotation.sine, even * rotation.sine + odd * rotation.cosine)
    return torch.stack(turned, dim=-1).flatten(-2).to(heads_bnsd.dtype)


def pack(hidden_bsh: Tensor, cu_seqlens: Tensor, max_seqlen: int | None, attention_mask: Tensor | None) -> Packing:
    """The documents of a packed row; ValueError if they are none, as far as values can be looked at."""
    rows, length = hidden_bsh.shape[:2]
    if rows != 1:
        raise ValueError(f"cu_seqlens with {rows} rows: documents laid end to end are one row, (1, tokens).")
    if attention_mask is not None and (is_tracing() or not bool((attention_mask != 0).all())):
        raise ValueError("attention_mask and cu_seqlens: documents laid end to end have no padding. Leave one out.")
    longest = max_seqlen or length
    if not is_tracing():
        starts = cu_seqlens.tolist()
        lengths = [end - start for start, end in pairwise(starts)]
        if not lengths or starts[0] != 0 or starts[-1] != length or min(lengths) < 1:
            raise ValueError(
                f"cu_seqlens {starts[:4]} ... {starts[-1:]} for {length} tokens: it must grow from 0 to the number of "
                "tokens."
            )
        longest = max(lengths)
        if max_seqlen is not None and max_seqlen < longest:
            raise ValueError(f"max_seqlen {max_seqlen}: the longest document of cu_seqlens has {longest} tokens.")
    starts_n = cu_seqlens.to(hidden_bsh.device, torch.int32)
    token_s = torch.arange(length, device=hidden_bsh.device, dtype=torch.int32)
    document_s = torch.searchsorted(starts_n[1:].contiguous(), token_s, right=True)
    return Packing(starts_n, longest, document_s, token_s - starts_n[document_s])


def build_mask(
    implementation: str, attention_mask: Tensor | None, packing: Packing | None, hidden_bsh: Tensor
) -> tuple[Any, dict[str, Any]]:
    """The mask in the form that an attention implementation takes, and what else it must be told."""
    rows, length = hidden_bsh.shape[:2]
    mask = None
    if attention_mask is not None and packing is None:
        if attention_mask.shape != (rows, length):
            raise ValueError(
                f"attention_mask {tuple(attention_mask.shape)}: it must be ({rows}, {length}), one value per token."
            )
        mask = attention_mask != 0
        if not is_tracing() and bool(mask.all()):
            mask = None  # kernels without a mask are faster
    if "flash" in implementation:
        if packing is None:
            return mask, {}
        starts, longest = packing.starts, packing.longest
        lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}
        return None, lengths  # which keep documents apart
    if implementation == "flex_attention" and (mask is not None or packing is not None):

        def may_attend(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            if packing is not None:
                return packing.document_s[query] == packing.document_s[key]
            return mask[row, key]  # type: ignore[index]

        return create_block_mask(may_attend, rows, None, length, length, hidden_bsh.device), {}
    if packing is not None:
        return (packing.document_s[:, None] == packing.document_s)[None, None], {}
    return None if mask is None else mask[:, None, None], {}


def attend_eagerly(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """Attention spelled out: the context [b, s, n, d] and the weights [b, n, s, s]."""
    scores = query @ key.transpose(-1, -2) * scaling
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return (weights @ value).transpose(1, 2), weights


def mean_token_loss(logits: Tensor, labels: Tensor, num_items: Tensor | int | None) -> Tensor:
    """Cross-entropy in fp32, summed over the labels that are not -100 and divided by their number.

    Trainer gives that number for all micro-batches of an update together. Without any label the loss is 0.
    """
    flat = logits.float().flatten(0, -2)
    total = F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
    return total / ((labels != IGNORED_LABEL).sum().clamp(min=1) if num_items is None else num_items)


for auto_class, path in AUTO_MAP.items():  # saving a model then saves this file with it
    globals()[path.split(".")[1]].register_for_auto_class(auto_class)
