"""`neobert fetch mteb` with a folder instead of the Hub, and `neobert evaluate mteb` without a network.

Importing mteb takes seconds, so the commands run in this process.
"""

import json
import shutil
from pathlib import Path

import pytest
from commands import call
from json_files import edit_json, read_json, write_jsonl
from unit.evaluation.mteb_inputs import make_encoder, replace_hub, write_hub


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Return a folder with model/ and data/ (BIOSSES and NFCorpus), and what the download printed."""
    folder = tmp_path_factory.mktemp("mteb")
    make_encoder(folder / "model")
    with pytest.MonkeyPatch.context() as monkeypatch:
        replace_hub(monkeypatch, write_hub(folder / "hub"))
        fetched = call("fetch mteb", "--output", folder / "data", "--tasks", "SICK-R", "BIOSSES", "NFCorpus")
    return folder, fetched


@pytest.fixture
def evaluate(inputs, monkeypatch):
    """Return a function that runs the command on model/ and data/; later flags replace these."""
    monkeypatch.chdir(inputs[0])

    def start(*arguments):
        return call("evaluate mteb", "--model", "model", "--output", "out", "--data-dir", "data", *arguments)

    return start


def test_fetched_tasks_are_evaluated(inputs, evaluate):
    folder, (code, output, errors) = inputs
    assert code == 66
    assert output.splitlines()[1:] == ["2/3 BIOSSES: fetched", "3/3 NFCorpus: fetched"]
    assert output.startswith("1/3 SICK-R: failed (")
    assert "1 of 3 could not be fetched (SICK-R)" in errors
    code, output, errors = call("fetch mteb", "--output", folder / "data", "--tasks", "BIOSSES", "NFCorpus")
    assert (code, output.count("already fetched")) == (0, 2), errors

    tasks = ("--tasks", "NFCorpus", "BIOSSES")
    _, output, _ = evaluate(*tasks)
    results_folder = folder / "out" / "model"
    results = read_json(results_folder / "mteb.json")["results"]
    assert list(results["tasks"]) == list(tasks[1:])
    scores = [results["tasks"][task]["score"] for task in tasks[1:]]
    table = (results_folder / "mteb.md").read_text()
    assert table in output and f" | {sum(scores) / 2:.1f} |\n" in table
    assert evaluate(*tasks)[1].count("(kept)") == 2
    assert (results_folder / "mteb.md").read_text() == table


def test_task_without_data_is_refused_or_with_skip_missing_leaves_out_the_mean(evaluate, tmp_path):
    code, _, errors = evaluate("--tasks", "BIOSSES", "SICK-R", "--output", tmp_path)
    assert code == 66 and "no data of 1 tasks (SICK-R) in the revisions of mteb" in errors
    assert list(tmp_path.iterdir()) == []
    _, output, _ = evaluate("--tasks", "BIOSSES", "SICK-R", "--skip-missing")
    assert "| model | – | – | – | – | – | – | – | – |" in output
    assert "| model | SICK-R | STS | cosine_spearman | no data |" in output


def test_score_is_kept_until_settings_the_model_or_files_of_the_data_change(inputs, tmp_path, evaluate, monkeypatch):
    for name in ("model", "data"):
        shutil.copytree(inputs[0] / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    Path("file.yaml").write_text("types: {STS: wing}")

    def measure(*options):
        code, output, errors = evaluate("--device", "cpu", "--tasks", "BIOSSES", *options)
        assert code in (None, 0), errors
        return "(kept)" in output, read_json(Path("out/model/mteb.json"))["results"]["tasks"]["BIOSSES"]["score"]

    choices = [(), ("--max-length", "8"), ("--instructions", "file.yaml"), ("--batch-size", "3")]
    scores = {choice: measure(*choice) for choice in choices}
    assert not any(is_kept for is_kept, _ in scores.values())
    assert all(measure(*choice) == (True, score) for choice, (_, score) in scores.items())
    (path,) = Path("data/BIOSSES").rglob("test.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    write_jsonl(path, [row | {"score": 4.0 - row["score"]} for row in rows])
    assert measure() == (False, pytest.approx(-scores[()][1])), "the same revision with reversed judgements"
    edit_json(Path("model/config.json"), layer_norm_eps=0.1)
    assert not measure()[0], "another model"


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (("--instructions", "nothing.yaml"), 66, "--instructions nothing.yaml: no such file"),
        (("--prompt-style", "paper"), 2, "--prompt-style has no effect without --instructions"),
        (("--languages", "deu"), 2, "--languages deu has no effect without --tasks"),
        (("--device", "cuda:99"), 2, "--device cuda:99: torch sees "),
    ],
)
def test_unknown_files_and_devices_and_options_without_effect_are_refused(arguments, code, reason, evaluate):
    ended, _, errors = evaluate(*arguments)
    assert ended == code and reason in errors
