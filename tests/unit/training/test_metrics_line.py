"""How an interval reads."""

from typing import Any

import pytest

from megatron_neobert.training.metrics_line import Interval, duration, with_prefix

CPU: dict[str, Any] = {
    "iteration": 120_000,
    "train_iters": 1_000_000,
    "loss": 2.41312,
    "masked_accuracy": 0.5123,
    "lr": 6e-4,
    "grad_norm": 0.8312,
    "ranks": 1,
    "tokens_per_second": 9_342.0,
    "flops_per_second": 14.9e9,
    "peak_tflops": None,
    "memory_gib": 0.84,
    "fill": 0.9941,
    "data_wait": 0.0042,
    "consumed_tokens": 250_000_000_000,
    "skipped_iterations": 0,
    "eta_seconds": 6 * 86_400 + 3 * 3_600 + 59 * 60,
}
EIGHT_GPUS = {"ranks": 8, "tokens_per_second": 1.2e6, "flops_per_second": 8 * 247.25e12, "peak_tflops": 989.0}


def test_line_of_one_process_on_cpu():
    assert str(Interval(**CPU)) == (
        "iteration 120000/1000000 (12.0 %) | loss 2.4131 nats | accuracy 51.23 % | lr 6.00e-04 | "
        "grad norm 0.831 | 9.34 k tokens/s | 14.9 GFLOP/s | 0.84 GiB | fill 99.4 % | wait 0.4 % | ETA 6 d 3 h"
    )


def test_line_of_several_gpus_says_what_each_of_them_does_and_what_was_skipped():
    line = str(Interval(**{**CPU, **EIGHT_GPUS, "memory_gib": 41.23, "skipped_iterations": 2}))
    assert "| 1.20 M tokens/s | 8 x 150 k, 247 TFLOP/s, MFU 25.0 % | 41.2 GiB |" in line
    assert "| skipped 2 |" in line


def test_longest_line_stays_readable():
    """Long numbers everywhere; two lines of a terminal of 120 columns."""
    assert len(str(Interval(**{**CPU, **EIGHT_GPUS, "memory_gib": 138.9, "skipped_iterations": 17}))) <= 225


def test_record_has_every_value_of_the_line_and_none_that_is_unknown():
    values = Interval(**{**CPU, **EIGHT_GPUS}).values
    assert values["tokens_per_second_per_rank"] == 1.2e6 / 8
    assert values["tflops_per_rank"] == 247.25
    assert values["mfu"] == 247.25 / 989
    said = {"loss", "masked_accuracy", "lr", "grad_norm", "memory_gib", "fill", "data_wait", "eta_seconds"}
    assert said <= set(values)
    assert "mfu" not in Interval(**CPU).values


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (12.4, "12 tokens/s"),
        (999.6, "1.00 k tokens/s"),
        (9_996, "10.0 k tokens/s"),
        (99_960, "100 k tokens/s"),
        (151_203, "151 k tokens/s"),
        (1_214_000, "1.21 M tokens/s"),
    ],
)
def test_rates_have_three_digits(rate, text):
    assert with_prefix(rate, " tokens/s") == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 0 s"), (3_700, "1 h 1 min"), (86_400 * 1003 + 7_200 + 60, "1,003 d 2 h")],
)
def test_durations_have_the_two_largest_units(seconds, text):
    assert duration(seconds) == text
