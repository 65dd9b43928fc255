"""Tables and curves of speeds: the fastest batch size stands for a length."""

from megatron_neobert.evaluation.throughput_tables import to_cells, to_curves


def row(model="a", length=512, batch_size=1, speed=100.0, layout="padded"):
    measured = speed and {"tokens_per_second": [speed - 10, speed, speed + 10], "peak_bytes": 1 << 29}
    return {"model": model, "layout": layout, "length": length, "batch_size": batch_size, "measured": measured}


ROWS = [
    row(batch_size=1, speed=100.0),
    row(batch_size=2, speed=150.0),
    row(batch_size=4, speed=120.0),
    row(batch_size=8, speed=None),
    row(length=1024, speed=None),
    row(model="b", length=1024, speed=90.0),
]


def test_table_has_the_fastest_batch_size_of_a_length_and_says_where_memory_ended_or_nothing_was_measured():
    header, first, second = to_cells(ROWS)
    assert header == ["model", "layout", "512", "1,024"]
    assert first == ["a", "padded", "150 (140 to 160), batch 2, 512.0 MiB", "out of memory (batch 1)"]
    assert second == ["b", "padded", "-", "90 (80 to 100), batch 1, 512.0 MiB"]


def test_curves_are_named_by_what_tells_them_apart():
    assert [(curve.name, curve.x, curve.y) for curve in to_curves(ROWS)] == [
        ("a", [512], (150.0,)),
        ("b", [1024], (90.0,)),
    ]
    assert [curve.name for curve in to_curves([row(), row(layout="packed")])] == ["a, padded", "a, packed"]
