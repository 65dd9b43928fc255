"""--resume, and settings that differ from those of the checkpoint: refused in a sentence, or allowed by name."""

import pytest
from reliability.states import names_in


@pytest.mark.parametrize(
    ("policy", "until", "code", "said"),
    [
        ("must", 0, 66, "--resume must: --load {save} holds no checkpoint"),
        ("never", 50, 73, "--save {save} already holds checkpoints of a run"),
    ],
)
def test_a_start_that_is_not_what_resume_asks_for_is_refused_at_once(start, copy_until, policy, until, code, said):
    save = copy_until(until)
    before = names_in(save)
    with start(save, "--resume", policy) as training:
        assert training.finish() == code, training.output
    (line,) = training.lines
    assert line.startswith("error: ") and said.format(save=save) in line
    assert names_in(save) == before


def test_a_run_from_fresh_weights_beside_one_that_could_be_continued(start, copy_until, tmp_path):
    """--resume never, with a folder of its own."""
    load = copy_until(50)
    options = ("--load", load, "--resume", "never", "--exit-interval", 1)
    with start(tmp_path / "fresh", *options, ranks=1) as training:
        assert training.finish() == 75, training.output
    assert "from fresh weights of seed 0" in training.output
    assert "iter_0000001" in names_in(tmp_path / "fresh")


def test_a_run_with_other_data_settings_is_refused_unless_each_of_them_is_allowed_by_name(start, copy_until):
    save = copy_until(50)
    changed = ("--mask-prob", 0.3, "--seed", 1, "--exit-interval", 51)
    with start(save, *changed, "--allow-changed", "seed", ranks=1) as training:
        assert training.finish() == 78, training.output
    (error,) = [line for line in training.lines if line.startswith("error: ")]
    assert "--mask-prob was 0.2 and is now 0.3" in error and "--allow-changed" in error and "--seed was" not in error
    with start(save, *changed, "--allow-changed", "seed", "mask_prob", ranks=1) as training:
        assert training.finish() == 75, training.output
    assert f"from {save / 'iter_0000050'}" in training.output
    assert "--mask-prob was 0.2 and is now 0.3" in training.output, "what was allowed is said"
    assert "iter_0000051" in names_in(save)
