"""The command that draws the curves of runs, as a user starts it."""

import json
import sys
from xml.etree import ElementTree

import pytest
from unit.tools.commands import call, import_tool

from megatron_neobert.errors import ConfigError, MissingInputError, OutputError

tool = import_tool("plot_run")


def write_run(folder, *, last=40, killed_at=None):
    folder.mkdir(parents=True)
    iterations = list(range(10, last + 1, 10))
    if killed_at is not None:
        iterations = [*range(10, killed_at + 1, 10), *range(killed_at, last + 1, 10)]
    lines = [{"iteration": at, "loss": 10 / at, "lr": 1e-3, "consumed_tokens": 100 * at} for at in iterations]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"iteration": 5')
    return folder


@pytest.fixture
def plot(monkeypatch, capsys):
    """The command in this process; gives what it prints and what it warns of."""

    def run_here(*arguments):
        monkeypatch.setattr(sys, "argv", ["plot_run.py", *map(str, arguments)])
        tool.main()
        return capsys.readouterr()

    return run_here


def test_the_command_draws_runs_that_still_go_on_without_a_display(tmp_path):
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b", last=30, killed_at=20)
    code, said, errors = call("plot_run", first, second / "metrics.jsonl", "--output", tmp_path / "new" / "plots")
    assert (code, errors) == (0, "")
    assert said.splitlines()[:2] == [
        "a: iteration 40 | 4,000 tokens | loss 0.2500 nats",
        "b: iteration 30 | 3,000 tokens | loss 0.3333 nats | restarts: 1",
    ]
    names = sorted(path.name for path in (tmp_path / "new" / "plots").iterdir())
    assert names == ["curves.csv", "curves.png", "curves.svg"]


def test_folders_of_one_name_are_told_apart_by_their_parents(tmp_path, plot):
    said = plot(write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run"), "--output", tmp_path).out
    assert [line.split(":")[0] for line in said.splitlines()[:2]] == ["a/run", "b/run"]


def test_unreadable_lines_are_warned_of(tmp_path, plot):
    folder = write_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write("\n\n")
    assert plot(folder, "--output", tmp_path).err == "warning: a: unreadable lines that were left out: 1\n"


def test_names_of_folders_and_metrics_do_not_act_on_the_terminal_and_fit_into_the_files(tmp_path, plot):
    folder = write_run(tmp_path / "\x1b[31mred\udc80\u5b9f")
    hostile = {"iteration": 50, "loss": 1.0, "consumed_tokens": 5000, "\x1b]0;owned\x07": 1.0, "a\ud800b": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(hostile) + "\n")
    with pytest.warns(UserWarning, match="Glyph 23455 .* missing from font"):
        said = plot(folder, "--output", tmp_path)
    assert said.out.startswith(r"\x1b[31mred\udc80") and "\x1b" not in said.out
    ElementTree.parse(tmp_path / "curves.svg")  # raises where a name has brought a control character
    with pytest.raises(ConfigError, match="they have loss, consumed_tokens"):
        plot(folder, "--output", tmp_path, "--metrics", "nope")


def test_what_cannot_be_drawn_is_refused_with_the_reason(tmp_path, plot):
    folder = write_run(tmp_path / "a")
    with pytest.raises(MissingInputError, match="holds no metrics"):
        plot(tmp_path, "--output", tmp_path / "p")
    with pytest.raises(ConfigError, match="--metrics bleu was not logged by any of these runs; they have loss, lr"):
        plot(folder, "--output", tmp_path / "p", "--metrics", "bleu")
    with pytest.raises(ConfigError, match="--smooth 0 is below 1"):
        plot(folder, "--output", tmp_path / "p", "--smooth", 0)
    with pytest.raises(ConfigError, match="is named more than once"):
        plot(folder, folder / "metrics.jsonl", "--output", tmp_path / "p")
    assert not (tmp_path / "p").exists()
    with pytest.raises(OutputError, match="cannot be written"):
        plot(folder, "--output", folder / "metrics.jsonl" / "p")
    with pytest.raises(OutputError, match="--output /proc cannot be written"):
        plot(folder, "--output", "/proc")
