"""Make large language models small, fast and measured: quantize, run, measure."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flyweight.engine.llm import LLM
    from flyweight.engine.request import SamplingParams
    from flyweight.quant.quantize import quantize

# Read when torch is loaded. On a CPU, threads that wait for each other spin for milliseconds by
# default; beside other work on the same cores they keep them from the very thread they wait for,
# and a token can take a second. Sleeping sooner costs little.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "quantize"]

HOME = {
    "LLM": "flyweight.engine.llm",
    "SamplingParams": "flyweight.engine.request",
    "quantize": "flyweight.quant.quantize",
}


def __getattr__(name: str) -> Any:
    """Imported on first use: `flyweight --help` must not wait for torch."""
    if name not in HOME:
        raise AttributeError(f"module 'flyweight' has no attribute {name!r}")
    return getattr(import_module(HOME[name]), name)


def __dir__() -> list[str]:
    """With the names that are imported on first use: completion in a notebook must find them."""
    return sorted({*globals(), *HOME})
