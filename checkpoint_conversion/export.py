"""A checkpoint as a Hugging Face folder, compared with the reference before it gets its name.

`eurobert` is transformers' own class that computes the same function, `neobert` the published names with a modelling
file that the folder carries, `llama` the encoder alone for software that does not know the other two.
"""

import json
from dataclasses import asdict, fields
from functools import partial
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import Tensor

import megatron_neobert
from checkpoint_conversion.card import REPORT, CardOptions, write_model_card
from checkpoint_conversion.checkpoint import MegatronCheckpoint
from checkpoint_conversion.config_json import FolderSpec, build_config
from checkpoint_conversion.mapping import HEAD_FOLDER, HEAD_NAMES, TABLES, to_published
from megatron_neobert.checkpoint.folder import MANIFEST
from megatron_neobert.config.phases import phase_at
from megatron_neobert.config.schema import ModelConfig
from megatron_neobert.huggingface.checks import MODELING_FILE, WEIGHTS
from megatron_neobert.runtime.atomic_files import build_folder, sha256_of

if TYPE_CHECKING:  # its module imports transformers: seconds, which an export without verification does not need
    from checkpoint_conversion.compare import Checks

_SECTIONS = ("model", "data", "optimizer", "training")  # of the settings: what the weights were made with

# Requirements that sentence-transformers enforces. Its old versions ignore them; transformers before 5.3 then refuses
# EuroBERT but computes a LlamaModel with causal attention.
_NATIVE = {"specifier": ">=5.3", "reason": "Older versions do not know this architecture as an encoder."}
_REMOTE_CODE = {"specifier": ">=4.57", "reason": "modeling_neobert.py is not tested with older ones."}


def export(
    checkpoint: MegatronCheckpoint,
    output: Path,
    *,
    layout: str = "eurobert",
    dtype: str = "float32",
    sentence_transformers: bool = False,
    verified: bool = True,
) -> "Checks":
    """Write and verify the folder.

    Args:
        layout: A name in mapping.TABLES.
        dtype: Precision of the stored weights, float32 or bfloat16.
        sentence_transformers: Add the files that `SentenceTransformer(output)` reads.

    Returns:
        Distance of the written model from the reference, empty if it was not verified.

    Raises:
        OutputError: The folder exists, or cannot be created.
        ConversionError: The weights do not fit, or the written model computes something else. Nothing is left behind.
    """
    stored, model, length = getattr(torch, dtype), checkpoint.settings.model, checkpoint.trained_length
    spec = FolderSpec(checkpoint.shape, checkpoint.tokenizer, stored, model_max_length=length)
    checks: Checks = {}
    with build_folder(output) as folder:
        write_folder(folder, layout, spec, checkpoint.tensors)
        if verified:
            from checkpoint_conversion.compare import checkpoint_model, load_logit_model, verify

            source = checkpoint_model(checkpoint, stored)
            checks = verify(source, partial(load_logit_model, folder), stored=stored, what="the exported model")
        if sentence_transformers:
            write_sentence_transformers_files(folder, layout, model, max_seq_length=length)
        write_report(checkpoint, folder, checks, layout=layout, dtype=dtype)
        write_model_card(CardOptions(model=folder))
    return checks


# --- files


def write_folder(folder: Path, layout: str, spec: FolderSpec, tensors: dict[str, Tensor]) -> None:
    """Fill an empty folder with config.json, safetensors files, the tokenizer's files, and what the layout adds.

    Args:
        layout: eurobert, neobert or llama.
        tensors: Under the internal names of mapping.py; rounded to the dtype of `spec`.

    Raises:
        ConversionError: The tensors are not those of such a model, or the layout cannot hold it.
        OSError: It cannot be written.
    """
    config = {**build_config(layout, spec), "transformers_version": version("transformers")}
    rounded = {name: tensor.to(spec.dtype) for name, tensor in tensors.items()}
    weights = to_published(rounded, spec.shape, TABLES[layout])
    _write_json(folder / "config.json", config)
    if layout == "llama":  # the class has no head
        head = {name: weights.pop(name) for name in HEAD_NAMES}
        (folder / HEAD_FOLDER).mkdir()
        save_file(head, folder / HEAD_FOLDER / WEIGHTS, metadata={"format": "pt"})
    save_torch_state_dict(weights, folder, metadata={"format": "pt"})
    if layout == "neobert":
        (folder / MODELING_FILE).write_bytes(modeling_source())
    longest = spec.model_max_length or spec.shape.model.max_position_embeddings
    spec.tokenizer.save_tokenizer_files(folder, model_max_length=longest)
    for path in folder.rglob("*.safetensors"):  # written for the owner alone, but as public as the others
        path.chmod((folder / "config.json").stat().st_mode)


def modeling_source() -> bytes:
    """Return the modelling file that a folder of the neobert layout carries."""
    return (resources.files("megatron_neobert.huggingface") / MODELING_FILE).read_bytes()


def write_sentence_transformers_files(folder: Path, layout: str, model: ModelConfig, *, max_seq_length: int) -> None:
    """Make a folder one that `SentenceTransformer(folder)` encodes with.

    A text's embedding is the mean of its tokens' last hidden states, [CLS] and [SEP] included and padding excluded. A
    pre-trained encoder has learnt no embeddings yet; this is the start for training them. The files are written in the
    spelling of sentence-transformers 3, which 6 still reads, because 3 cannot read that of 6. No Normalize module
    follows the pooling: cosine similarity divides by the lengths itself, and training for dot products needs them.

    Args:
        layout: With `neobert`, loading takes trust_remote_code=True, which no file can give; only the versions of
            transformers that are asked for depend on it.
        max_seq_length: Tokens at which texts are truncated.

    Raises:
        OSError: A file cannot be written.
    """
    modules = {"": "Transformer", "1_Pooling": "Pooling"}
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    pooling = {f"pooling_mode_{mode}": mode == "mean_tokens" for mode in modes}
    files: dict[str, Any] = {
        "modules.json": [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
            for number, (path, name) in enumerate(modules.items())
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": model.hidden_size, **pooling, "include_prompt": True},
        # Texts are truncated at max_seq_length; do_lower_case would be on top of what the tokenizer does.
        "sentence_bert_config.json": {"max_seq_length": max_seq_length, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "model_type": "SentenceTransformer",
            "prompts": {},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
            "requirements": {"transformers": _REMOTE_CODE if layout == "neobert" else _NATIVE},
        },
    }
    (folder / "1_Pooling").mkdir(exist_ok=True)
    for name, content in files.items():
        _write_json(folder / name, content)


def write_report(checkpoint: MegatronCheckpoint, folder: Path, checks: "Checks", *, layout: str, dtype: str) -> None:
    """Record what the folder was made of and how it was checked."""
    compared: dict[str, Any] = {}
    if checks:  # read back from the written folder; a folder that differs is not written
        from checkpoint_conversion.compare import COMPARED_SETTINGS

        compared = {"settings": COMPARED_SETTINGS, "weights": len(checkpoint.tensors)}
    progress, continued = checkpoint.progress, checkpoint.settings.checkpoint.continue_from
    last = phase_at(checkpoint.settings, checkpoint.iteration).settings  # of several phases the last that has begun
    settings = {
        name: {
            item.name: getattr(getattr(last, name), item.name)
            for item in fields(getattr(last, name))
            if "is_path" not in item.metadata
        }
        for name in _SECTIONS
    }
    report = {
        "source": {
            "checkpoint": checkpoint.folder.name,
            "iteration": checkpoint.iteration,
            "consumed_rows": progress.consumed_samples,
            "consumed_tokens": progress.consumed_tokens,
            **({"continued_from": Path(continued).name} if continued else {}),
            "manifest_sha256": sha256_of(checkpoint.folder / MANIFEST),
        },
        "format": layout,
        "dtype": dtype,
        "training": settings if checkpoint.iteration else {},  # 0: converted, not trained
        "verification": {name: asdict(check) for name, check in checks.items()},
        "compared": compared,
        "versions": {
            "megatron_neobert": megatron_neobert.__version__,
            **{name: version(name) for name in ("torch", "transformers", "safetensors")},
        },
    }
    _write_json(folder / REPORT, report)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
