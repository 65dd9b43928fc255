"""`neobert fetch mteb` with a folder instead of the Hub, and `neobert evaluate mteb` without a network.

Importing mteb takes seconds, so the evaluations run in this process.
"""

import json

import pytest
from commands import ENVIRONMENT, call, run

pytest.importorskip("mteb")

from unit.evaluation.mteb_inputs import make_encoder, write_hub, write_pairs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Return a folder with model/, hub/ (BIOSSES and NFCorpus) and data/ (files of a local task)."""
    folder = tmp_path_factory.mktemp("mteb")
    make_encoder(folder / "model")
    write_pairs(folder / "data" / "sts")
    write_hub(folder / "hub")
    return folder


@pytest.fixture
def evaluate(inputs, monkeypatch):
    """Return a function that runs the command on model/ and data/; later flags replace these."""
    monkeypatch.chdir(inputs)

    def start(*arguments):
        return call("evaluate mteb", "--model", "model", "--output", "out", "--data-dir", "data", *arguments)

    return start


def test_fetched_tasks_are_evaluated_together_with_local_ones(inputs, evaluate):
    environment = {**ENVIRONMENT, "HF_HOME": str(inputs / "cache"), "HF_HUB_OFFLINE": "1"}
    fetch = ("fetch mteb", "--output", inputs / "data", "--tasks")
    code, output, errors = run(*fetch, "SICK-R", "BIOSSES", "NFCorpus", cwd=inputs / "hub", env=environment)
    assert code == 66
    assert output.splitlines()[1:] == ["2/3 BIOSSES: fetched", "3/3 NFCorpus: fetched"]
    assert output.startswith("1/3 SICK-R: failed (")
    assert "1 of 3 could not be fetched (SICK-R)" in errors
    code, output, errors = call(*fetch, "BIOSSES", "NFCorpus")
    assert (code, output.count("already fetched")) == (0, 2), errors

    tasks = ("--tasks", "NFCorpus", "BIOSSES", "local:sts")
    _, output, _ = evaluate(*tasks)
    folder = inputs / "out" / "model"
    (results,) = json.loads((folder / "mteb.json").read_text())["results"]["tables"]
    assert list(results["tasks"]) == list(tasks[1:])
    assert results["missing"] == []
    assert results["categories"]["STS"]["expected"] == 2
    table = (folder / "mteb.md").read_text()
    assert table in output
    assert evaluate(*tasks)[1].count("(kept)") == 3
    assert (folder / "mteb.md").read_text() == table


def test_task_without_data_is_refused_or_with_skip_missing_leaves_out_the_mean(evaluate, tmp_path):
    code, _, errors = evaluate("--tasks", "local:sts", "SICK-R", "--output", tmp_path)
    assert code == 66 and "no data of 1 tasks (SICK-R); run neobert fetch mteb" in errors
    assert list(tmp_path.iterdir()) == []
    _, output, _ = evaluate("--tasks", "local:sts", "SICK-R", "--skip-missing")
    assert "| model | missing | missing | missing | missing | missing | – (1 of 2) | missing | – (1 of 2) |" in output
    assert "without a score: SICK-R (no data)." in output


def test_results_of_other_tasks_and_settings_are_added_as_further_tables(tmp_path, evaluate):
    (tmp_path / "file.yaml").write_text("types: {STS: wing}")
    choices = [(), ("--max-length", 8), ("--instructions", tmp_path / "file.yaml")]
    for number, choice in enumerate([*choices, choices[0]]):
        evaluate("--output", tmp_path / "out", "--device", "cpu", "--tasks", "local:sts", *choice)
        tables = json.loads((tmp_path / "out" / "model" / "mteb.json").read_text())["results"]["tables"]
        assert len(tables) == min(number + 1, len(choices))
    cached = (tmp_path / "out" / "model" / "mteb").rglob("local:sts.json")
    assert len(list(cached)) == len(choices), "mteb's cache separates the settings too"


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (("--tasks", "STS99"), 2, "no such task; did you mean"),
        (("--tasks", "local:nothing"), 66, "data/nothing is not a folder with"),
        (("--instructions", "nothing.yaml"), 66, "--instructions nothing.yaml: no such file"),
        (("--device", "cuda:99"), 2, "--device cuda:99: torch sees "),
    ],
)
def test_unknown_tasks_files_and_devices_are_refused(arguments, code, reason, evaluate):
    ended, _, errors = evaluate(*arguments)
    assert ended == code and reason in errors
