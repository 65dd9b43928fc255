"""The matrix of what users can do with an exported folder: the checks on the transformers that is installed.

Other versions need their environments and are for the command. A check that cannot fail would say nothing, so the
checks also meet folders that are wrong on purpose.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers import EuroBertConfig, EuroBertForMaskedLM, LlamaConfig, LlamaModel
from unit.tools.commands import REPOSITORY, import_tool, run

from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer
from megatron_neobert.huggingface import modeling_neobert

sys.path.append(str(REPOSITORY / "tools"))  # as the command has it
from transformers_checks.run_checks import CHECKS, run_checks
from transformers_checks.subject import CheckFailed, Subject

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(40)), "##s"]
HEADS = {
    "AutoConfig": "NeoBERTConfig",
    "AutoModel": "NeoBERT",
    "AutoModelForMaskedLM": "NeoBERTLMHead",
    "AutoModelForSequenceClassification": "NeoBERTForSequenceClassification",
    "AutoModelForTokenClassification": "NeoBERTForTokenClassification",
    "AutoModelForQuestionAnswering": "NeoBERTForQuestionAnswering",
}
SIZES = {"vocab_size": len(WORDS), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA_LIKE = {
    **SIZES,
    "intermediate_size": 48,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}


@pytest.fixture(scope="module")
def eurobert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = EuroBertConfig(**LLAMA_LIKE, mask_token_id=4, mlp_bias=True, classifier_pooling="bos")
    return _write(tmp_path_factory.mktemp("eurobert"), EuroBertForMaskedLM(config))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(tmp_path_factory.mktemp("llama"), LlamaModel(LlamaConfig(**LLAMA_LIKE, is_causal=False)))


@pytest.fixture(scope="module")
def neobert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = modeling_neobert.NeoBERTConfig(
        **SIZES, dim_head=8, intermediate_size=72, max_position_embeddings=64, pad_token_id=0
    )
    folder = _write(tmp_path_factory.mktemp("neobert"), modeling_neobert.NeoBERTLMHead(config))
    shutil.copy(modeling_neobert.__file__, folder)
    _edit(folder / "config.json", auto_map={auto: f"modeling_neobert.{name}" for auto, name in HEADS.items()})
    return folder


def _write(folder: Path, model: transformers.PreTrainedModel) -> Path:
    """With weights so large that every token matters to every other."""
    torch.manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in WORDS))
    load_tokenizer(folder / "vocab.txt").save_tokenizer_files(folder, model_max_length=64)
    return folder


def _edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _not_ok(checks: dict[str, dict]) -> dict[str, str]:
    return {name: f"{cell['outcome']}: {cell['reason']}" for name, cell in checks.items() if cell["outcome"] != "ok"}


def _make_environment(place: Path, program: str) -> None:
    """What --keep would have left, with this shell program as its Python."""
    python = place / f"transformers-{transformers.__version__}" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)


def test_eurobert_folder_does_all_that_transformers_has_for_it(eurobert: Path):
    checks = run_checks(eurobert, trusted=False)
    reason = f"transformers {transformers.__version__} has no AutoModelForQuestionAnswering for eurobert"
    assert _not_ok(checks) == {
        "AutoModelForQuestionAnswering, loss": f"not applicable: {reason}",
        "pipeline question-answering": f"not applicable: {reason}",
    }
    assert checks.keys() == CHECKS.keys()


@pytest.mark.slow
def test_llama_folder_does_all_but_masked_language_modelling(llama: Path):
    checks = run_checks(llama, trusted=False)
    assert {name: reason.split(":")[0] for name, reason in _not_ok(checks).items()} == dict.fromkeys(
        (
            "AutoModelForMaskedLM, loss",
            "pipeline fill-mask",
            "pipeline question-answering",  # gone from transformers 5
            "Trainer, masked language model",
        ),
        "not applicable",
    )


@pytest.mark.slow
def test_neobert_folder_passes_the_command(neobert: Path, tmp_path: Path):
    """In an environment that is there already: the one that runs this test."""
    _make_environment(tmp_path, f'exec "{sys.executable}" "$@"')
    version, report = transformers.__version__, tmp_path / "report.json"
    code, printed, errors = run(
        "check_transformers", neobert, "--trust-remote-code", "--transformers", version, "--keep", tmp_path,
        "--output", report,
    )  # fmt: skip
    assert (code, errors.count("\n")) == (0, 1), errors  # one line of progress, no installation
    column = json.loads(report.read_text())[0]
    assert _not_ok(column["checks"]) == {
        "pipeline question-answering": f"not applicable: transformers {version} has no pipeline question-answering"
    }
    assert column["versions"]["torch"] == torch.__version__
    header, _, *rows = printed.splitlines()[: 2 + len(CHECKS)]
    cells = {row.split("|")[1].strip(): row.split("|")[2].strip() for row in rows}
    assert header.split("|")[2].strip() == f"{neobert.name}, {version}"
    assert cells == dict.fromkeys(CHECKS, "ok") | {"pipeline question-answering": "-"}


def lose_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def have_token_types(folder: Path) -> None:
    _edit(folder / "tokenizer_config.json", model_input_names=["input_ids", "token_type_ids", "attention_mask"])


def edit(name: str, **fields: object) -> Callable[[Path], None]:
    return lambda folder: _edit(folder / name, **fields)


SPOILT: list[tuple[str, Callable[[Path], None], str, str]] = [
    ("llama", edit("config.json", is_causal=True), "attention to both sides", "does not see those to its right"),
    ("eurobert", lose_a_weight, "AutoModel", "weights that the folder lacks: .*up_proj"),
    ("eurobert", lose_a_weight, "AutoModelForMaskedLM, loss", "missing_keys.*up_proj"),
    ("eurobert", lose_a_weight, "AutoModelForTokenClassification, loss", "other weights: .*up_proj"),
    ("eurobert", edit("config.json", vocab_size=48), "tokenizer", "46 tokens, 48 rows"),
    ("eurobert", edit("config.json", pad_token_id=3), "tokenizer", "pad_token_id is not config.json's"),
    ("eurobert", have_token_types, "tokenizer", "a batch has .*token_type_ids"),
    ("eurobert", edit("tokenizer_config.json", padding_side="left"), "tokenizer", "mask of a padded text"),
    ("eurobert", edit("tokenizer_config.json", truncation_side="left"), "tokenizer", "not cut at its end"),
]


@pytest.mark.parametrize(("layout", "spoil", "check", "reason"), SPOILT)
def test_folder_that_is_wrong_fails_its_check(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    layout: str,
    spoil: Callable[[Path], None],
    check: str,
    reason: str,
):
    folder = shutil.copytree(request.getfixturevalue(layout), tmp_path / layout)
    spoil(folder)
    with pytest.raises(CheckFailed, match=reason):
        CHECKS[check](Subject(folder, trusted=False))


@pytest.mark.slow
def test_code_in_a_folder_runs_only_with_permission(neobert: Path, tmp_path: Path):
    folder, ran = shutil.copytree(neobert, tmp_path / "neobert"), tmp_path / "ran"
    (folder / "modeling_neobert.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    _make_environment(tmp_path, f'exec "{sys.executable}" "$@"')
    code, _, errors = run("check_transformers", folder, "--keep", tmp_path)
    assert (code, ran.exists()) == (2, False)
    assert errors == (
        f"error: {folder} brings its own code (auto_map in its config.json), which runs only with "
        "--trust-remote-code.\n"
    )


def test_process_that_breaks_down_is_a_failure_with_its_last_words(eurobert: Path, tmp_path: Path):
    version = transformers.__version__
    _make_environment(tmp_path, f'[ "$1" = -c ] && echo {version} && exit; echo "no memory left" >&2; exit 3')
    code, printed, _ = run("check_transformers", eurobert, "--transformers", version, "--keep", tmp_path)
    assert code == 1
    assert f"{eurobert.name}, {version}: FAILED: exit code 3: no memory left (all)" in printed


def test_folder_without_a_model_is_refused_before_anything_is_installed(tmp_path: Path):
    code, _, errors = run("check_transformers", tmp_path, "--keep", tmp_path / "environments")
    assert (code, errors) == (
        66, f"error: {tmp_path} has no config.json; name a folder that convert.py wrote.\n"
    )  # fmt: skip
    (tmp_path / "config.json").write_text("{")
    code, _, errors = run("check_transformers", tmp_path)
    assert (code, "config.json is not JSON" in errors) == (2, True)


def test_version_that_pip_cannot_install_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    tool = import_tool("check_transformers")
    with pytest.raises(
        tool.MissingInputError, match=r"transformers==4\.1\.99 accelerate cannot be installed .*\(pip: "
    ):
        tool.prepare_environment(tmp_path, Version("4.1.99"))


def test_matrix_has_one_line_per_reason():
    tool = import_tool("check_transformers")
    good, bad = {"outcome": "ok"}, {"outcome": "FAILED", "reason": "loss: 0.2 apart"}
    absent = {"outcome": "not applicable", "reason": "no such head"}
    checks = {"a": good, "b": absent, "c": absent, "d": bad}
    columns = [tool.Column("base", "5.0", {}, dict.fromkeys("abcd", good)), tool.Column("large", "4.0", {}, checks)]
    assert tool.to_text(columns).splitlines() == [
        "|   | base, 5.0 | large, 4.0 |",
        "|---|-----------|------------|",
        "| a | ok        | ok         |",
        "| b | ok        | -          |",
        "| c | ok        | -          |",
        "| d | ok        | FAILED     |",
        "",
        "large, 4.0: not applicable: no such head (b; c)",
        "large, 4.0: FAILED: loss: 0.2 apart (d)",
    ]
