"""Kernels compiled before anything asks for them, by all cores: what is asked for comes from dry
runs.

Dry runs and NVRTC work in processes of their own: the ones are good for nothing else afterwards,
the other takes turns with itself within one process.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyweight.kernels import compiler, jit

Listen = Callable[[str, int, int], None]  # what it is about, how many are done, of how many
DryRun = Callable[[], set[jit.Wanted]]  # can be pickled


@dataclass(frozen=True)
class Compiled:
    kernels: int
    fresh: int  # of those: not in the cache before
    seconds: float
    folder: Path


def precompile(
    runs: Sequence[DryRun], architecture: str, *, listen: Listen, workers: int | None = None
) -> Compiled:
    """Every kernel that one of the dry runs asks for into the cache, from when the first run is
    done.
    """
    begin = time.monotonic()
    jobs = dict[jit.Wanted, Future[bool]]()
    workers = workers or os.cpu_count() or 1
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            dry = [pool.submit(run) for run in runs]
            for _ in range(workers - len(runs)):
                pool.submit(_get_ready)  # the others, while these run
            for found in _finished(dry, "dry runs", listen):
                jobs |= {
                    one: pool.submit(_compile, one, architecture)
                    for one in sorted(found - jobs.keys(), key=str)
                }
            fresh = sum(_finished(list(jobs.values()), "kernels", listen))
        finally:
            pool.shutdown(cancel_futures=True)
    return Compiled(len(jobs), fresh, time.monotonic() - begin, compiler.cache_folder())


def _get_ready() -> None:
    """Import what a compiling process needs: seconds of it."""
    compiler.cuda_core()


def _compile(one: jit.Wanted, architecture: str) -> bool:
    """Whether it was not there before."""
    kernel = (one.file, dict(one.defines), architecture, one.registers)
    there = compiler.cubin_path(*kernel).exists()
    compiler.compile_cubin(*kernel)
    return not there


def _finished(futures: Sequence[Future[Any]], what: str, listen: Listen) -> Iterator[Any]:
    """Results as they come."""
    listen(what, 0, len(futures))
    for done, future in enumerate(as_completed(futures), 1):
        yield future.result()
        listen(what, done, len(futures))
