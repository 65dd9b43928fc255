"""What is said of the iterations since the last line: its values, and how they read at 3 a.m. Needs no torch."""

import math
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Means over all ranks and the iterations of an interval, unless said otherwise."""

    iteration: int
    train_iters: int
    loss: float | None  # nats per masked token; None if every update was skipped
    masked_accuracy: float | None  # share of the masked tokens whose likeliest prediction is right
    lr: float  # of the last iteration, as is the gradient norm
    grad_norm: float
    ranks: int
    tokens_per_second: float  # of all ranks; tokens of documents, unused slots are not counted
    flops_per_second: float  # of all ranks; what the model needs for these tokens, recomputation not counted
    peak_tflops: float | None  # of one rank's GPU; None where it is not known, as on CPU
    memory_gib: float  # of the rank that has most of it: the peak of what it allocated, on CPU what is resident now
    fill: float  # share of the slots that hold tokens of documents
    data_wait: float  # share of its time that rank 0 waited for a batch
    consumed_tokens: int  # since the start of the run, as are the skipped iterations
    skipped_iterations: int
    eta_seconds: float

    @property
    def flops_per_rank(self) -> float:
        return self.flops_per_second / self.ranks

    @property
    def mfu(self) -> float | None:
        """Share of the GPU's peak that the model's own operations take."""
        return None if self.peak_tflops is None else self.flops_per_rank / (self.peak_tflops * 1e12)

    @property
    def values(self) -> dict[str, float]:
        """For the record; what is not known is left out."""
        values = asdict(self)
        for name in ("iteration", "train_iters", "ranks", "flops_per_second", "peak_tflops"):
            del values[name]
        values["tokens_per_second_per_rank"] = self.tokens_per_second / self.ranks
        values["tflops_per_rank"] = self.flops_per_rank / 1e12
        values["mfu"] = self.mfu
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        """One line of some 200 characters; `8 x` begins what each of eight ranks does."""
        parts = [
            f"iteration {self.iteration}/{self.train_iters} ({percent(self.iteration / self.train_iters)})",
            say_quality(self.loss, self.masked_accuracy),
            f"lr {self.lr:.2e}",
            f"grad norm {self.grad_norm:.3f}" if math.isfinite(self.grad_norm) else None,
            with_prefix(self.tokens_per_second, " tokens/s"),
            self._say_speed(),
            f"{self.memory_gib:.{1 if self.memory_gib >= 10 else 2}f} GiB",
            f"fill {percent(self.fill)}",
            f"wait {percent(self.data_wait)}",
            f"skipped {self.skipped_iterations}" if self.skipped_iterations else None,
            f"ETA {duration(self.eta_seconds)}",
        ]
        return " | ".join(part for part in parts if part is not None)

    def _say_speed(self) -> str:
        speed = with_prefix(self.flops_per_rank, "FLOP/s")
        if self.mfu is not None:
            speed += f", MFU {percent(self.mfu)}"
        if self.ranks == 1:
            return speed
        return f"{self.ranks} x {with_prefix(self.tokens_per_second / self.ranks, '').strip()}, {speed}"


def say_quality(loss: float | None, accuracy: float | None) -> str:
    """Loss and accuracy, or that there is neither."""
    if loss is None or accuracy is None:
        return "every update skipped"
    return f"loss {loss:.4f} nats | accuracy {percent(accuracy, digits=2)}"


def percent(share: float, *, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def with_prefix(rate: float, unit: str) -> str:
    """Three digits, and the unit behind its prefix: `151 k tokens/s` with the unit ` tokens/s`."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if rate >= 0.9995 * factor:
            scaled = rate / factor
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f} {prefix}{unit}"
    return f"{rate:.0f} {unit.strip()}"


def duration(seconds: float) -> str:
    """The two largest units."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days:,} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
