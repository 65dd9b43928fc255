"""The commands `neobert evaluate ...`, `fetch mteb` and `report` as a user calls them.

A folder replaces the Hub, and nothing is timed. Importing mteb takes seconds, so commands run in this process.
"""

import json
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from commands import ENVIRONMENT, call, command_line
from json_files import edit_json, read_json, write_jsonl
from unit.evaluation.embedding_inputs import make_encoder, replace_hub, write_hub
from unit.evaluation.glue_inputs import write_inputs
from unit.evaluation.pseudo_perplexity_models import LONGEST, make_texts, write_model

# --- glue


GLUE_SETTINGS = ("--tasks", "rte", "--no-transfer", "--epochs", "1", "--batch-size", "8", "--learning-rate", "3e-3")


@pytest.fixture(scope="module")
def glue(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("glue"))


def arguments_of(glue, output, *more):
    return ("--model", glue / "model", "--data-dir", glue / "glue", "--output", glue / output, *GLUE_SETTINGS, *more)


def results_of(glue, output):
    tasks = read_json(glue / output / "model" / "glue.json")["results"]["tasks"]
    ignored = {"seconds": None, "kept": None}
    return {name: task | ignored for name, task in tasks.items()}


@pytest.mark.slow
def test_command_with_two_workers_that_is_killed_resumes_with_one_and_has_the_same_results(glue):
    seeds = ("--seeds", "0", "1", "2")
    command = command_line("evaluate glue", *arguments_of(glue, "killed", *seeds, "--jobs", "2"))
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        first = next(line for line in process.stderr if line.startswith("rte 1/3 | "))
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        assert psutil.wait_procs(workers, timeout=600)[1] == [], "workers end with their parent"
    _, output, errors = call("evaluate glue", *arguments_of(glue, "killed", *seeds))
    assert "rte 3/3 | " in errors and first.split(" | ")[1] not in errors
    assert "| measured |" in output
    assert call("evaluate glue", *arguments_of(glue, "whole", *seeds))[0] == 0
    assert results_of(glue, "killed") == results_of(glue, "whole")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--device", "cuda:1"), "--device cuda:1 is not one of cpu, cuda"),  # each run sees one GPU
        (("--device", "cpu", "--dtype", "float16"), "--dtype float16 needs a GPU"),
    ],
)
def test_impossible_settings_are_refused_before_anything_is_written(glue, arguments, reason):
    code, _, errors = call("evaluate glue", *arguments_of(glue, "refused", *arguments))
    assert code == 2 and reason in errors
    assert not (glue / "refused").exists()


# --- mteb


@pytest.fixture(scope="module")
def mteb(tmp_path_factory):
    """Return a folder with model/ and data/ (BIOSSES and NFCorpus), and what the download printed."""
    folder = tmp_path_factory.mktemp("mteb")
    make_encoder(folder / "model")
    with pytest.MonkeyPatch.context() as monkeypatch:
        replace_hub(monkeypatch, write_hub(folder / "hub"))
        fetched = call("fetch mteb", "--output", folder / "data", "--tasks", "SICK-R", "BIOSSES", "NFCorpus")
    return folder, fetched


@pytest.fixture
def evaluate_mteb(mteb, monkeypatch):
    """Return a function that runs the command on model/ and data/; later flags replace these."""
    monkeypatch.chdir(mteb[0])

    def start(*arguments):
        return call("evaluate mteb", "--model", "model", "--output", "out", "--data-dir", "data", *arguments)

    return start


def test_fetched_tasks_are_evaluated(mteb, evaluate_mteb):
    folder, (code, output, errors) = mteb
    assert code == 66
    assert output.splitlines()[1:] == ["2/3 BIOSSES: fetched", "3/3 NFCorpus: fetched"]
    assert output.startswith("1/3 SICK-R: failed (")
    assert "1 of 3 could not be fetched (SICK-R)" in errors
    code, output, errors = call("fetch mteb", "--output", folder / "data", "--tasks", "BIOSSES", "NFCorpus")
    assert (code, output.count("already fetched")) == (0, 2), errors

    tasks = ("--tasks", "NFCorpus", "BIOSSES")
    _, output, _ = evaluate_mteb(*tasks)
    results_folder = folder / "out" / "model"
    results = read_json(results_folder / "mteb.json")["results"]
    assert list(results["tasks"]) == list(tasks[1:])
    scores = [results["tasks"][task]["score"] for task in tasks[1:]]
    table = (results_folder / "mteb.md").read_text()
    assert table in output and f" | {sum(scores) / 2:.1f} |\n" in table
    assert evaluate_mteb(*tasks)[1].count("(kept)") == 2
    assert (results_folder / "mteb.md").read_text() == table


def test_task_without_data_is_refused_or_with_skip_missing_leaves_out_the_mean(evaluate_mteb, tmp_path):
    code, _, errors = evaluate_mteb("--tasks", "BIOSSES", "SICK-R", "--output", tmp_path)
    assert code == 66 and "no data of 1 tasks (SICK-R) in the revisions of mteb" in errors
    assert list(tmp_path.iterdir()) == []
    _, output, _ = evaluate_mteb("--tasks", "BIOSSES", "SICK-R", "--skip-missing")
    assert "| model | – | – | – | – | – | – | – | – |" in output
    assert "| model | SICK-R | STS | cosine_spearman | no data |" in output


def test_score_is_kept_until_settings_the_model_or_files_of_the_data_change(mteb, tmp_path, evaluate_mteb, monkeypatch):
    for name in ("model", "data"):
        shutil.copytree(mteb[0] / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    Path("file.yaml").write_text("types: {STS: wing}")

    def measure(*options):
        code, output, errors = evaluate_mteb("--device", "cpu", "--tasks", "BIOSSES", *options)
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
def test_unknown_files_and_devices_and_options_without_effect_are_refused(arguments, code, reason, evaluate_mteb):
    ended, _, errors = evaluate_mteb(*arguments)
    assert ended == code and reason in errors


# --- ppl


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with two models, a folder that has only a config, and texts."""
    folder = tmp_path_factory.mktemp("inputs")
    write_model(folder / "bert", "Bert")
    write_model(folder / "ours", "neobert")
    write_jsonl(folder / "texts.jsonl", [{"text": text} for text in make_texts(20, longest=38)])
    (folder / "no model").mkdir()
    (folder / "no model" / "config.json").write_text("{}")
    return folder


def evaluate_ppl(folder, output, *models, flags=()):
    paths = [folder / name for name in models]
    data = ("--data", folder / "texts.jsonl", "--text-key", "text")
    return call("evaluate ppl", "--model", *paths, *data, "--output", output, "--batch-tokens", 512, *flags)


def test_models_are_measured_one_after_the_other_and_a_second_start_prints_the_same(folder, tmp_path):
    code, output, errors = evaluate_ppl(folder, tmp_path / "out", "bert", "ours")
    assert code == 0, errors
    assert evaluate_ppl(folder, tmp_path / "out", "bert", "ours")[1] == output
    assert [line.split(":")[0] for line in output.splitlines()[:2]] == ["bert", "ours"]
    page = (tmp_path / "out" / "pseudo_perplexity.md").read_text()
    assert "| bert |" in page and "| ours |" in page


@pytest.mark.parametrize(
    ("models", "flags", "code", "problem"),
    [
        (["bert", "bert"], (), 2, "two models would be named bert"),
        (["no model"], (), 66, "no model has no tokenizer"),
        (["bert"], ("--text-key", "body"), 65, "has no document to measure (20 x missing key); check --text-key body"),
    ],
)
def test_models_and_data_that_cannot_be_measured_are_refused(folder, tmp_path, models, flags, code, problem):
    ended, _, errors = evaluate_ppl(folder, tmp_path, *models, flags=flags)
    assert ended == code and problem in errors


# --- throughput and report


SIZES = ("--lengths", 16, LONGEST + 8, "--batch-sizes", 1, 2, "--steps", 2, "--warmup", 1)


def test_models_are_measured_at_every_length_they_support_and_shown_in_the_report(folder, tmp_path):
    output = tmp_path / "results"
    models = (folder / "bert", folder / "ours")
    _, printed, _ = call("evaluate throughput", "--model", *models, "--output", output, *SIZES)
    assert f"not measured: bert, {LONGEST + 8} tokens; at most {LONGEST} learned positions" in printed
    records = [read_json(output / name / "throughput.json") for name in ("bert", "ours")]
    rows = [row for record in records for row in record["results"]["rows"]]
    lengths = {(row["model"], row["length"]) for row in rows}
    assert lengths == {("bert", 16), ("ours", 16), ("ours", LONGEST + 8)}
    assert (output / "throughput.png").read_bytes()[:4] == b"\x89PNG"
    call("report", "--results", output, "--output", tmp_path / "report")
    fastest = max(row["measured"]["tokens_per_second"][1] for row in rows if row["model"] == "bert")
    assert f"| {fastest:,.0f} (" in (tmp_path / "report" / "report.md").read_text()


def test_model_that_supports_none_of_the_lengths_is_refused_before_anything_is_written(folder, tmp_path):
    flags = ("--model", folder / "bert", "--output", tmp_path / "results", "--lengths", LONGEST + 1)
    code, _, errors = call("evaluate throughput", *flags)
    assert code == 2 and f"at most {LONGEST} learned positions" in errors
    assert not (tmp_path / "results").exists()
