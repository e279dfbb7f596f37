"""The work that is measured, by name: data only."""

from __future__ import annotations

from dataclasses import dataclass

from flyweight.errors import OptionError, unknown


@dataclass(frozen=True)
class Workload:
    """`batch` prompts of `input` random tokens each, handed over at once; `output` tokens each."""

    name: str | None
    batch: int
    input: int
    output: int

    @property
    def context(self) -> int:
        return self.input + self.output


# Variants × workloads × repeats: what each is about decides what it is ranked by
# (report/layouts.py).
LATENCY = {
    str(workload.name): workload
    for workload in (
        Workload("interactive", 1, 128, 64),
        Workload("decode_bound", 1, 256, 512),
        Workload("prefill_bound", 1, 2048, 32),
        Workload("long_context", 1, 16384, 32),
        Workload("medium_batch", 8, 256, 128),
        Workload("base", 32, 256, 32),
        Workload("high_concurrency", 64, 256, 128),
    )
}
# Long conversations, for models that are made for them: measured when asked for by name.
LONG = {
    str(workload.name): workload
    for workload in (
        Workload("long_4k_x32", 32, 4096, 128),
        Workload("long_16k_x8", 8, 16384, 128),
        Workload("long_64k", 1, 65536, 128),
    )
}
# one prompt; 63488 and 129024 for models that are made for them
SPEED_INPUTS = (1, 6144, 14336, 30720)
SPEED_OUTPUT = 2048
THROUGHPUT = (1000, 100)  # input, output


def find(name: str) -> Workload:
    known = LATENCY | LONG
    if name not in known:
        raise OptionError(unknown("workload", name, known))
    return known[name]
