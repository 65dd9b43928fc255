"""Write README.md of an exported folder, the model card that the Hub shows.

The card is made from the files of the folder: config.json, conversion_report.json and the headers of the weights. The
text is in model_card_template.md.
"""

import json
from math import prod
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from safetensors import safe_open

from megatron_neobert.huggingface.checks import read_object

CARD = "README.md"
REPORT = "conversion_report.json"
MODEL_ID = "path/to/this/folder"  # in the examples

_TEMPLATE = Path(__file__).with_name("model_card_template.md")


def write_model_card(folder: Path) -> None:
    """Write README.md into an exported folder. The card's content comes from the other files of the folder."""
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
    card = ModelCard.from_template(data, template_path=str(_TEMPLATE), model_id=MODEL_ID, **variables)
    (folder / CARD).write_text(str(card), encoding="utf-8")
