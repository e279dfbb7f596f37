"""Make large language models small, fast and measured: quantize, run, measure."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flyweight.engine.llm import LLM
    from flyweight.engine.request import SamplingParams
    from flyweight.quant.quantize import quantize

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "quantize"]

HOME = {"LLM": "flyweight.engine.llm", "SamplingParams": "flyweight.engine.request", "quantize": "flyweight.quant.quantize"}


def __getattr__(name: str) -> Any:
    """Imported on first use: `flyweight --help` must not wait for torch."""
    if name not in HOME:
        raise AttributeError(f"module 'flyweight' has no attribute {name!r}")
    return getattr(import_module(HOME[name]), name)
