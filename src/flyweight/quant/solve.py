"""From a group of sibling linears and the statistics of their input to QuantTensors: which solver,
on which rows.

Solvers of integers treat rows independently, so siblings under one rule are solved as one matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flyweight.quant.awq import awq_round
from flyweight.quant.fp8 import fp8
from flyweight.quant.gptq import gptq
from flyweight.quant.recipe import SOLVERS, UNCALIBRATED, Layer
from flyweight.quant.rtn import rtn, to_int8_channel
from flyweight.quant.sparsegpt import prune24
from flyweight.quant.statistics import Statistics
from flyweight.quant.trellis import trellis
from flyweight.quant.vptq import vptq
from flyweight.tensors import IntGroup, Plain, QuantTensor, Sparse24

Solver = Callable[[Tensor, Layer, Statistics | None], QuantTensor]
OTHERS: dict[str, Solver] = {}


def register(name: str, solver: Solver, *, calibrated: bool = True) -> None:
    """A solver from outside of this folder, to be named in recipes; `calibrated`: it asks for
    statistics of the inputs."""
    if name in SOLVERS:
        raise ValueError(f"there is a solver {name} already")
    SOLVERS.append(name)
    if not calibrated:
        UNCALIBRATED.add(name)
    OTHERS[name] = solver


def solve_group(
    weights: Sequence[Tensor],
    layers: Sequence[Layer],
    statistics: Statistics | None,
    *,
    dtype: torch.dtype,
    sparse: bool = False,
    seed: int = 0,
) -> list[QuantTensor]:
    """One QuantTensor per weight [out, in]; `dtype` is that of the model and of plain weights."""
    if len(set(layers)) == 1 and layers[0].solver in ("rtn", "gptq", "awq"):
        joined = solve_integers(
            torch.cat(list(weights)), layers[0], statistics, dtype=dtype, sparse=sparse
        )
        parts = split_rows(joined, [weight.shape[0] for weight in weights])
        return [finish(part, layers[0], sparse=sparse) for part in parts]
    if len(set(layers)) == 1 and layers[0].solver == "trellis":
        assert statistics is not None
        return list(trellis(weights, statistics, layers[0].trellis(dtype)))
    return [
        solve_one(weight, layer, statistics, dtype=dtype, sparse=sparse, seed=seed)
        for weight, layer in zip(weights, layers, strict=True)
    ]


def solve_one(
    weight: Tensor,
    layer: Layer,
    statistics: Statistics | None,
    *,
    dtype: torch.dtype,
    sparse: bool = False,
    seed: int = 0,
) -> QuantTensor:
    if layer.solver == "keep":
        return Plain(weight.to(dtype))
    if layer.solver in OTHERS:
        return OTHERS[layer.solver](weight, layer, statistics)
    if layer.solver == "fp8":
        return fp8(weight, layer.fp8(), statistics)
    if layer.solver == "vptq":
        assert statistics is not None
        return vptq(weight, statistics, layer.vptq(dtype, seed))
    if layer.solver == "trellis":
        assert statistics is not None
        return trellis([weight], statistics, layer.trellis(dtype))[0]
    return finish(
        solve_integers(weight, layer, statistics, dtype=dtype, sparse=sparse), layer, sparse=sparse
    )


def solve_integers(
    weight: Tensor, layer: Layer, statistics: Statistics | None, *, dtype: torch.dtype, sparse: bool
) -> IntGroup:
    settings = layer.integers(dtype)
    original = weight
    mask = None
    if sparse:
        assert statistics is not None
        weight, mask, _ = prune24(weight, statistics, damping=layer.damping)
    if layer.solver == "gptq":
        assert statistics is not None
        return gptq(
            weight,
            statistics,
            settings,
            layer.gptq(),
            mask=mask,
            target=original if sparse else None,
        )
    if layer.solver == "awq":
        assert statistics is not None
        return awq_round(weight, statistics, settings)  # zeros stay zeros: every grid holds zero
    return rtn(weight, settings, statistics.importance if statistics else None)


def finish(tensor: IntGroup, layer: Layer, *, sparse: bool) -> QuantTensor:
    made = to_int8_channel(tensor) if layer.activations == "int8" else tensor
    if not sparse:
        return made
    packed = Sparse24.from_dense(made)
    assert packed is not None, "a solver broke the 2:4 mask"
    return packed


def split_rows(tensor: IntGroup, sizes: Sequence[int]) -> list[IntGroup]:
    parts = []
    begin = 0
    for size in sizes:
        rows = slice(begin, begin + size)
        parts.append(
            dataclasses.replace(
                tensor,
                codes=tensor.codes[rows].contiguous(),
                scales=tensor.scales[rows].contiguous(),
                zeros=None if tensor.zeros is None else tensor.zeros[rows].contiguous(),
            )
        )
        begin += size
    return parts
