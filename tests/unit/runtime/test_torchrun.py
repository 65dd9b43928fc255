"""Exit code of a node, from the exit codes of its ranks."""

import pytest

from megatron_neobert import launch
from megatron_neobert.runtime import signals


@pytest.mark.parametrize(
    ("codes", "expected"),
    [({0: 69, 1: 1}, 1), ({0: 69, 1: -9}, 137), ({0: 69, 1: 69}, 69), ({0: 74, 1: 69}, 74), ({2: 75}, 75)],
)
def test_node_ends_with_the_code_of_the_first_rank_that_did_not_just_lose_another_rank(codes, expected):
    assert launch.exit_code_of_node(codes) == expected


def test_signal_that_ended_a_rank_counts_as_a_stop_only_if_the_launcher_forwarded_it(monkeypatch, capsys):
    assert launch.exit_code_of_node({3: -15}) == 128 + 15
    assert "rank 3 was ended by signal 15" in capsys.readouterr().err
    monkeypatch.setattr(signals, "forwarded", {15})
    assert launch.exit_code_of_node({3: -15}) == 75
    assert launch.exit_code_of_node({3: -9}) == 128 + 9
