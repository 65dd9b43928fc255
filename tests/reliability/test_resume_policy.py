"""Settings that differ from those of the checkpoint, allowed by name on the command line."""

from reliability.states import names_in


def test_a_run_with_other_data_settings_goes_on_if_each_of_them_is_allowed_by_name_and_says_so(start, copy_until):
    save = copy_until(50)
    changed = ("--mask-prob", 0.3, "--seed", 1, "--exit-interval", 51)
    with start(save, *changed, "--allow-changed", "seed", "mask_prob", ranks=1) as training:
        assert training.finish() == 75, training.output
    assert f"from {save / 'iter_0000050'}" in training.output
    assert "--mask-prob was 0.2 and is now 0.3" in training.output
    assert "--seed was 0 and is now 1" in training.output
    assert "iter_0000051" in names_in(save)
