"""Write a checkpoint as a Hugging Face folder, compared with the reference model before it gets its final name.

Layouts: `eurobert` uses the class of transformers that computes the same function; `neobert` has the published names
and its own modelling file.
"""

import json
from dataclasses import asdict, fields
from functools import partial
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import ModelCard, ModelCardData, save_torch_state_dict
from safetensors import safe_open
from torch import Tensor

import megatron_neobert
from checkpoint_conversion.checkpoint import COMPARED_SETTINGS, MegatronCheckpoint
from checkpoint_conversion.config_json import build_config
from checkpoint_conversion.mapping import TABLES, ModelShape, to_published
from megatron_neobert.config.phases import phase_at
from megatron_neobert.data.tokenizer.tokenizer import Tokenizer
from megatron_neobert.huggingface.checks import read_object
from megatron_neobert.huggingface.folder_files import write_config, write_json, write_module_files
from megatron_neobert.runtime.atomic_files import MANIFEST, build_folder, sha256_of

if TYPE_CHECKING:  # importing transformers takes seconds, and an export without verification does not need it
    from checkpoint_conversion.compare import Checks

REPORT = "conversion_report.json"
_CARD_TEMPLATE = Path(__file__).with_name("model_card_template.md")


def export(
    checkpoint: MegatronCheckpoint,
    output: Path,
    *,
    layout: str = "eurobert",
    dtype: str = "float32",
    sentence_transformers: bool = False,
    verified: bool = True,
) -> "Checks":
    """Write `output` as a Hugging Face folder with weights, tokenizer, report and model card. Verify it if `verified`.

    Args:
        layout: A name in mapping.TABLES.
        dtype: Dtype of the stored weights, float32 or bfloat16.
        sentence_transformers: Add the files that `SentenceTransformer(output)` reads.

    Returns:
        Comparisons with the logits of the checkpoint's model in plain PyTorch, by input; empty if not `verified`.
    """
    torch_dtype, length = getattr(torch, dtype), checkpoint.settings.model.max_position_embeddings
    if checkpoint.iteration:  # tokens per sequence in the last iteration
        length = min(length, phase_at(checkpoint.settings, checkpoint.iteration).settings.data.seq_length)
    checks: Checks = {}
    with build_folder(output) as folder:
        source = (checkpoint.shape, checkpoint.tokenizer, checkpoint.tensors)
        write_folder(folder, layout, *source, dtype=torch_dtype, model_max_length=length)
        if verified:
            from checkpoint_conversion.compare import checkpoint_model, load_logit_model, verify

            load = partial(load_logit_model, folder)
            reference = checkpoint_model(checkpoint, torch_dtype)
            checks = verify(reference, load, stored=torch_dtype, name="the exported model")
        if sentence_transformers:
            width = checkpoint.settings.model.hidden_size
            # Over all tokens without padding, [CLS] and [SEP] included.
            pooling = {"embedding_dimension": width, "pooling_mode": "mean", "include_prompt": True}
            write_module_files(folder, max_seq_length=length, pooling=pooling)
        write_report(checkpoint, folder, checks, layout=layout, dtype=dtype)
        write_model_card(folder)
    return checks


# --- files


def write_folder(
    folder: Path,
    layout: str,
    shape: ModelShape,
    tokenizer: Tokenizer,
    tensors: dict[str, Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    model_max_length: int,
) -> None:
    """Write config.json, weights, tokenizer files and the layout's additional files into an empty folder.

    Args:
        layout: A name in mapping.TABLES.
        tensors: Weights under the internal names of mapping.py. They are rounded to `dtype`.
        model_max_length: Tokens at which the tokenizer truncates.
    """
    config = {**build_config(layout, shape, tokenizer, dtype), "transformers_version": version("transformers")}
    rounded = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    weights = to_published(rounded, shape, TABLES[layout])
    write_config(folder, config)
    save_torch_state_dict(weights, folder, metadata={"format": "pt"})
    tokenizer.save_tokenizer_files(folder, model_max_length=model_max_length)
    # safetensors creates files that only their owner can read; give them the mode of the other files.
    for path in folder.glob("*.safetensors"):
        path.chmod((folder / "config.json").stat().st_mode)


def write_report(checkpoint: MegatronCheckpoint, folder: Path, checks: "Checks", *, layout: str, dtype: str) -> None:
    """Write `folder`/conversion_report.json with the checkpoint's origin, training settings (no paths) and `checks`."""
    compared: dict[str, Any] = {}
    if checks:  # the folder exists only if settings and weights were equal
        compared = {"settings": COMPARED_SETTINGS, "weights": len(checkpoint.tensors)}
    state, continued = checkpoint.train_state, checkpoint.settings.checkpoint.continue_from
    settings: dict[str, dict[str, Any]] = {}
    if checkpoint.iteration:  # at iteration 0 the weights were converted, not trained
        phase = phase_at(checkpoint.settings, checkpoint.iteration)
        for name in ("model", "data", "optimizer", "training"):
            section = getattr(phase.settings, name)
            public = [item.name for item in fields(section) if "is_path" not in item.metadata]
            settings[name] = {key: getattr(section, key) for key in public}
    report = {
        "source": {
            "checkpoint": checkpoint.folder.name,
            "iteration": checkpoint.iteration,
            "consumed_rows": state.consumed_samples,
            "consumed_tokens": state.consumed_tokens,
            **({"continued_from": Path(continued).name} if continued else {}),
            "manifest_sha256": sha256_of(checkpoint.folder / MANIFEST),
        },
        "format": layout,
        "dtype": dtype,
        "training": settings,
        "verification": {name: asdict(check) for name, check in checks.items()},
        "compared": compared,
        "versions": {
            "megatron_neobert": megatron_neobert.__version__,
            **{name: version(name) for name in ("torch", "transformers", "safetensors")},
        },
    }
    write_json(folder / REPORT, report)


def write_model_card(folder: Path) -> None:
    """Write README.md, the model card that the Hub shows, from the other files of an exported folder."""
    config, tokenizer = read_object(folder / "config.json"), read_object(folder / "tokenizer_config.json")
    report = read_object(folder / REPORT)
    is_pooled = (folder / "modules.json").is_file()
    parameters = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            parameters += sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    variables = {
        "layout": config["model_type"],
        "config": config,
        "parameters": parameters,
        "masked_text": json.dumps(f"Paris is the {tokenizer['mask_token']} of France.", ensure_ascii=False),
        "lowercase": tokenizer.get("do_lower_case") is True,
        "sentence_transformers": is_pooled,
        **{name: report[name] for name in ("source", "compared", "verification")},
        "versions": {name: report["versions"][name] for name in ("torch", "transformers")},
        **{name: report["training"].get(name, {}) for name in ("data", "training", "optimizer")},
    }
    data = ModelCardData(
        license="unknown",
        library_name="transformers",
        pipeline_tag="fill-mask",
        tags=["neobert", "encoder", *(["sentence-transformers", "feature-extraction"] if is_pooled else [])],
    )
    card = ModelCard.from_template(data, template_path=str(_CARD_TEMPLATE), model_id="path/to/this/folder", **variables)
    (folder / "README.md").write_text(str(card), encoding="utf-8")
