"""Tables and curves of speeds: the fastest batch size stands for a length."""

from megatron_neobert.evaluation.throughput_tables import best_rows, to_cells, to_curves


def row(model="a", length=512, batch_size=1, speed=100.0, **changes):
    measured = speed is not None
    values = {
        "model": model,
        "dtype": "float32",
        "attention": "sdpa",
        "layout": "padded",
        "passes": "forward",
        "length": length,
        "batch_size": batch_size,
        "tokens": length * batch_size,
        "slots": length * batch_size,
        "outcome": "measured" if measured else "out of memory",
        "steps": 3 if measured else 0,
        "tokens_per_second": speed,
        "lower_quartile": speed and speed - 10,
        "upper_quartile": speed and speed + 10,
        "peak_bytes": 1 << 29 if measured else None,
    }
    return {**values, **changes}


ROWS = [
    row(batch_size=1, speed=100.0),
    row(batch_size=2, speed=150.0),
    row(batch_size=4, speed=120.0),
    row(batch_size=8, speed=None),
    row(length=1024, speed=None),
    row(model="b", length=1024, speed=90.0),
]


def test_the_fastest_batch_size_stands_for_a_length():
    found = {(best["model"], best["length"]): best["tokens_per_second"] for best in best_rows(ROWS)}
    assert found == {("a", 512): 150.0, ("a", 1024): None, ("b", 1024): 90.0}


def test_a_table_says_where_memory_ended_and_where_nothing_was_measured():
    header, first, second = to_cells(ROWS)
    assert header == ["model", "dtype", "attention", "layout", "512", "1,024"]
    measured = ["150 (140 to 160), batch 2, 0.50 GiB", "out of memory (batch 1)"]
    assert first == ["a", "float32", "sdpa", "padded", *measured]
    assert second[0] == "b" and second[4:] == ["-", "90 (80 to 100), batch 1, 0.50 GiB"]


def test_curves_are_named_by_what_tells_them_apart():
    others = [row(layout="packed"), row(dtype="bfloat16")]
    assert [curve.name for curve in to_curves([row(), *others])] == [
        "a, float32, padded",
        "a, float32, packed",
        "a, bfloat16, padded",
    ]
