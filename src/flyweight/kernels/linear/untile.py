"""A tiled weight written out in 16 bits, for cuBLAS or for gemm.cu, into a place that all layers
share: host side of cuda/untile.cu.

Loading never holds two copies of a model, and many rows multiply as fast as if it did. W8A8
computes the same function this way: whole numbers are exact in 16-bit floats, and their products
are summed in float32.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from flyweight.kernels import jit, workspace
from flyweight.kernels.linear.format import FLOAT8_INPUTS
from flyweight.kernels.linear.tiles import TiledWeight, deinterleave
from flyweight.tensors import FLOAT8, FLOAT8_MAX, quantize_float8_rows, quantize_int8_rows


def untile(weight: TiledWeight, *, tiles: bool = False) -> Tensor:
    """The weight in its 16-bit type: row-major [out_features, in_features], or in `tiles` of that
    type.
    """
    matrix = weight.matrix
    units = matrix.tiles * matrix.blocks
    count = 1024 * units if tiles else matrix.weights
    out = workspace.current(weight.weights.device).dequantized(count, weight.dtype)
    kernel = _kernel(weight, "untile", {"IN_TILES": 1} if tiles else {})
    kernel.launch(math.ceil(units / 8), 256, (weight.weights, weight.records, out))
    return out if tiles else out.view(weight.out_features, weight.in_features)


def recode(weight: TiledWeight, into: TiledWeight) -> Tensor:
    """The tiles of `weight` as those of `into`, whose format has 8-bit codes and whose outputs have
    a scale each.
    """
    matrix = weight.matrix
    units = matrix.tiles * matrix.blocks
    out = workspace.current(weight.weights.device).dequantized(1024 * units, torch.uint8)
    _kernel(weight, "recode", {"INTO": into.format.code}).launch(
        math.ceil(units / 8), 256, (weight.weights, weight.records, into.channel_scale, out)
    )
    return out


def look_up(weight: TiledWeight, rows: Tensor, out: Tensor) -> None:
    """out [n, in_features] = the weight's rows, int64 [n]."""
    _kernel(weight, "look_up_rows", {"LOOK_UP": 1}).launch(
        len(rows), 256, (weight.weights, weight.records, rows, out), pdl=True
    )


def _kernel(weight: TiledWeight, name: str, own: dict[str, int]) -> jit.Kernel:
    key = (name, *own.items())
    if key not in weight.calls:
        defines = {
            **weight.format.defines(),
            **weight.type_defines,
            "KDIM": weight.in_features,
            "NDIM": weight.out_features,
            "GROUP": weight.group,
            "INTERLEAVED": int(weight.interleaved),
            **own,
        }
        weight.calls[key] = jit.load("untile.cu", defines=defines).kernel(name)
    return weight.calls[key]


def via_cublas(
    weight: TiledWeight, x: Tensor, out: Tensor | None = None, *, residual: Tensor | None = None
) -> Tensor:
    """x Wᵀ + b (+ residual), to `out`; a gated weight gives [gate | up], which is no `out`, and has
    no residual.
    """
    dense = untile(weight)
    if weight.format.quantizes_input or weight.format.widened:
        y = _scaled_product(weight, x, dense)
        y = y if residual is None else y.add_(residual)
    else:
        y = product(x, dense, None if weight.interleaved else out, residual=residual)
    if weight.bias is None:
        return y
    return y.add_(deinterleave(weight.bias, weight.interleaved))


def _scaled_product(weight: TiledWeight, x: Tensor, dense: Tensor) -> Tensor:
    """Codes of the weight times x or its codes, and then the scales of both."""
    assert weight.channel_scale is not None
    channels, static = weight.channel_scale.split([weight.out_features, int(weight.static)])
    scales = deinterleave(channels, weight.interleaved)
    if weight.format.widened:
        return (F.linear(x, dense).float() * scales).to(weight.dtype)
    codes, scale = quantize_rows(x, weight.format.input_codes, static if weight.static else None)
    # exact, and keeps sums below fp16's largest
    shrink = 2.0**-15 if weight.dtype == torch.float16 else 1.0
    sums = F.linear((codes.float() * shrink).to(weight.dtype), dense)
    return (sums.float() * (scale / shrink) * scales).to(weight.dtype)


def product(x: Tensor, dense: Tensor, out: Tensor | None, *, residual: Tensor | None) -> Tensor:
    """x denseᵀ + residual, which may be `out` itself: added in its place, while cuBLAS otherwise
    gets a copy.
    """
    if residual is None:
        return torch.mm(x, dense.T, out=out)
    return (
        residual.addmm_(x, dense.T)
        if residual is out
        else torch.addmm(residual, x, dense.T, out=out)
    )


def quantize_rows(x: Tensor, input_codes: int, static: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes of x and their scale, of each row or the one given: what pack.cu does."""
    float8 = input_codes == FLOAT8_INPUTS
    if static is None:
        return quantize_float8_rows(x) if float8 else quantize_int8_rows(x)
    scaled = x.float() / static
    return (
        scaled.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)
        if float8
        else scaled.round().clamp(-128, 127)
    ), static
