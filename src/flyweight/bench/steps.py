"""Where the time of a captured decode step goes: linears, attention, head, gaps, the host.

Two runs of the same batch. The first is timed: the wall clock of a step, and how long the host was
at work (a step less its wait for tokens). The second is recorded by torch's profiler. Launches
overlap, each kernel fetching weights while the one before it ends, so durations add up to more than
the step: a kernel is charged only with the time by which it is the last to end, and charges and
gaps together are the step. Figures are medians of the steps.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from flyweight.bench.profile import Profiler, Workload
from flyweight.bench.rows import Row
from flyweight.bench.timing import warm_up
from flyweight.clock import clock
from flyweight.errors import UnsupportedError

if TYPE_CHECKING:
    from flyweight.engine.llm import LLM

FIRST = ("embed", "look_up_rows")  # the kernels that begin a step
LINEARS = (
    "gemv",
    "gemm",
    "batch",
    "few",
    "vptq",
    "nvjet",
    "cutlass",
    "cublas",
    "untile",
    "scaled_mm",
    "sparse",
    "experts",
)
PACKS = ("pack", "batch_pack")  # of x for gemm.cu and batch.cu: a linear's, too
PARTS = ("linears", "qkv with attention", "attention", "lm_head", "other kernels", "gaps")


@dataclass(frozen=True)
class Kernel:
    """Microseconds of one launch."""

    start: float
    end: float
    name: str

    @property
    def part(self) -> str:
        if "attention" in self.name:
            return "qkv with attention" if "qkv" in self.name else "attention"
        return (
            "linears"
            if self.name in PACKS or any(word in self.name for word in LINEARS)
            else "other kernels"
        )


def split_steps(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """Whole steps, each with the first kernel of the next one as its end."""
    ordered = sorted(kernels, key=lambda one: one.start)
    starts = [i for i, kernel in enumerate(ordered) if kernel.name in FIRST]
    return [ordered[begin : end + 1] for begin, end in itertools.pairwise(starts)]


def parts_of(step: Sequence[Kernel]) -> dict[str, tuple[float, int]]:
    """part → (microseconds charged, kernels); the last linear of a step is the head."""
    *kernels, following = step
    names = [kernel.part for kernel in kernels]
    if "linears" in names:
        head = len(names) - 1 - names[::-1].index("linears")
        names[head] = "lm_head"
        if head and kernels[head - 1].name in PACKS:
            names[head - 1] = "lm_head"
    found = dict.fromkeys(PARTS, (0.0, 0))

    def add(part: str, time: float) -> None:
        if time > 0 or part != "gaps":
            found[part] = found[part][0] + time, found[part][1] + 1

    end = kernels[0].start
    for kernel, part in zip(kernels, names, strict=True):
        add("gaps", kernel.start - end)
        add(part, max(0.0, kernel.end - max(end, kernel.start)))
        end = max(end, kernel.end)
    add("gaps", following.start - end)
    return found


def measure_steps(llm: LLM, work: Workload) -> list[Row]:
    """A row for each part of a step, one for the step and one for the host."""
    steps = llm.engine.runner.steps
    if steps is None or llm.device.type != "cuda":
        raise UnsupportedError(
            "decode steps of this model are not captured as CUDA graphs here; "
            "`flyweight profile` shows them"
        )
    profiler = Profiler(llm, work)
    warm_up(lambda: profiler.decode(contextlib.nullcontext))
    wall, host = timed(profiler)
    found = [parts_of(step) for step in split_steps(recorded(profiler))]
    period = statistics.median(sum(time for time, _ in parts.values()) for parts in found)
    rows = [
        row(
            part,
            "device",
            statistics.median(parts[part][0] for parts in found),
            calls=found[0][part][1],
            whole=period,
        )
        for part in PARTS
        if any(parts[part][1] for parts in found)
    ]
    return [
        row("step", "device", wall, calls=1, whole=wall) | {"recorded_us": period},
        *rows,
        row("host", "host", host, calls=1, whole=wall),
    ]


def row(operator: str, kind: str, time: float, *, calls: int, whole: float) -> Row:
    return {
        "phase": "decode",
        "level": "part",
        "operator": operator,
        "kind": kind,
        "self_us": time,
        "calls": calls,
        "share": time / whole,
    }


def timed(profiler: Profiler) -> tuple[float, float]:
    """Microseconds of a step by the wall clock, and those in which the host worked."""
    waits: list[float] = []
    seconds = profiler.decode(lambda: waits_into(waits))
    return 1e6 * seconds / len(waits), 1e6 * (seconds - sum(waits)) / len(waits)


@contextlib.contextmanager
def waits_into(waits: list[float]) -> Iterator[None]:
    """How long each step's tokens were waited for."""
    from flyweight.transfer import Download

    lists = Download.lists

    def watched(self: Any) -> Any:
        begin = clock()
        try:
            return lists(self)
        finally:
            waits.append(clock() - begin)

    Download.lists = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        Download.lists = lists  # type: ignore[method-assign]


def recorded(profiler: Profiler) -> list[Kernel]:
    held: list[Any] = []

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with torch_profile(activities=[ProfilerActivity.CUDA]) as found:
            held.append(found)
            yield
            profiler.synchronize()

    profiler.decode(around)
    return [
        Kernel(event.time_range.start, event.time_range.end, event.name)
        for event in held[0].events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
