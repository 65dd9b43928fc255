"""The checkpoint benchmark, at the smallest size that still shows its table."""

import pytest
from commands import run


@pytest.mark.slow
def test_the_table_shows_what_each_way_of_saving_costs_and_the_speed_of_verifying(tmp_path):
    options = ["--num-layers", "1", "--hidden-size", "64", "--iterations", "2", "--rounds", "1"]
    code, said, complaints = run("benchmark_checkpoint", *options, "--folder", tmp_path)
    assert code == 0, complaints
    rows = [line.split(" | ") for line in said.splitlines() if " | " in line]
    assert [row[0].strip() for row in rows] == ["checkpoint", "none", "synchronous", "asynchronous"]
    assert float(rows[1][3]) == 0.0, "the round without a checkpoint costs nothing"
    assert "MiB/s" in said
    assert list(tmp_path.iterdir()) == []
