"""ONNX graphs of each layout compute the model in onnxruntime; wrong graphs are refused and leave nothing behind."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from commands import run
from json_files import edit_json, read_json
from saved_model import WORDS
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer
from transformers import AutoModelForMaskedLM, AutoTokenizer

from checkpoint_conversion import export_onnx as tool
from megatron_neobert.commands.export_onnx import OnnxOptions, export_onnx
from megatron_neobert.errors import ConversionError, MissingInputError
from megatron_neobert.huggingface.folder_files import copy_files, restore_files

TEXTS = ["the cat sat on a [MASK]", "the mat", "a cat sat on the [MASK] ."]


@pytest.fixture(scope="module")
def graphs(exported: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a folder of the eurobert layout, and the folder that the command wrote from it."""
    model, output = exported()[0], tmp_path_factory.mktemp("exported") / "graphs"
    code, printed, errors = run("export-onnx", "--model", model, "--output", output, "--int8")
    assert (code, errors) == (0, "") and "[torch.onnx]" not in printed
    return model, output


def test_command_writes_graphs_with_config_and_tokenizer_under_the_names_that_libraries_expect(graphs):
    model, output = graphs
    files = sorted(str(path.relative_to(output)) for path in output.rglob("*") if path.is_file())
    tokenizer = ["special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"]
    assert files == sorted(["config.json", "onnx/model.onnx", "onnx/model_quantized.onnx", *tokenizer])
    for name in ("config.json", *tokenizer):
        assert (output / name).read_text() == (model / name).read_text()
    assert list(output.parent.iterdir()) == [output], "no temporary folder is left"


@pytest.mark.parametrize("task", ["fill-mask", "feature-extraction"])
def test_license_is_copied_and_modules_only_for_a_graph_of_hidden_states(model, tmp_path, task):
    pooled = SentenceTransformer(modules=[Transformer(str(model)), Pooling(32), Dense(32, 8)])
    pooled.save_pretrained(str(tmp_path / "pooled"))
    (tmp_path / "pooled" / "LICENSE").write_text("MIT")
    (tmp_path / "output").mkdir()
    tool.copy_companions(tmp_path / "pooled", tmp_path / "output", task)
    assert (tmp_path / "output" / "LICENSE").read_text() == "MIT"
    copied = {str(path.relative_to(tmp_path / "output")) for path in (tmp_path / "output").rglob("*.*")}
    modules = {"modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"}
    assert modules & copied == (modules if task == "feature-extraction" else set())


def test_written_tokenizer_and_graph_give_the_logits_of_transformers(graphs):
    model, output = graphs
    tokenizer = AutoTokenizer.from_pretrained(output, trust_remote_code=False)
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = AutoModelForMaskedLM.from_pretrained(model, trust_remote_code=False)(**inputs).logits
    graph = onnxruntime.InferenceSession(output / "onnx" / "model.onnx", providers=["CPUExecutionProvider"])
    (logits,) = graph.run(["logits"], {name: tensor.numpy() for name, tensor in inputs.items()})
    present = inputs["attention_mask"].bool()
    assert list(inputs) == ["input_ids", "attention_mask"]
    # Logits reach 3, the difference measured is 1.3e-6.
    torch.testing.assert_close(torch.tensor(logits)[present], expected[present], atol=1e-5, rtol=0)


@pytest.mark.slow  # the tests above do the same with the default layout
@pytest.mark.parametrize(
    ("layout", "task", "width"), [("neobert", "fill-mask", len(WORDS)), ("eurobert", "feature-extraction", 32)]
)
def test_graph_of_each_layout_computes_the_model_for_any_batch_and_length(copy_of, tmp_path, layout, task, width):
    model = tool.load_for_task(copy_of(layout), task)
    tool.write_graphs(model, tmp_path / "onnx", int8=False)
    graph = onnx.load(tmp_path / "onnx" / "model.onnx").graph
    shapes = {
        value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    sizes, output = shapes["input_ids"], "logits" if task == "fill-mask" else "last_hidden_state"
    assert len({*sizes, "a number"}) == 3 and all(isinstance(size, str) for size in sizes), "two variable sizes"
    assert shapes == {"input_ids": sizes, "attention_mask": sizes, output: [*sizes, width]}
    assert not [node for node in graph.node if node.op_type == "IsNaN"], "no check of rows that masks cannot cause"


def test_graph_of_other_weights_is_refused_even_with_the_tolerance_of_8_bits(graphs):
    model, output = graphs
    changed = tool.load_for_task(model, "fill-mask")
    generator = torch.Generator().manual_seed(1)
    for parameter in changed.parameters():
        parameter.data.normal_(std=0.2, generator=generator)
    with pytest.raises(ConversionError, match=r"with 1 x 1 tokens .* more than 0\.5; nothing was written"):
        tool.check_graph(changed, output / "onnx" / "model.onnx", tolerance=tool.TOLERANCE_INT8)


def test_graph_that_treats_padding_differently_is_refused(graphs):
    model, output = graphs
    masked = tool.load_for_task(model, "fill-mask")

    def unmasked(input_ids, attention_mask):
        return masked(input_ids, torch.ones_like(attention_mask))

    unmasked.config = masked.config
    with pytest.raises(ConversionError, match="with 2 x 64 tokens"):  # the first inputs have no padding
        tool.check_graph(unmasked, output / "onnx" / "model.onnx", tolerance=tool.TOLERANCE)


def test_weights_above_the_limit_of_a_graph_are_in_a_file_beside_it(model, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "LARGEST_GRAPH_BYTES", 0)
    options = OnnxOptions(model=model, output=tmp_path / "graphs", int8=True)
    export_onnx(options)  # runs both graphs
    graphs = ["model.onnx", "model.onnx.data", "model_quantized.onnx", "model_quantized.onnx.data"]
    assert sorted(path.name for path in (tmp_path / "graphs" / "onnx").iterdir()) == graphs


def write_fine_tuned(output: Path, model: Path) -> None:
    shutil.copytree(model, output, ignore=shutil.ignore_patterns("*.py"))
    restore_files(output, model)


def write_beside_graph(output: Path, model: Path) -> None:
    output.mkdir()
    tool.copy_companions(model, output, "fill-mask")


@pytest.mark.parametrize("module", ["modeling_neobert", "model", "owner/name--model"])
@pytest.mark.parametrize("write", [write_fine_tuned, write_beside_graph])
def test_code_of_a_written_folder_is_ours_and_chat_templates_are_left_out(copy_of, tmp_path, write, module):
    model, output = copy_of("neobert"), tmp_path / "output"
    names = ("config.json", "tokenizer_config.json")
    config, tokenizer = (read_json(model / name) for name in names)
    ours = (model / "modeling_neobert.py").read_text()
    for name in ("modeling_neobert.py", "model.py", "chat_template.jinja"):
        (model / name).write_text("raise SystemExit('ran')")
    theirs = {"AutoConfig": f"{module}.NeoBERTConfig", "AutoModel": "modeling_neobert.NeoBERT"}
    edit_json(model / "config.json", auto_map=theirs)
    edit_json(model / "tokenizer_config.json", chat_template="{% x")
    write(output, model)
    assert {path.name: path.read_text() for path in output.glob("*.py")} == {"modeling_neobert.py": ours}
    assert [read_json(output / name) for name in names] == [config, tokenizer]
    assert not (output / "chat_template.jinja").exists()


def test_link_out_of_the_model_folder_is_refused_except_into_the_cache_of_hugging_face(tmp_path):
    repository, output = tmp_path / "models--owner--name", tmp_path / "output"
    model, blobs = repository / "snapshots" / "0123abc", repository / "blobs"
    for folder in (model, blobs, output):
        folder.mkdir(parents=True)
    for file in (tmp_path / "file", blobs / "file"):
        file.write_text(str(file))
    link = model / "vocab.txt"
    link.symlink_to(tmp_path / "file")
    with pytest.raises(ConversionError, match=r"vocab\.txt is a link to .*/file, and files outside"):
        copy_files(model, output, ["vocab.txt"])
    assert not (output / "vocab.txt").exists()
    link.unlink()
    link.symlink_to(blobs / "file")
    copy_files(model, output, ["vocab.txt"])
    assert (output / "vocab.txt").read_text() == str(blobs / "file")


def test_failed_export_leaves_no_files(model, tmp_path):
    (model / "tokenizer.json").unlink()
    with pytest.raises(MissingInputError, match=r"has no tokenizer\.json"):
        export_onnx(OnnxOptions(model=model, output=tmp_path / "graphs"))
    assert list(tmp_path.iterdir()) == [model]
