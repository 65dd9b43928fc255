"""The command goes on with another number of ranks and another tensor-parallel size, in the same order of the data."""

import json
from pathlib import Path

from distributed.ranks import read_metrics
from tolerances import LAYOUT_LOSS


def cursors(save: Path) -> dict[int, str]:
    """The place in the data after each iteration."""
    lines = (json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines())
    return {line["iteration"]: str(line["cursor"]) for line in lines}


def test_two_data_parallel_ranks_become_one_then_two_tensor_parallel_ones_then_one(start, copy_until, undisturbed):
    save = copy_until(150)
    tensor_parallel = ("--tensor-model-parallel-size", 2)
    for ranks, options, stop in ((1, (), 155), (2, tensor_parallel, 160), (1, (), 170)):
        with start(save, *options, "--exit-interval", stop, ranks=ranks) as training:
            assert training.finish() == 75, training.output
        assert f"on {ranks} x cpu" in training.output
    expected, found = read_metrics(undisturbed), read_metrics(save)
    assert sorted(found) == list(range(151, 171))
    assert {number: cursors(save)[number] for number in found} == {
        number: cursors(undisturbed)[number] for number in found
    }
    assert max(abs(found[number] - expected[number]) / expected[number] for number in found) <= LAYOUT_LOSS.gate
