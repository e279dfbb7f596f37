"""Times of single kernels: the rules of timing.py where a sample is microseconds.

A sample is the mean of one pass over many launches. On a GPU that pass is one CUDA graph between
two events, so that no launch waits for Python; on a CPU it is a loop. Cold: the launches walk over
copies of the weight that together are larger than the last cache, so that each is read from memory.
Hot: one weight again and again. Where a launch takes so long that this makes no difference (LONG),
a sample is a few launches. All works of one comparison take turns, sample by sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flyweight.bench.timing import turns, warm_up
from flyweight.clock import clock

FEWEST_LAUNCHES = {"cuda": 24, "cpu": 3}
MOST_COPIES = {"cuda": 400, "cpu": 16}
CPU_CACHE = 64 << 20
LONG = 1e3  # microseconds of a launch that takes as long with its weight in a cache
ENOUGH = 20e3  # microseconds of a sample of such launches


@dataclass(frozen=True)
class Work:
    """`launch(i)` runs the kernel on copy i."""

    launch: Callable[[int], Any]
    copies: int = 1


def copies_for(nbytes: int, device: torch.device) -> int:
    """So many that together they are three times the last cache."""
    cache = (
        torch.cuda.get_device_properties(device).L2_cache_size
        if device.type == "cuda"
        else CPU_CACHE
    )
    return max(2, min(MOST_COPIES[device.type], math.ceil(3 * cache / nbytes)))


def sampler(work: Work, device: torch.device) -> Callable[[], float]:
    """A function that takes one sample: microseconds of one launch."""

    def make(launches: int) -> Callable[[], float]:
        def run() -> None:
            for i in range(launches):
                work.launch(i % work.copies)

        return (
            graph_sampler(run, launches) if device.type == "cuda" else loop_sampler(run, launches)
        )

    work.launch(0)  # compiles and tunes outside of any capture
    launches = work.copies * math.ceil(FEWEST_LAUNCHES[device.type] / work.copies)
    sample = make(launches)
    return (
        make(max(2, min(launches, math.ceil(ENOUGH / once))))
        if (once := sample()) > LONG
        else sample
    )


def loop_sampler(run: Callable[[], None], launches: int) -> Callable[[], float]:
    def sample() -> float:
        begin = clock()
        run()
        return 1e6 * (clock() - begin) / launches

    return sample


def graph_sampler(run: Callable[[], None], launches: int) -> Callable[[], float]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def sample() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * begin.elapsed_time(end) / launches

    return sample


def measure(
    works: Mapping[str, Work], device: torch.device, *, samples: int
) -> dict[str, list[float]]:
    """Microseconds of a launch, `samples` times each, taking turns."""
    samplers = {name: sampler(work, device) for name, work in works.items()}
    for one in samplers.values():
        warm_up(one)
    found: dict[str, list[float]] = {name: [] for name in works}
    for _, name in turns(list(works), samples):
        found[name].append(samplers[name]())
    return found
