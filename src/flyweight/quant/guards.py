"""What surrounds the work on a model: the same bytes every time, and memory errors that say what to
do.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from flyweight.errors import ResourceError

KEPT = "out of memory; finished blocks are kept"


@contextlib.contextmanager
def reproducible(*, fast: bool) -> Iterator[None]:
    """Deterministic kernels; `fast` lets float32 products of half-precision models use TF32."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # not `use_deterministic_algorithms`, which imports torch's compiler to tell it: two seconds
    deterministic = torch.get_deterministic_debug_mode()
    precision = torch.get_float32_matmul_precision()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    memory.fill_uninitialized_memory = False  # every byte that is read was written
    torch.set_deterministic_debug_mode("warn")
    torch.set_float32_matmul_precision("high" if fast else "highest")
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        torch.set_deterministic_debug_mode(deterministic)
        torch.set_float32_matmul_precision(precision)
        memory.fill_uninitialized_memory = fill


@contextlib.contextmanager
def memory_errors(where: str) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ResourceError(
            f"{where}: {KEPT}: run again with --resume and a smaller --batch or fewer samples"
        ) from error
    except RuntimeError as error:
        text = str(error)
        if "not enough memory" not in text and "can't allocate memory" not in text:
            raise
        raise ResourceError(f"{where}: {KEPT}: --resume with fewer samples") from error
