"""Kernels compiled before anything asks for them, by all cores: what is asked for comes from dry runs.

Dry runs and NVRTC work in processes of their own: the ones are good for nothing else afterwards, the other takes turns with
itself within one process.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyweight.kernels import jit

Listen = Callable[[str, int, int], None]  # what it is about, how many are done, of how many
DryRun = Callable[[], set[jit.Wanted]]  # can be pickled


@dataclass(frozen=True)
class Compiled:
    kernels: int
    fresh: int  # of those: not in the cache before
    seconds: float
    folder: Path


def precompile(runs: Sequence[DryRun], architecture: str, *, listen: Listen, workers: int | None = None) -> Compiled:
    """Every kernel that one of the dry runs asks for into the cache."""
    begin, wanted = time.monotonic(), set[jit.Wanted]()
    with ProcessPoolExecutor(workers or os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        for found in _finished(pool, "dry runs", [(run,) for run in runs], listen):
            wanted |= found
        fresh = sum(_finished(pool, "kernels", [(_compile, one, architecture) for one in sorted(wanted, key=str)], listen))
    return Compiled(len(wanted), fresh, time.monotonic() - begin, jit.cache_folder())


def _compile(one: jit.Wanted, architecture: str) -> bool:
    """Whether it was not there before."""
    kernel = (one.file, dict(one.defines), architecture, one.registers)
    there = jit.cubin_path(*kernel).exists()
    jit.compile_cubin(*kernel)
    return not there


def _finished(pool: ProcessPoolExecutor, what: str, jobs: Sequence[tuple[Any, ...]], listen: Listen) -> Iterator[Any]:
    """Results as they come; the first failure ends it."""
    listen(what, 0, len(jobs))
    futures = [pool.submit(*job) for job in jobs]
    try:
        for done, future in enumerate(as_completed(futures), 1):
            yield future.result()
            listen(what, done, len(jobs))
    finally:
        for future in futures:
            future.cancel()
