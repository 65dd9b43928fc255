"""Damaged, forged and wrong files and command lines are refused with the reason and the exit code."""

import json
import os
import shutil
from pathlib import Path

import good_inputs as good
import pytest
from commands import ENVIRONMENT, run
from hostile import Canary
from hostile_contents import CONTENTS, edit
from processes import run_command
from readers import KINDS, check_corpus, load_and_use
from refusals import assert_refused, start_checks
from transformers import AutoModelForMaskedLM
from unit.data.small_corpus import write_vocabulary

from megatron_neobert.config.cli import parse_command_line
from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer


@pytest.mark.parametrize("kind", KINDS)
def test_valid_input_is_read(tmp_path, kind):
    KINDS[kind].write(tmp_path)
    KINDS[kind].read(tmp_path)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        pytest.param(kind, change, words, id=f"{kind}: {words[:40]}")
        for kind, changes in CONTENTS.items()
        for change, words in changes
    ],
)
def test_hostile_content_is_refused_with_its_reason_and_the_exit_code_of_its_kind(tmp_path, kind, change, words):
    KINDS[kind].write(tmp_path)
    change(tmp_path)
    assert_refused(lambda: KINDS[kind].read(tmp_path), KINDS[kind].exit_code, words)


COMMAND_LINES = [
    (["--bf16=false"], 2, "ignored explicit argument 'false'"),
    (["--train-iters", "1e19"], 2, "is beyond 9223372036854775807"),
    (["--hidden-size", "1000000000001"], 2, "--hidden-size 1000000000001 is not a multiple"),
    (["--save", os.fsdecode(b"caf\xe9")], 2, "--save 'caf\\udce9' is not a text in UTF-8"),
    (["--unknown-" + "x" * 9999], 2, "unknown flag --unknown-xxx"),
    (["--"], 2, "'--' is not the value of any flag"),
    (["--data-path", "a:min=٣"], 2, "':min=٣' is not a limit"),
    (["--data-path", "1", "a", "1", "a"], 2, "names a 2 times; name it once"),
    (["--data-path", *["1", "a"] * 1025], 2, "names 1,025 corpora, more than 1,024"),
    (["--data-path", "{corpus}"], 66, "no corpus"),
    (["--data-path", "{corpus}/small.bin"], 66, "/corpus/small?"),
    (["--data-path", "{corpus}/small.bin/deeper"], 66, "no corpus"),
    (["--data-path", "{corpus}/" + "x" * 300], 74, "File name too long"),
    *(([f"--split={split}"], 2, f"--split {split} is not one to three") for split in ("nan", "inf", "-1,2", "0,0")),
    (["--split=1,1e9"], 2, "leaves part 1"),
    (["--split=0,1"], 65, "leaves none of the 4 documents"),
    (["--config", "{corpus}"], 66, "is a folder"),
    (["--config", ""], 66, "is a folder"),
    (["--config", "{corpus}/none.yaml"], 66, "no such file"),
    (["--save", "{corpus}/small.bin/run"], 73, "small.bin/run cannot be created"),
    (["--save", "{corpus}/small.bin"], 73, "cannot be created"),
    (["--save", "{corpus}/" + "x" * 300], 74, "File name too long"),
    *((["--load", f"{{corpus}}/{where}"], 66, "--load") for where in ("small.bin", "nowhere", ".")),
]  # fmt: skip


def flags_of(corpus: Path) -> list[str]:
    return ["--data-path", f"{corpus}/small", "--tokenizer-model", f"{corpus}/tokenizer", "--split", "100"]


@pytest.mark.parametrize(("words", "exit_code", "sentence"), COMMAND_LINES)
def test_wrong_command_line_is_refused_before_the_run_starts(corpus, words, exit_code, sentence):
    arguments = [word.replace("{corpus}", str(corpus)) for word in words]
    assert_refused(lambda: start_checks(*flags_of(corpus), *arguments), exit_code, sentence)


@pytest.mark.parametrize("text", ["", "model:\n", "\ufeffmodel: {}\n", "---\n...\n", "null\n"])
def test_yaml_without_settings_keeps_the_defaults(tmp_path, text):
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    required = ["--data-path", "corpus", "--tokenizer-model", "tokenizer"]
    command = parse_command_line([*required, "--config", str(tmp_path / "run.yaml")], world_size=1)
    assert command.settings == parse_command_line(required, world_size=1).settings


@pytest.mark.parametrize("config", [{"auto_map": 5}, {"auto_map": {}}, {"strip_accents": None}])
def test_tokenizer_config_without_effect_does_not_change_the_tokenizer(tmp_path, config):
    path = write_vocabulary(tmp_path / "vocab.txt", ["a"])
    expected = load_and_use(path)
    good.write_json(tmp_path / "tokenizer_config.json", {"do_lower_case": True, **config})
    assert load_and_use(path) == expected


def test_post_processor_without_the_text_does_not_drop_the_text(corpus):
    path = corpus / "tokenizer" / "tokenizer.json"
    expected = load_tokenizer(path).encode_batch(["w5 w6"]).ids.tolist()
    state = json.loads(path.read_text())
    for kind in ("single", "pair"):
        template = state["post_processor"][kind]
        state["post_processor"][kind] = [entry for entry in template if "SpecialToken" in entry]
    path.write_text(json.dumps(state))
    assert load_tokenizer(path).encode_batch(["w5 w6"]).ids.tolist() == expected != []


def test_corpus_is_read_from_folders_with_unusual_names_even_if_they_are_not_utf_8(corpus, tmp_path):
    check_corpus(corpus)
    folder = tmp_path / "mit Leerzeichen, 日本語 ' \" $HOME ünïcode"
    shutil.copytree(corpus, folder)
    start_checks(*flags_of(corpus), "--data-path", f"{folder}/../{folder.name}/small", "--save", str(folder / "runs"))
    not_utf8 = tmp_path / os.fsdecode(b"caf\xe9")
    shutil.copytree(corpus, not_utf8)
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": "utf-8:strict"}
    code, output, errors = run("validate", not_utf8 / "small", env=environment)
    assert (code, errors) == (0, "") and "caf\\udce9/small is sound" in output


@pytest.mark.usefixtures("only_remote_code")
def test_code_in_a_neobert_folder_is_not_run(tmp_path: Path, canary: Canary):
    folder = good.write_neobert(tmp_path / "model")
    (folder / "own_code.py").write_text(
        f"{canary.source}from megatron_neobert.huggingface.modeling_neobert import NeoBERTConfig, NeoBERTForMaskedLM\n"
    )
    classes = {"AutoConfig": "own_code.NeoBERTConfig", "AutoModelForMaskedLM": "own_code.NeoBERTForMaskedLM"}
    edit("config.json", auto_map=classes, trust_remote_code=True)(folder)
    words = ("convert", "hf-to-megatron", "--load", folder, "--output", folder.parent / "imported")
    ended = run_command("megatron_neobert.__main__", *words)  # another process: it registers our class
    assert ended.code == 0, ended.output
    assert not canary.has_run
    # Control: transformers runs the code if it is told to trust the folder.
    AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
    assert canary.has_run
