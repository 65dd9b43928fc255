"""Any encoder's folder as mteb sees a model: pooled token states, an instruction before the text, cosine similarity.

sentence-transformers sorts the texts by length and encodes batches of one size, so a score depends on the settings and
not on the order of the data. What a folder says about pooling and prompts (modules.json) is not used: all models are
measured under one protocol.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from mteb.models import ModelMeta
from mteb.models.abs_encoder import AbsEncoder
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from megatron_neobert.errors import ConversionError
from megatron_neobert.evaluation.encoders import LoadOptions, fingerprint, load_model, load_tokenizer, longest_input
from megatron_neobert.evaluation.mteb.instructions import Instructions

_KNOWN_MODULES = {"Transformer", "Pooling", "Normalize"}  # the last changes no cosine


@dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """How texts become embeddings."""

    load: LoadOptions
    pooling: Literal["mean", "cls"] = "mean"
    max_length: int = 1024  # tokens, specials included; models with fewer positions cut earlier
    show_progress: bool = False


class MtebEncoder(AbsEncoder):
    """mteb's protocol around a SentenceTransformer."""

    def __init__(
        self, model: SentenceTransformer, meta: ModelMeta, instructions: Instructions, *, show_progress: bool
    ) -> None:
        self.model = model
        self.mteb_model_meta = meta
        self.instructions = instructions
        self._show_progress = show_progress

    def encode(
        self,
        inputs: Any,
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        prompt_type: Any = None,
        **kwargs: Any,
    ) -> np.ndarray:
        """Embeddings in fp32, in the order of the texts, [texts, width]."""
        texts = [text for batch in inputs for text in batch["text"]]
        prompt = self.instructions.prompt_for(task_metadata, side=prompt_type.value if prompt_type else None)
        embeddings: np.ndarray = self.model.encode(
            texts,
            prompt=prompt,
            batch_size=kwargs.get("batch_size", 32),
            show_progress_bar=self._show_progress,
            convert_to_numpy=True,
        )
        return embeddings.astype(np.float32)


def build_encoder(folder: Path, options: EncoderOptions, instructions: Instructions) -> MtebEncoder:
    """The model of a folder, ready for `mteb.evaluate`.

    Raises:
        MissingInputError, ConversionError: The folder is not there, or cannot be loaded as an encoder of texts.
    """
    _refuse_more_modules(folder)
    backbone, tokenizer = load_model(folder, "AutoModel", options.load), load_tokenizer(folder)
    longest = min(options.max_length, longest_input(backbone, tokenizer) or options.max_length)
    if longest < options.max_length:
        print(f"{folder}: texts are cut after {longest} tokens, not {options.max_length}: it has no more positions")
    model = SentenceTransformer(
        modules=[_token_states(folder, backbone, longest), Pooling(backbone.config.hidden_size, options.pooling)],
        device=str(options.load.device),
        similarity_fn_name="cosine",
    )
    revision = {"name": f"local/{folder.resolve().name}", "revision": fingerprint(folder), "max_tokens": longest}
    meta = ModelMeta.create_empty(overwrites=revision)
    return MtebEncoder(model.eval(), meta, instructions, show_progress=options.show_progress)


def _token_states(folder: Path, backbone: torch.nn.Module, longest: int) -> Transformer:
    """sentence-transformers' module around a model that is loaded already, with our checks and classes.

    The module can only load one itself, which is dropped for ours.
    """
    module = Transformer(
        str(folder),
        model_kwargs={"local_files_only": True, "trust_remote_code": False, "dtype": backbone.dtype},
        processor_kwargs={"local_files_only": True, "trust_remote_code": False},
        config_kwargs={"local_files_only": True, "trust_remote_code": False},
        max_seq_length=longest,
    )
    module.model = backbone
    return module


def _refuse_more_modules(folder: Path) -> None:
    path = folder / "modules.json"
    if not path.exists():
        return
    modules = [str(entry["type"]).rpartition(".")[2] for entry in json.loads(path.read_text(encoding="utf-8"))]
    if unknown := [name for name in modules if name not in _KNOWN_MODULES]:
        raise ConversionError(
            f"{path}: lists {', '.join(unknown)}, which would be left out here: only a transformer with mean or cls "
            "pooling is measured; evaluate this model with mteb itself."
        )
