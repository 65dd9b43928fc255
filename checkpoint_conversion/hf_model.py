"""The model of a Hugging Face folder as any user of transformers gets it; local files, none of the folder's code.

A folder of the neobert layout is loaded with our own class, which is the file that our exports carry.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForMaskedLM, EuroBertForMaskedLM, LlamaModel

from checkpoint_conversion.comparison import LogitModel
from checkpoint_conversion.hf_folder import HEAD_FOLDER, HEAD_NAMES
from checkpoint_conversion.hf_reader import LAYOUTS, read_model_config, read_weights
from checkpoint_conversion.mapping import TABLES, shape_of, to_internal
from megatron_neobert.errors import LONGEST_REASON, ConversionError
from megatron_neobert.huggingface.auto_classes import loading
from megatron_neobert.huggingface.checks import WEIGHTS, check_folder
from megatron_neobert.huggingface.modeling_neobert import NeoBERTForMaskedLM

# Of a forward, also where config.json asks for something else.
_OUTPUTS = {"return_dict": True, "output_hidden_states": False, "output_attentions": False}
_CLASSES = {"eurobert": EuroBertForMaskedLM, "neobert": NeoBERTForMaskedLM, "llama": LlamaModel}


def load_model(folder: Path, dtype: torch.dtype = torch.float32, *, with_head: bool = True) -> Any:
    """A folder's masked language model, or its encoder without any head, in evaluation mode.

    Raises:
        ConversionError: The folder names something outside it, or transformers cannot load it, or leaves out or
            invents a weight; without a head, those of a head may be left out.
    """
    check_folder(folder)
    if with_head:
        return _load(AutoModelForMaskedLM, folder, dtype)
    return _load(AutoModel, folder, dtype, ignored=("unexpected_keys",))


def load_logit_model(folder: Path, dtype: torch.dtype = torch.float32) -> LogitModel:
    """The logits that a folder's model computes, of padded rows and, where its layout can, of a packed one.

    Raises:
        ConversionError: As `load_model`.
    """
    head_file = folder / HEAD_FOLDER / WEIGHTS
    model = load_model(folder, dtype, with_head=not head_file.is_file())
    if head_file.is_file():
        model = BackboneWithHead(model, load_file(head_file))
    return _to_logit_model(folder, model)


def load_as_read(folder: Path) -> LogitModel:
    """The same in fp32, of a layout that conversion reads with the weights as it reads them, what is absent filled in.

    Raises:
        MissingInputError, ConversionError: As `hf_reader.read_weights` and `load_model`.
    """
    config = check_folder(folder)
    if config.get("model_type") not in LAYOUTS:
        return load_logit_model(folder)
    parsed = read_model_config(config, folder / "config.json")
    return build_logit_model(folder, parsed.layout, read_weights(folder, parsed)[0])


def build_logit_model(folder: Path, layout: str, weights: Mapping[str, Tensor]) -> LogitModel:
    """The model that transformers makes of a folder's config.json and of weights that were read from it, in fp32.

    From the folder's files transformers would draw a bias that is left out, and it knows neither halves of a
    feed-forward apart nor the names and pickles of training code.

    Args:
        layout: Of mapping.TABLES.
        weights: Of all its published names.

    Raises:
        ConversionError: As `load_model`.
    """
    tensors = dict(weights)
    changes: dict[str, Any] = {"tie_word_embeddings": False} | ({"mlp_bias": True} if layout == "eurobert" else {})
    changes["vocab_size"] = len(tensors[TABLES[layout][0].published[0]])  # of the embedding, without padding
    head = {name: tensors.pop(name) for name in HEAD_NAMES} if layout == "llama" else {}
    model = _load(_CLASSES[layout], folder, torch.float32, tensors=tensors, changes=changes)
    return _to_logit_model(folder, BackboneWithHead(model, head) if head else model)


class BackboneWithHead(nn.Module):
    """An encoder and the masked-language-model head that lies beside it."""

    def __init__(self, backbone: Any, head: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.config = backbone.config
        self.backbone = backbone
        self.decoder = nn.Linear(backbone.config.hidden_size, backbone.config.vocab_size, dtype=backbone.dtype)
        self.decoder.load_state_dict({name.removeprefix("decoder."): tensor for name, tensor in head.items()})

    def forward(self, **inputs: Tensor) -> Any:
        """The backbone's output, with `logits`."""
        output = self.backbone(**inputs)
        output.logits = self.decoder(output.last_hidden_state)
        return output


def _to_logit_model(folder: Path, model: Any) -> LogitModel:
    config, content = model.config, check_folder(folder)
    kind = content.get("model_type")
    is_known = kind in LAYOUTS
    settings = read_model_config(content, folder / "config.json").model if is_known else None

    def padded(tokens_bs: Tensor, attention_mask_bs: Tensor) -> Tensor:
        return model(input_ids=tokens_bs, attention_mask=attention_mask_bs).logits

    def packed_by_blocks(tokens_t: Tensor, cu_seqlens_n: Tensor) -> Tensor:  # eurobert, llama
        lengths = cu_seqlens_n.diff()
        document_t = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        positions_t = torch.arange(len(tokens_t)) - cu_seqlens_n[document_t]
        mask_tt = document_t[:, None] == document_t[None, :]
        return model(
            input_ids=tokens_t[None], attention_mask=mask_tt[None, None], position_ids=positions_t[None]
        ).logits[0]

    def packed_by_lengths(tokens_t: Tensor, cu_seqlens_n: Tensor) -> Tensor:
        longest = int(cu_seqlens_n.diff().max())
        return model(input_ids=tokens_t[None], cu_seqlens=cu_seqlens_n, max_seqlen=longest).logits[0]

    def weights() -> dict[str, Tensor]:
        state = {name.removeprefix("backbone."): tensor for name, tensor in model.state_dict().items()}
        assert settings is not None
        return to_internal(state, shape_of(settings, vocab_size=config.vocab_size), TABLES[str(kind)])

    return LogitModel(
        description=f"{folder} ({type(model).__name__})",
        vocab_size=config.vocab_size,
        max_tokens=config.max_position_embeddings,
        padded=padded,
        packed={"neobert": packed_by_lengths}.get(str(kind), packed_by_blocks) if is_known else None,
        settings=settings,
        weights=weights if is_known else None,
    )


def _load(
    kind: Any,
    folder: Path,
    dtype: torch.dtype,
    *,
    ignored: tuple[str, ...] = (),
    tensors: Mapping[str, Tensor] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Any:
    """What transformers makes of a folder.

    Args:
        ignored: Kinds of differences between files and model that do not matter.
        tensors: Instead of those in its files.
        changes: Of the config.
    """
    source: Path | None = folder
    options: dict[str, Any] = {"local_files_only": True, **_OUTPUTS, **(changes or {})}
    with loading(folder, kind.__name__):
        if tensors is not None:
            config = kind.config_class.from_pretrained(folder, trust_remote_code=False, **options)
            source, options = None, {"config": config, "state_dict": dict(tensors)}
        model, info = kind.from_pretrained(
            source, dtype=dtype, trust_remote_code=False, use_safetensors=True, output_loading_info=True, **options
        )
    problems = {what: sorted(map(str, names)) for what, names in info.items() if names and what not in ignored}
    if problems:
        found = "; ".join(f"{what}: {', '.join(names)}" for what, names in problems.items())[:LONGEST_REASON]
        raise ConversionError(f"{folder}: weights and architecture do not fit ({found}); fetch the folder again.")
    return model.eval()
