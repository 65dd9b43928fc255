"""A saved folder is loaded with its own code; config, initialization, tying and compilation."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_neobert import build_config, build_documents, build_model, gap, pack, pad

from megatron_neobert.huggingface.modeling_neobert import (
    AUTO_MAP,
    NeoBERTConfig,
    NeoBERTForMaskedLM,
)

DOCUMENTS = build_documents()
BATCH = pad(DOCUMENTS)


@pytest.fixture(scope="module")
def remote_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a separate cache for code of folders, and forget the modules that were imported from the cache."""

    def cached_modules() -> list[str]:
        return [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]

    with pytest.MonkeyPatch.context() as patch:
        cache = str(tmp_path_factory.mktemp("transformers_modules"))
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", cache)
        patch.setattr(sys, "path", [*sys.path])
        for name in cached_modules():
            patch.delitem(sys.modules, name)
        yield
        for name in cached_modules():
            del sys.modules[name]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    build_model().save_pretrained(folder)
    return folder


def load(task: str, folder: Path, **options: Any) -> Any:
    return getattr(transformers, task).from_pretrained(folder, trust_remote_code=True, local_files_only=True, **options)


@pytest.mark.usefixtures("remote_code", "only_remote_code")
def test_folder_with_the_published_class_name_is_loaded(saved: Path, tmp_path: Path):
    folder = shutil.copytree(saved, tmp_path / "older")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = ["NeoBERTLMHead"]
    config["auto_map"]["AutoModelForMaskedLM"] = "modeling_neobert.NeoBERTLMHead"
    (folder / "config.json").write_text(json.dumps(config))
    model, info = load("AutoModelForMaskedLM", folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(model.eval()(**BATCH).logits, build_model()(**BATCH).logits)


def test_model_has_no_buffers():
    """transformers 5 builds models on the meta device and fills in stored tensors; a buffer would be undefined."""
    assert list(build_model().buffers()) == []


def test_tied_weights_are_shared_also_after_saving(tmp_path: Path):
    model = build_model(tie_word_embeddings=True)
    assert model.decoder.weight is model.model.encoder.weight
    expected = model(**BATCH).logits
    model.save_pretrained(tmp_path)
    again = NeoBERTForMaskedLM.from_pretrained(tmp_path, trust_remote_code=False).eval()
    assert again.decoder.weight is again.model.encoder.weight
    assert torch.equal(again(**BATCH).logits, expected)
    assert build_model().decoder.weight is not build_model().model.encoder.weight


@pytest.mark.parametrize("batch", [BATCH, pack(DOCUMENTS)], ids=["padded", "packed"])
def test_forward_compiles_to_one_graph_for_all_lengths(batch: dict[str, torch.Tensor]):
    torch._dynamo.reset()
    model = build_model()
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    shorter = pad(DOCUMENTS[1:]) if "attention_mask" in batch else pack(DOCUMENTS[:2])
    with torch.no_grad():
        for inputs in (batch, shorter):
            chosen = inputs["attention_mask"].bool() if "attention_mask" in inputs else slice(None)
            assert gap(compiled(**inputs).logits[chosen], model(**inputs).logits[chosen]) < 1e-5


# --- config: published settings, refused settings, and initialization


def test_published_config_is_read_and_saved_with_the_names_of_this_code(shared_data: Path, tmp_path: Path):
    published = json.loads((shared_data / "fixtures" / "hf_config.json").read_text(encoding="utf-8"))
    config = NeoBERTConfig.from_dict({**published, "max_length": 2048})
    assert config.max_position_embeddings == 2048
    assert (config.hidden_size, config.norm_eps, config.rope_theta, config.dim_head) == (768, 1e-5, 10_000.0, 64)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert saved["max_position_embeddings"] == 2048
    assert "max_length" not in saved
    assert saved["auto_map"] == AUTO_MAP, "the published file is not in the saved folder"


@pytest.mark.parametrize(
    ("settings", "fragments"),
    [
        ({"hidden_size": 36}, ["dim_head 9", "even"]),
        ({"dim_head": 16}, ["dim_head 16", "hidden_size 32"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, ["yarn", "rope_theta"]),
        ({"rope_parameters": {"rope_theta": 5e3}, "rope_theta": 1e4}, ["rope_theta 5000", "rope_theta 10000"]),
    ],
)
def test_invalid_settings_are_refused_with_their_values(settings: dict[str, Any], fragments: list[str]):
    with pytest.raises(ValueError) as caught:
        build_config(**settings)
    assert [fragment for fragment in fragments if fragment not in str(caught.value)] == []


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_rotary_base_is_read_from_the_keys_of_transformers_5(name: str):
    assert build_config(**{name: {"rope_type": "default", "rope_theta": 5000.0}}).rope_theta == 5000.0
    assert build_config(**{name: {"type": "default"}}).rope_theta == 10_000.0
    assert build_config(**{name: None}).rope_theta == 10_000.0
