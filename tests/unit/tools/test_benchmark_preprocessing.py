"""The benchmark of preprocessing: what it counts is on disk, and what did other work is not compared."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import ENVIRONMENT, REPOSITORY, import_tool, run_forked

from megatron_neobert.data.tokenizer.tokenizer import load_tokenizer, train_wordpiece
from megatron_neobert.errors import ConfigError, DataError

TOOL = REPOSITORY / "benchmarks" / "benchmark_preprocessing.py"
# The command with one more tool in its table, {definition}; a process of its own, since it waits for all its children.
WITH_OTHER_TOOL = """
import dataclasses, runpy, sys
sys.argv[0] = {path!r}
tool = runpy.run_path({path!r}, run_name="benchmark")
tool["TOOLS"]["other"] = {definition}
tool["run_command"](tool["main"])
"""


class Inputs(NamedTuple):
    shards: list[str]
    texts: list[str]
    vocabulary: Path
    cased: Path  # a tokenizer.json of the same vocabulary that does not lower the case


@pytest.fixture(scope="module")
def tool():
    return import_tool("benchmark_preprocessing")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Inputs:
    """Two shards of 40 documents, 10 kB; among them an empty one and one with the names of special tokens."""
    folder = tmp_path_factory.mktemp("benchmark_inputs")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 7))) for _ in range(200)]
    texts = [" ".join(rng.choices(words, k=rng.randint(3, 50))).capitalize() for _ in range(78)]
    texts += ["", "The [MASK] of [SEP] is [CLS], naïve."]
    for number in range(2):
        pq.write_table(pa.table({"content": texts[40 * number :][:40]}), folder / f"{number}.parquet")
    tokenizer = train_wordpiece(texts, vocab_size=150, lowercase=True, min_frequency=2)
    tokenizer.save_tokenizer_files(folder / "tokenizer", model_max_length=512)
    content = json.loads((folder / "tokenizer" / "tokenizer.json").read_text())
    content["normalizer"]["lowercase"] = False
    (folder / "cased.json").write_text(json.dumps(content))
    return Inputs(
        [str(folder / f"{number}.parquet") for number in range(2)],
        texts,
        folder / "tokenizer" / "vocab.txt",
        folder / "cased.json",
    )


def run(inputs: Inputs, *arguments: str, definition: str | None = None) -> subprocess.CompletedProcess[str]:
    start = [str(TOOL)]
    if definition is not None:
        start = ["-c", WITH_OTHER_TOOL.format(path=str(TOOL), definition=definition)]
    command = [sys.executable, *start, "--input", *inputs.shards, "--tokenizer-model", str(inputs.vocabulary)]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, env=ENVIRONMENT)


def number_of_tokens(inputs: Inputs) -> int:
    return len(load_tokenizer(inputs.vocabulary).encode_batch(inputs.texts).ids)


def make_run(tool, name: str, **changes):
    values = {"wall_seconds": 1.0, "cpu_seconds": 1.0, "peak_bytes": 10**6, "output_bytes": 10**6, "documents": 1}
    return tool.Run(**{"tool": name, "workers": 1, **values, "tokens": 10, "ids_sha256": None, **changes})


def test_report_holds_the_figures_of_tools_that_wrote_the_same_ids(inputs, tmp_path):
    report_file = tmp_path / "report.json"
    result = run(inputs, "--tools", "ours-plain,tokenizers", "--rounds", "1", "--output", str(report_file))
    assert result.returncode == 0, result.stderr
    report = json.loads(report_file.read_text())
    expected = number_of_tokens(inputs)
    assert report["corpus"] == {"documents": 80, "text_bytes": sum(len(text.encode()) for text in inputs.texts)}
    assert report["tokens"] == expected
    assert [(row["tool"], row["workers"]) for row in report["table"]] == [("ours-plain", 1), ("tokenizers", 1)]
    for row, measured in zip(report["table"], report["runs"], strict=True):
        assert row["MB/s"] == pytest.approx(report["corpus"]["text_bytes"] / 1e6 / measured["wall_seconds"])
        assert row["x datatrove"] is None
        assert measured["tokens"] == expected
        assert measured["output_bytes"] >= 2 * expected  # uint16
        assert measured["cpu_seconds"] > 0
        assert measured["peak_bytes"] > 10**7  # an interpreter with two libraries
    assert len({measured["ids_sha256"] for measured in report["runs"]}) == 1
    assert f"all wrote {expected:,} tokens; the same ids: ours-plain, tokenizers" in result.stdout


@pytest.mark.slow
def test_special_tokens_that_peers_add_are_not_counted(inputs, tmp_path):
    for package in ("datatrove", "datasets", "transformers"):
        pytest.importorskip(package)
    report_file = tmp_path / "report.json"
    tools = ("datatrove", "datasets", "tokenizers")
    result = run(inputs, "--tools", ",".join(tools), "--rounds", "1", "--output", str(report_file))
    assert result.returncode == 0, result.stderr
    report = json.loads(report_file.read_text())
    assert report["tokens"] == number_of_tokens(inputs)
    assert {row["tool"]: row["x datasets"] for row in report["table"]}["datasets"] == 1.0
    hashes = {measured["tool"]: measured["ids_sha256"] for measured in report["runs"]}
    assert {name for name in tools if hashes[name] is None} == {"datatrove", "datasets"}


def test_tool_with_another_number_of_tokens_is_refused_before_the_measurement(inputs, tmp_path):
    """The control of all comparisons: the same library, vocabulary and texts, and one wrong setting."""
    definition = (
        "dataclasses.replace(tool['TOOLS']['tokenizers'], command=lambda job, *rest: tool['TOOLS']['tokenizers']."
        f"command(dataclasses.replace(job, tokenizer_json={str(inputs.cased)!r}), *rest))"
    )
    report_file = tmp_path / "report.json"
    result = run(inputs, "--tools", "tokenizers,other", "--output", str(report_file), definition=definition)
    assert result.returncode == DataError.exit_code
    assert "the tools wrote different numbers of tokens: tokenizers (1 worker) " in result.stderr
    assert "warm-up 1" in result.stdout
    assert "round 1" not in result.stdout
    assert "x datatrove" not in result.stdout
    assert not report_file.exists()


def test_tool_that_fails_is_named_with_its_last_words(inputs):
    definition = (
        "tool['Tool'](lambda *_: [sys.executable, '-c', 'raise SystemExit(\"no vocabulary\")'], 'count-indexed', False)"
    )
    result = run(inputs, "--tools", "other", definition=definition)
    assert result.returncode == DataError.exit_code
    assert "other ended with exit code 1, so nothing is compared. It said:\nno vocabulary" in result.stderr


@pytest.mark.slow
def test_memory_is_measured_at_multiples_of_the_shards(inputs, tmp_path):
    report_file = tmp_path / "report.json"
    result = run(inputs, "--memory", "1,3", "--tools", "ours-plain,tokenizers", "--output", str(report_file))
    assert result.returncode == 0, result.stderr
    rows = json.loads(report_file.read_text())["memory"]
    expected = number_of_tokens(inputs)
    assert [(row["tool"], row["x shards"], row["tokens"]) for row in rows] == [
        ("ours-plain", 1, expected),
        ("ours-plain", 3, 3 * expected),
    ]
    assert all(row["peak MB"] > 10 for row in rows)


@pytest.mark.slow
def test_processes_of_a_tool_are_counted_even_if_they_outlive_it(tmp_path):
    """The tool starts a process that holds 200 MB, waits, and ends before that has used 0.3 s of CPU."""
    burn = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    hold = f"held = b'x' * 200_000_000; import time; time.sleep(10); {burn}"
    leave = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {hold!r}]); time.sleep(8)"
    script = f"""
import json, runpy, sys
from pathlib import Path
tool = runpy.run_path({str(TOOL)!r}, run_name="benchmark")
tool["adopt_orphans"]()
print(json.dumps(tool["run_measured"]([sys.executable, "-c", {leave!r}], cores=1, log=Path("log"), scratch=".")))
"""
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    code, measured = json.loads(result.stdout)
    assert code == 0
    assert measured["cpu_seconds"] >= 0.3
    assert measured["peak_bytes"] >= 200_000_000


def test_equal_counts_of_different_ids_are_refused(tool):
    same = [make_run(tool, name, ids_sha256="a" * 64) for name in ("ours-fast", "tokenizers")]
    tool.verify([*same, make_run(tool, "datatrove")])
    with pytest.raises(
        DataError, match=r"different ids, by sha256: ours-fast \(1 worker\) aaaaaaaaaaaa, .* bbbbbbbbbbbb"
    ):
        tool.verify([same[0], make_run(tool, "tokenizers", ids_sha256="b" * 64)])


def test_ratios_compare_median_wall_times_of_as_many_workers(tool):
    seconds = {
        ("ours-fast", 1): (1.0, 3.0, 2.0),
        ("datatrove", 1): (30.0, 50.0, 40.0),
        ("ours-fast", 2): (1.0, 1.0, 1.0),
    }
    runs = [
        make_run(tool, name, workers=workers, wall_seconds=wall)
        for (name, workers), walls in seconds.items()
        for wall in walls
    ]
    rows = {(row["tool"], row["workers"]): row for row in tool.summarise(runs, text_bytes=8 * 10**6)}
    assert rows["ours-fast", 1]["wall s"] == 2.0
    assert rows["ours-fast", 1]["MB/s"] == 4.0
    assert rows["ours-fast", 1]["x datatrove"] == 40.0 / 2.0
    assert rows["ours-fast", 1]["x datasets"] is None
    assert rows["ours-fast", 2]["x datatrove"] is None  # not measured with two workers


def test_peer_that_is_not_installed_is_left_out_with_the_command_that_installs_it(tool, monkeypatch, capsys):
    absent = tool.Tool(lambda *_: [], "count-indexed", False, packages=("no_such_package",))
    monkeypatch.setitem(tool.TOOLS, "absent", absent)
    assert tool.available_tools(["absent", "tokenizers"]) == ["tokenizers"]
    assert "absent is left out, without no_such_package: pip install 'megatron-neobert[benchmark]'" in (
        capsys.readouterr().out
    )
    with pytest.raises(ConfigError, match="none of absent is installed"):
        tool.available_tools(["absent"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "0"], "'0' is not a whole number above 0"),
        (["--workers", "9999"], "--workers 9999 is above the"),
        (["--tools", "ours-fast,mine"], "mine is not one of ours-fast, ours-plain, datatrove, datasets, tokenizers"),
        (["--tools", "tokenizers", "--memory", "1"], "--memory measures ours-fast and ours-plain alone"),
        (["--text-key", "txt"], "no column of text is named 'txt'; it has content. Use --text-key."),
        (["--input", str(TOOL)], "is not a parquet file"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(inputs, arguments, words):
    given = ("--input", *inputs.shards, "--tokenizer-model", inputs.vocabulary)
    ended = run_forked("benchmark_preprocessing", *given, *arguments)
    assert ended.refused(ConfigError.exit_code) and words in ended.output
