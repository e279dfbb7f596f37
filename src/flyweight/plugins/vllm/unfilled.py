"""Parameters that vLLM's loader finds and hands tensors to, and that take nothing.

Our own reader reads the weights when the loader is done; but the loader wants a place for every
tensor of the files.
"""

from __future__ import annotations

from typing import Any

import torch


def add_module_path(layer: torch.nn.Module, name: str) -> None:
    """A parameter `name`, with dots: of a module inside."""
    *path, last = name.split(".")
    for step in path:
        if step not in dict(layer.named_children()):
            layer.add_module(step, torch.nn.Module())
        layer = layer.get_submodule(step)
    layer.register_parameter(last, _unfilled())


def add_whole_name(layer: torch.nn.Module, name: str) -> None:
    """A parameter that is asked for by its whole name, dots and all, which torch would not
    register: so the loader of experts does.
    """
    layer._parameters[name] = _unfilled()


def _unfilled() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    parameter.weight_loader = take_nothing  # type: ignore[attr-defined]
    return parameter


def take_nothing(*_: Any, **__: Any) -> None:
    return None
