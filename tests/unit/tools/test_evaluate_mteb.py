"""The two commands as a user starts them: fetching with a folder in place of the Hub, evaluating without a network.

Importing mteb takes seconds, so most runs of evaluate_mteb share this process.
"""

import json
import sys

import pytest
from commands import ENVIRONMENT, import_tool, run

pytest.importorskip("mteb")

from unit.evaluation.mteb_places import make_encoder, write_hub, write_pairs

from megatron_neobert.errors import NeoBERTError


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """model/, a hub/ with BIOSSES and NFCorpus, and data/ with files of a local task."""
    folder = tmp_path_factory.mktemp("mteb")
    make_encoder(folder / "model")
    write_pairs(folder / "data" / "sts")
    write_hub(folder / "hub")
    return folder


@pytest.fixture
def evaluate(place, monkeypatch, capsys):
    """Runs the command in this process and gives its output."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TQDM_DISABLE"):
        monkeypatch.setenv(name, "1")  # as the command does itself; here it is taken back
    monkeypatch.chdir(place)

    def start(*arguments):
        flags = ["--model", "model", "--output", "out", "--data-dir", "data", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", ["evaluate_mteb.py", *flags])
        import_tool("evaluate_mteb").main()
        return capsys.readouterr().out

    return start


def fetch(place, *tasks):
    environment = {**ENVIRONMENT, "HF_HOME": str(place / "cache"), "HF_HUB_OFFLINE": "1"}
    return run("fetch_mteb", "--output", place / "data", "--tasks", *tasks, cwd=place / "hub", env=environment)


def test_fetched_tasks_are_evaluated_elsewhere_beside_local_ones(place, evaluate):
    code, output, errors = fetch(place, "SICK-R", "BIOSSES", "NFCorpus")
    assert code == 66
    assert output.splitlines()[1:] == ["2/3 BIOSSES: fetched", "3/3 NFCorpus: fetched"]
    assert output.startswith("1/3 SICK-R: failed (")
    assert "1 tasks could not be fetched (SICK-R)" in errors
    code, output, errors = fetch(place, "BIOSSES", "NFCorpus")
    assert (code, output.count("there already")) == (0, 2), errors
    assert "2 tasks can be read without a network" in output

    tasks = ("--tasks", "NFCorpus", "BIOSSES", "local:sts")
    output = evaluate(*tasks)
    folder = place / "out" / "model" / "mteb_BIOSSES+NFCorpus+local-sts"
    record = json.loads((folder / "mteb.json").read_text())
    assert list(record["results"]["tasks"]) == list(tasks[1:])
    assert record["results"]["missing"] == []
    assert record["results"]["categories"]["STS"]["expected"] == 2
    assert (folder / "mteb.md").read_text() in output
    table = (folder / "mteb.md").read_text()
    again = evaluate(*tasks)
    assert again.count("(kept)") == 3
    assert (folder / "mteb.md").read_text() == table


def test_tasks_without_data_end_the_command_or_leave_the_table_without_a_mean(evaluate):
    with pytest.raises(NeoBERTError, match=r"no data of 1 tasks \(SICK-R\); run python tools/fetch_mteb.py"):
        evaluate("--tasks", "local:sts", "SICK-R")
    output = evaluate("--tasks", "local:sts", "SICK-R", "--skip-missing")
    assert "| model | missing | missing | missing | missing | missing | – (1 of 2) | missing | – (1 of 2) |" in output
    assert "without a score: SICK-R (no data)." in output


def test_tables_of_other_tasks_and_other_settings_stand_beside_each_other(place, tmp_path, evaluate):
    for name in "ab":
        write_pairs(tmp_path / "data" / name)
    (tmp_path / "file.yaml").write_text("types: {STS: wing}")
    instructed = ("--instructions", tmp_path / "file.yaml")
    others = [("--pooling", "cls"), ("--max-length", 8, "--batch-size", 4), ("--limit", 4), ("--dtype", "bfloat16")]
    others += [("--attention", "eager"), instructed, (*instructed, "--prompt-style", "paper")]
    choices = [("local:a",), ("local:b",), *(("local:a", *other) for other in others)]
    where = ("--output", tmp_path / "out", "--data-dir", tmp_path / "data", "--device", "cpu")
    records = tmp_path / "out" / "model"
    for number, choice in enumerate([*choices, *choices[:2]]):
        evaluate(*where, "--tasks", *choice)
        assert len(list(records.rglob("mteb.json"))) == min(number + 1, len(choices))
    found = {path.parent.name: json.loads(path.read_text()) for path in records.rglob("mteb.json")}
    assert found["mteb_local-b"]["settings"]["tasks"] == ["local:b"]
    assert found["mteb_local-a_cls"]["settings"]["pooling"] == "cls"
    assert "mteb_local-a_length8_batch4" in found
    style = {name: record["settings"]["prompt_style"] for name, record in found.items() if "instructions" in name}
    assert [(name.endswith("_paper"), style[name]) for name in sorted(style)] == [(False, "prefix"), (True, "paper")]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--model", "nowhere"), 66, "--model nowhere: no such folder"),
        (("--tasks", "STS99"), 2, "no such task; did you mean"),
        (("--tasks", "local:nothing"), 66, "data/nothing is no folder"),
        (("--instructions", "nothing.yaml"), 66, "--instructions nothing.yaml: no such file"),
        (("--device", "cuda:99"), 2, "--device cuda:99: torch sees . GPUs here"),
        (("--batch-size", "0"), 2, "argument --batch-size: 0 is not a whole number"),
    ],
)
def test_command_that_cannot_work_says_why(arguments, code, said, evaluate):
    with pytest.raises(NeoBERTError, match=said) as caught:
        evaluate(*arguments)
    assert caught.value.exit_code == code
