"""A decoder's `Parts` as a JSON value and a list of tensors, and back: what checkpoint/prepared.py
keeps between two starts.

Addresses are left out; a weight that comes back points to the tensors that came with it.
"""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

from torch import Tensor

from flyweight.kernels.native.executor import Layer, Parts
from flyweight.kernels.native.matrix import Matrix, Weight

NUMBERS = tuple(name for name, kind in Matrix._fields_ if kind is not ctypes.c_void_p)
KINDS = {"layer": Layer, "parts": Parts}
NAMES = {kind: name for name, kind in KINDS.items()}


def describe(value: Any, tensors: list[Tensor]) -> Any:
    """JSON; the tensors go to the list, and their places in it into the JSON."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Weight):
        numbers = {name: getattr(value.matrix, name) for name in NUMBERS}
        kept = {name: describe(tensor, tensors) for name, tensor in value.tensors.items()}
        return {"matrix": numbers, "why": value.why, "tensors": kept}
    if type(value) in NAMES:
        names = [field.name for field in dataclasses.fields(value)]
        fields = {name: describe(getattr(value, name), tensors) for name in names}
        return {"kind": NAMES[type(value)], "fields": fields}
    if isinstance(value, (list, tuple)):
        return [describe(one, tensors) for one in value]
    return value


def restore(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, list):
        return [restore(one, tensors) for one in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "matrix" in value:
        weight = Weight(Matrix(**value["matrix"]), value["why"])
        for name, tensor in value["tensors"].items():
            weight.keep(name, restore(tensor, tensors))
        return weight
    fields = {name: restore(one, tensors) for name, one in value["fields"].items()}
    return KINDS[value["kind"]](**fields)
