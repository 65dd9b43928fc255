"""Which checkpoints a run keeps, and that one which is half deleted does not count."""

import re

from reliability.conftest import LAUNCH_FAULTY
from reliability.states import names_in

KEEP = ("--save-interval", 10, "--keep-last", 2, "--keep-every", 100)


def test_the_newest_and_every_hundredth_are_kept_and_a_crash_while_deleting_leaves_no_half_checkpoint(
    start, copy_until
):
    save = copy_until(200)  # 50, 100, 150, 200: the first save deletes two of them
    with start(save, *KEEP, command=LAUNCH_FAULTY, FAULTS="die_while_deleting:0:205") as training:
        assert training.finish() == 128 + 9, training.output
    checkpoints = {name for name in names_in(save) if re.fullmatch(r"iter_\d+", name)}
    assert "iter_0000210" in checkpoints
    (half,) = [name for name in names_in(save) if name.startswith(".old-")]
    assert half.removeprefix(".old-") not in checkpoints

    with start(save, *KEEP, "--exit-interval", 230) as training:
        assert training.finish() == 75, training.output
    assert f"from {save / 'iter_0000210'}" in training.output
    assert "damaged" not in training.output
    kept = {"iter_0000100", "iter_0000200", "iter_0000220", "iter_0000230"}
    assert names_in(save) == kept | {"latest_checkpointed_iteration.txt"}
