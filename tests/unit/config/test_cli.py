"""Flags, YAML files and saved records give the same settings, and all their problems are reported together."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from unit.config.command_line import REQUIRED, parse, problems_of

from megatron_neobert.cli import flag_of
from megatron_neobert.config.cli import FIRST, model_flags, parse_command_line, read_record, run_flags, write_record
from megatron_neobert.config.schema import ModelConfig
from megatron_neobert.errors import CheckpointError, ConfigError
from megatron_neobert.megatron_flags import REPLACEMENTS


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_flag_beats_the_file_and_the_file_beats_the_default(tmp_path):
    config = write(tmp_path, "model:\n  num_layers: 4\n  hidden_size: 96\n")
    settings = parse("--config", config, "--num-layers", "6")
    assert (settings.model.num_layers, settings.model.hidden_size, settings.model.rotary_base) == (6, 96, 10_000)


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001", "'1e-4'"])
def test_yaml_number_is_read_in_every_notation(tmp_path, text):
    config = write(tmp_path, f"optimizer:\n  lr: {text}\n  min_lr: 0\n")
    assert parse("--config", config).optimizer.lr == 1e-4


def test_whole_number_can_be_a_power_of_ten_but_not_a_fraction():
    assert parse("--train-iters", "1e4").training.train_iters == 10_000
    with pytest.raises(ConfigError, match=r"--train-iters '1\.5' is not a whole number"):
        parse("--train-iters", "1.5")


def test_flag_switches_a_boolean_of_the_file_on_and_off(tmp_path):
    config = write(tmp_path, "training:\n  bf16: true\nmodel:\n  swiglu: true\n")
    settings = parse("--config", config, "--no-bf16", "--no-swiglu")
    assert (settings.training.bf16, settings.model.swiglu) == (False, False)
    assert parse("--bf16").training.bf16 is True


def test_all_problems_of_file_and_flags_are_reported_with_suggestions(tmp_path):
    config = write(tmp_path, "model:\n  hidden_sise: 768\n  lr: 0.1\noptimizer:\n  lr: fast\n")
    assert problems_of("--config", config, "--train-iters", "many", "--bff16") == [
        "unknown flag --bff16; did you mean '--bf16'?",
        f"{config}: unknown setting model.hidden_sise; did you mean 'hidden_size'?",
        f"{config}: unknown setting model.lr; it belongs to section 'optimizer'.",
        f"{config}: optimizer.lr 'fast' is not a number.",
        "--train-iters 'many' is not a whole number.",
    ]


def test_flags_of_megatron_are_reported_once_each_with_what_replaces_them():
    assert problems_of("stray", "--rampup-batch-size", "1", "2", "3", "--no-bias-swiglu-fusion") == [
        f"unknown flag {flag}, which is Megatron-LM's; here: {REPLACEMENTS[flag]}."
        for flag in ("--rampup-batch-size", "--no-bias-swiglu-fusion")
    ] + ["'stray' is not the value of any flag; check the spelling before it, and quote a value that has a space."]


def test_invalid_yaml_is_reported_by_line_and_column_without_an_excerpt(tmp_path):
    config = write(tmp_path, "model:\n  num_layers: 2\n   hidden_size: 64\n")
    sentence = "run.yaml: not readable as YAML: line 3, column 15: mapping values are not allowed here;"
    with pytest.raises(ConfigError, match=sentence) as refused:
        parse("--config", config)
    assert "<unicode string>" not in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--data-path", "run a"], "run a"),
        (["--data-path", "0.2", "A", "0.8", "B:min=1024"], "[0.2, A, '0.8', 'B:min=1024']"),
        (["--data-path", "1", "A"], "[1, A]"),
    ],
)
def test_data_path_can_be_one_text_or_a_list_in_flags_and_in_yaml(tmp_path, flags, text):
    config = write(tmp_path, f"data:\n  data_path: {text}\n")
    from_file = parse_command_line(["--config", config, *REQUIRED[2:]], world_size=1).settings
    from_flags = parse_command_line([*flags, *REQUIRED[2:]], world_size=1).settings
    assert from_file.data.data_path == from_flags.data.data_path == tuple(flags[1:])
    write_record(from_flags, tmp_path / "settings.yaml")
    assert read_record(tmp_path / "settings.yaml") == from_flags


def test_record_with_an_unknown_setting_is_refused(tmp_path):
    path = Path(write(tmp_path, "optimizer:\n  muon_momentum: 0.9\n"))
    with pytest.raises(CheckpointError, match=r"unknown setting optimizer.muon_momentum.*the version that wrote it"):
        read_record(path)


def test_help_shows_twenty_settings_and_help_all_shows_every_setting(capsys):
    shown = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as end:
            parse_command_line([flag], world_size=1)
        shown[flag] = set(re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, flags=re.MULTILINE))
        assert end.value.code == 0
    common = {"--help-all", "--config", "--dry-run", "--gpus", "--price", "--network-gbps"}
    assert shown["--help"] == {flag_of(name) for name in FIRST} | common and len(FIRST) == 20
    assert shown["--help-all"] == {flag for flag in run_flags() if not flag.startswith("--no-")} - {"-h", "--help"}


def test_the_plan_is_for_the_first_number_of_gpus_whatever_the_environment_starts():
    flags = [*REQUIRED, "--dry-run", "--gpus", "8,64", "--global-batch-size", "64", "--micro-batch-size", "8"]
    command = parse_command_line([*flags, "--tensor-model-parallel-size", "2"], world_size=1)
    assert (command.world_size, command.plan.gpus, command.plan.network_gbps) == (8, (8, 64), 400)
    assert parse_command_line([*REQUIRED, "--dry-run"], world_size=4).world_size == 4


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--dry-run", "--gpus", "8,x"], "--gpus '8,x' is not a list of numbers"),
        (["--dry-run", "--gpus", "0"], "--gpus '0' is not a list of numbers"),
        (["--dry-run", "--price", "-1"], "--price -1.0 is below 0.0"),
        (["--gpus", "8", "--price", "2"], "--gpus, --price only changes the plan; add --dry-run"),
    ],
)
def test_flags_of_the_plan_are_checked_and_need_dry_run(flags, problem):
    assert problem in problems_of(*flags)[0]


def test_dry_run_does_not_import_torch(tiny_corpus):
    flags = ["--data-path", tiny_corpus.prefix, "--tokenizer-model", tiny_corpus.tokenizer]
    code = (
        "import sys\n"
        f"sys.argv = ['launch', 'script', '--dry-run', '--gpus', '8,64', '--bf16', *{flags!r}]\n"
        "from megatron_neobert.launch import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "parameters" in finished.stdout


def test_model_flags_rebuild_the_model_and_omit_defaults():
    model = ModelConfig(num_layers=4, ffn_hidden_size=2048, norm_epsilon=1e-6)
    assert model_flags(model) == "--num-layers 4 --norm-epsilon 1e-06", "2,048 is the default width at 768"
    flags = model_flags(ModelConfig(hidden_size=64, num_attention_heads=4, ffn_hidden_size=96)).split()
    parsed = parse(*flags).model
    assert (parsed.hidden_size, parsed.num_attention_heads, parsed.ffn_width) == (64, 4, 96)
