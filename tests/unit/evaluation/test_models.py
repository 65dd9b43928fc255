"""Models under evaluation: values of config.json, and devices."""

import pytest
import torch
from json_files import edit_json
from unit.evaluation.pseudo_perplexity_models import write_model

from megatron_neobert.errors import ConfigError, ConversionError
from megatron_neobert.evaluation.models import choose_device, load_model


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"text_config": 5}, "text_config is 5, but must be an object"),
        ({"max_position_embeddings": "64"}, "max_position_embeddings is '64', but must be a whole number"),
        ({"norm_eps": [1e-5]}, "norm_eps is a list of length 1, but must be a number"),
        ({"pad_token_id": True}, "pad_token_id is True, but must be a whole number"),
    ],
)
def test_value_of_a_wrong_type_is_refused_by_its_key(tmp_path, values, message):
    folder = write_model(tmp_path / "model", "Bert")
    edit_json(folder / "config.json", **values)
    with pytest.raises(ConversionError, match=message):
        load_model(folder, "AutoModel")


@pytest.mark.parametrize("values", [{"output_hidden_states": True}, {"return_dict": False}], ids=str)
@pytest.mark.parametrize("auto_class", ["AutoModelForSequenceClassification", "AutoModelForTokenClassification"])
def test_model_returns_logits_by_name_whatever_its_config_asks_for(tmp_path, auto_class, values):
    folder = write_model(tmp_path / "model", "Bert")
    edit_json(folder / "config.json", **values)
    output = load_model(folder, auto_class, num_labels=2)(input_ids=torch.tensor([[5, 6]]))
    assert list(output.keys()) == ["logits"]


@pytest.mark.parametrize("device", ["mps", "xpu", "meta", "tpu"])
def test_device_other_than_cpu_and_cuda_is_refused(device):
    with pytest.raises(ConfigError, match=f"--device {device}.*; give cpu, cuda or cuda:1"):
        choose_device(device)
