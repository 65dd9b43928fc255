"""`neobert plot`, as a user starts it."""

import json

import pytest
from commands import call


def write_run(folder, *, last=40):
    folder.mkdir(parents=True)
    iterations = range(10, last + 1, 10)
    lines = [{"iteration": at, "loss": 10 / at, "lr": 1e-3, "consumed_tokens": 100 * at} for at in iterations]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"iteration": 5')
    return folder


def test_runs_that_still_train_are_drawn_without_a_display(tmp_path):
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b", last=30)
    code, printed, errors = call("plot", first, second / "metrics.jsonl", "--output", tmp_path / "new" / "plots")
    assert (code, errors) == (0, "")
    assert printed.splitlines()[:2] == [
        f"{first}: iteration 40 | loss 0.2500 nats",
        f"{second}/metrics.jsonl: iteration 30 | loss 0.3333 nats",
    ]
    (figure,) = (tmp_path / "new" / "plots").iterdir()
    assert figure.name == "curves.png" and figure.read_bytes()[:4] == b"\x89PNG"


def test_control_characters_in_names_do_not_reach_the_terminal(tmp_path):
    folder = write_run(tmp_path / "\x1b[31mred\udc80\u5b9f")
    hostile = {"iteration": 50, "loss": 1.0, "consumed_tokens": 5000, "\x1b]0;owned\x07": 1.0, "a\ud800b": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(hostile) + "\n")
    with pytest.warns(UserWarning, match="Glyph 23455 .* missing from font"):
        _, printed, _ = call("plot", folder, "--output", tmp_path)
    assert r"\x1b[31mred\udc80" in printed and "\x1b" not in printed
    _, _, errors = call("plot", folder, "--output", tmp_path, "--metrics", "nope")
    assert "Choose from loss, consumed_tokens" in errors


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((".",), 66, "holds no metrics"),
        (("a", "--metrics", "bleu"), 2, "--metrics bleu was not logged by any of these runs. Choose from loss, lr"),
        (("a", "--output", "/proc"), 73, "--output /proc cannot be written"),
    ],
)
def test_runs_and_outputs_that_cannot_be_used_are_refused(tmp_path, monkeypatch, arguments, code, message):
    write_run(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    ended, _, errors = call("plot", "--output", "p", *arguments)
    assert ended == code and message in errors
    assert not (tmp_path / "p").exists()
