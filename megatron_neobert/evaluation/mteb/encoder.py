"""Any encoder's folder as mteb sees a model: pooled token states, an instruction before the text, cosine similarity.

sentence-transformers sorts the texts by length and encodes batches of one size, so a score depends on the settings and
not on the order of the data. What a folder holds about pooling and prompts (modules.json) is not used: all models are
measured under one protocol.

Instructions come from YAML: `types` holds what stands before the texts of a kind of task, `tasks` what differs for
single ones. Style `prefix`: the instruction and a space, before queries and before the texts of symmetric tasks;
documents stay as they are. Style `paper`: what the wrapper of NeoBERT's release writes, before documents as well:
instruction [SEP] [CLS] text.
Source: chandar-lab/NeoBERT scripts/evaluation/wrappers.py, which cannot run as released; so nobody knows whether the
paper's numbers come from that spelling.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from mteb.models import ModelMeta
from mteb.models.abs_encoder import AbsEncoder
from pydantic import TypeAdapter
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from megatron_neobert.errors import ConfigError, ConversionError, DataError, MissingInputError, yaml_reason
from megatron_neobert.evaluation.encoders import LoadOptions, fingerprint, load_sentence_transformer
from megatron_neobert.runtime.atomic_files import read_text, sha256_of

PromptStyle = Literal["prefix", "paper"]


@dataclass(frozen=True, kw_only=True)
class Instructions:
    """Texts by task name and by task type; without any, nothing is put before a text."""

    tasks: dict[str, str] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    prefix: str = "{instruction} "
    before_documents: bool = False
    digest: str = "none"  # of the file they come from

    def prompt_for(self, metadata: Any, *, side: str | None) -> str | None:
        """What stands before a text.

        Args:
            metadata: mteb's, of the task.
            side: query, document, or None for the texts of a symmetric task.

        Returns:
            None for nothing at all: there is no instruction, or an empty one.
        """
        instruction = self.tasks.get(metadata.name, self.types.get(metadata.type))
        if not instruction or (side == "document" and not self.before_documents):
            return None
        return self.prefix.format(instruction=instruction)

    def refuse_gaps(self, tasks: list[Any]) -> None:
        """Raises ConfigError if there are instructions and a task has none: it would be measured another way."""
        if not self.tasks and not self.types:
            return
        known = {*self.tasks, *self.types}
        gaps = sorted({task.metadata.name for task in tasks if not {task.metadata.name, task.metadata.type} & known})
        if gaps:
            raise ConfigError(
                f"--instructions has no text for {', '.join(gaps)}, neither under tasks nor for the type under types; "
                "add one (an empty one is one)."
            )


def read_instructions(path: Path, style: PromptStyle, tokenizer: Any) -> Instructions:
    """The instructions of a YAML file.

    Args:
        tokenizer: Of the model: style paper puts its separating and its first token between instruction and text.

    Raises:
        MissingInputError, DataError: There is no such file, or something else in it.
        ConfigError: Style paper, and the tokenizer has no such tokens.
    """
    if not path.is_file():
        raise MissingInputError(f"--instructions {path}: no such file; name a YAML file, or none.")
    try:
        content = yaml.safe_load(read_text(path))
        sections = TypeAdapter(dict[Literal["tasks", "types"], dict[str, str]]).validate_python(content, strict=True)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: expected YAML with the keys tasks and types, a text per name in each ({yaml_reason(error)})."
        ) from error
    prefix = "{instruction} "
    if style == "paper":
        first = tokenizer.bos_token or tokenizer.cls_token
        if first is None or tokenizer.sep_token is None:
            raise ConfigError("--prompt-style paper needs a tokenizer with [SEP] and [CLS]; use --prompt-style prefix.")
        prefix = "{instruction}" + f"{tokenizer.sep_token} {first}"
    return Instructions(**sections, prefix=prefix, before_documents=style == "paper", digest=sha256_of(path)[:12])


_KNOWN_MODULES = {"Transformer", "Pooling", "Normalize"}  # the last changes no cosine


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


def build_encoder(
    folder: Path,
    instructions: Instructions,
    options: LoadOptions,
    *,
    pooling: Literal["mean", "cls"] = "mean",
    max_length: int = 1024,
    show_progress: bool = False,
) -> MtebEncoder:
    """The model of a folder, ready for `mteb.evaluate`.

    Args:
        max_length: Tokens, specials included; models with fewer positions truncate earlier.

    Raises:
        MissingInputError, ConversionError: The folder is not there, or cannot be loaded as an encoder of texts.
    """
    loaded = load_sentence_transformer(folder, options, max_length=max_length)
    if unknown := [name for module in loaded if (name := type(module).__name__) not in _KNOWN_MODULES]:
        raise ConversionError(
            f"{folder / 'modules.json'}: lists {', '.join(unknown)}, which would be left out here: only a transformer "
            "with mean or cls pooling is measured; evaluate this model with mteb itself."
        )
    longest = loaded.max_seq_length
    if longest < max_length:
        print(f"{folder}: texts are truncated after {longest} tokens, not {max_length}: no more positions")
    model = SentenceTransformer(  # without the folder's own pooling and prompts
        modules=[loaded[0], Pooling(loaded[0].model.config.hidden_size, pooling)],
        device=str(options.device),
        similarity_fn_name="cosine",
    )
    revision = {"name": f"local/{folder.resolve().name}", "revision": fingerprint(folder), "max_tokens": longest}
    meta = ModelMeta.create_empty(overwrites=revision)
    return MtebEncoder(model.eval(), meta, instructions, show_progress=show_progress)
