"""`neobert plot` as a user calls it."""

import json

import pytest
from commands import call


def write_run(folder, *, last=40, killed_at=None):
    folder.mkdir(parents=True)
    iterations = range(10, last + 1, 10)
    lines = [{"iteration": at, "loss": 10 / at, "lr": 1e-3, "consumed_tokens": 100 * at} for at in iterations]
    if killed_at is not None:
        lines.insert(1, {"iteration": killed_at, "restarted": 1})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"iteration": 5')
    return folder


def test_unfinished_runs_are_drawn_without_a_display(tmp_path):
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b", last=30, killed_at=0)
    code, printed, errors = call("plot", first, second / "metrics.jsonl", "--output", tmp_path / "new" / "plots")
    assert (code, errors) == (0, "")
    assert printed.splitlines()[:2] == [
        "a: iteration 40 | 4,000 tokens | loss 0.2500 nats",
        "b: iteration 30 | 3,000 tokens | loss 0.3333 nats | restarts: 1",
    ]
    assert [path.name for path in (tmp_path / "new" / "plots").iterdir()] == ["curves.png"]
    again = call("plot", first, second, "--output", tmp_path)
    content = (tmp_path / "curves.png").read_bytes()
    assert again[0] == 0 and content[:4] == b"\x89PNG"
    assert content == (tmp_path / "new" / "plots" / "curves.png").read_bytes()


def test_runs_with_the_same_name_are_shown_with_their_parent_folders(tmp_path):
    runs = [write_run(tmp_path / parent / "run") for parent in "ab"]
    _, printed, _ = call("plot", *runs, "--output", tmp_path)
    assert [line.split(":")[0] for line in printed.splitlines()[:2]] == ["a/run", "b/run"]


def test_unreadable_lines_are_counted_in_a_warning(tmp_path):
    folder = write_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write("\n\n")
    _, _, errors = call("plot", folder, "--output", tmp_path)
    assert errors == "warning: a: unreadable lines that were left out: 1\n"


def test_control_characters_in_names_do_not_reach_the_terminal_and_do_not_break_the_figure(tmp_path):
    folder = write_run(tmp_path / "\x1b[31mred\udc80\u5b9f")
    hostile = {"iteration": 50, "loss": 1.0, "consumed_tokens": 5000, "\x1b]0;owned\x07": 1.0, "a\ud800b": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(hostile) + "\n")
    with pytest.warns(UserWarning, match="Glyph 23455 .* missing from font"):
        _, printed, _ = call("plot", folder, "--output", tmp_path)
    assert printed.startswith(r"\x1b[31mred\udc80") and "\x1b" not in printed
    _, _, errors = call("plot", folder, "--output", tmp_path, "--metrics", "nope")
    assert "they have loss, consumed_tokens" in errors


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        ((".",), 66, "holds no metrics"),
        (("a", "--metrics", "bleu"), 2, "--metrics bleu was not logged by any of these runs; they have loss, lr"),
        (("a", "a/metrics.jsonl"), 2, "is named more than once"),
        (("a", "--output", "a/metrics.jsonl/p"), 73, "cannot be written"),
        (("a", "--output", "/proc"), 73, "--output /proc cannot be written"),
    ],
)
def test_missing_metrics_and_unusable_outputs_are_refused(tmp_path, monkeypatch, words, code, reason):
    write_run(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    ended, _, errors = call("plot", "--output", "p", *words)
    assert ended == code and reason in errors
    assert not (tmp_path / "p").exists()
