"""Experts of many tokens: pack.cu and gemm.cu (or, where that has no matrix units, gemm_mma.cu)
over rows sorted by expert, in tiles of one expert each.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.gpu import Gpu
from flyweight.kernels.linear import gemm, gemm_mma
from flyweight.kernels.linear.experts.routing import Routed
from flyweight.kernels.linear.fused import Norm
from flyweight.kernels.linear.gemm_shape import WHOLE, Forced, Product, Shape
from flyweight.kernels.linear.gemm_shape import shape_for as gemm_shape_for
from flyweight.kernels.linear.tiles import TiledWeight

# of gemm.cu, for tiles of so many rows, where they fit; two for larger ones
WARPGROUPS = {16: 4, 32: 4}


def shape_for(
    weight: TiledWeight, rows: int, tile: int, device: Gpu, *, processors: int | None = None
) -> Shape | None:
    """Of gemm.cu over tiles of one expert each."""
    if processors is not None:
        device = dataclasses.replace(device, multi_processor_count=processors)
    for count in (WARPGROUPS.get(tile, 2), 2):
        forced = Forced(tokens=tile, split=WHOLE, warpgroups=count, teams=1, int16_inputs=False)
        if found := gemm_shape_for(Product(weight.matrix, rows), device, forced):
            return found
    return None


def takes_tile(weight: TiledWeight, tile: int, device: Gpu) -> bool:
    """Whether there is a matrix product of so many rows of one expert."""
    if device.has_warpgroups:
        return shape_for(weight, 16, tile, device, processors=1) is not None
    return mma_cut_for(weight, tile, tile, device) is not None


def mma_cut_for(weight: TiledWeight, rows: int, tile: int, device: Gpu) -> gemm_mma.Cut | None:
    """Of gemm_mma.cu over tiles of one expert each."""
    if weight.format.needs_float8 and not device.has_float8:
        return None
    return gemm_mma.plan(weight.matrix, rows, device, tokens=tile, split=gemm_mma.WHOLE)


def many_rows(
    weight: TiledWeight,
    x: Tensor,
    routed: Routed,
    *,
    source: Tensor | None = None,
    norm: Norm | None = None,
) -> Tensor:
    """pack.cu and the product. x [tokens, in] with `source`, or [rows, in] in the route's order."""
    rows = routed.rows
    device = gpu.of(x.device)
    if not device.has_warpgroups:
        cut = mma_cut_for(weight, rows, routed.tile, device)
        assert cut is not None
        route = gemm_mma.ExpertTiles(routed.expert_of, routed.tiles, source)
        return gemm_mma.multiply_experts(weight, x, cut, route, norm=norm)
    shape = shape_for(weight, rows, routed.tile, device)
    assert shape is not None
    packing = gemm.packing_for(
        weight.in_features, rows, norm=norm is not None, quantized=weight.format.quantizes_input
    )
    ends = gemm.Ends(norm is not None, weight.epilogue(None), experts=True)
    pack, product = gemm.kernels(weight, shape, packing, ends)
    packed = torch.empty(gemm.packed_size(weight, rows), dtype=torch.uint8, device=x.device)
    row_scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    out = weight.empty_result(rows, x.device)
    args = (
        x,
        norm and norm.weight,
        packed,
        row_scale,
        rows,
        rows // 8,
        norm.epsilon if norm else 0.0,
        None,
        source,
        routed.tiles,
    )
    pack.launch(rows // packing.rows * packing.parts, 32 * packing.warps, args, pdl=True)
    product.launch(
        shape.grid(device.processors),
        shape.block,
        (
            weight.weights,
            weight.records,
            weight.channel_scale,
            packed,
            row_scale,
            weight.bias,
            None,
            out,
            None,
            None,
            routed.expert_of,
            routed.tiles,
            rows,
            0,
        ),
        shared=shape.shared,
        pdl=True,
    )
    return out
