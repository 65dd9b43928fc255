"""Write README.md of an exported folder, the model card that the Hub shows.

The card is made from the files of the folder: config.json, conversion_report.json and the headers of the weights. The
text is in model_card_template.md.
"""

import json
from math import prod
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from safetensors import safe_open

from megatron_neobert.huggingface.checks import read_object

CARD = "README.md"
REPORT = "conversion_report.json"
MODEL_ID = "path/to/this/folder"  # in the examples

_TEMPLATE = Path(__file__).with_name("model_card_template.md")


def write_model_card(folder: Path) -> None:
    """Write README.md of a folder that `export` has written."""
    facts = read_facts(folder)
    pooled = ["sentence-transformers", "feature-extraction"] if facts["sentence_transformers"] else []
    data = ModelCardData(
        license="unknown",
        library_name="transformers",
        pipeline_tag="fill-mask",
        tags=["neobert", "encoder", *pooled],
    )
    card = ModelCard.from_template(data, template_path=str(_TEMPLATE), model_id=MODEL_ID, **facts)
    (folder / CARD).write_text(str(card), encoding="utf-8")


def read_facts(folder: Path) -> dict[str, Any]:
    """Return the variables of model_card_template.md that describe the model, by name, from the files of its folder."""
    config, tokenizer = read_object(folder / "config.json"), read_object(folder / "tokenizer_config.json")
    report = read_object(folder / REPORT) if (folder / REPORT).exists() else {}
    run, versions = report.get("training") or {}, report.get("versions") or {}
    return {
        "layout": config["model_type"],
        "config": config,
        "parameters": count_parameters(folder),
        "masked_text": json.dumps(f"Paris is the {tokenizer['mask_token']} of France.", ensure_ascii=False),
        "lowercase": tokenizer.get("do_lower_case") is True,
        "sentence_transformers": (folder / "modules.json").is_file(),
        **{name: report.get(name) or {} for name in ("source", "compared", "verification")},
        "versions": {name: versions[name] for name in ("torch", "transformers") if name in versions},
        **{name: run.get(name) or {} for name in ("data", "training", "optimizer")},
    }


def count_parameters(folder: Path) -> int:
    """Return the number of parameters in the *.safetensors of `folder`, without subfolders. Only headers are read."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            total += sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return total
