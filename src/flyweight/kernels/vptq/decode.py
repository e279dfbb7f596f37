"""VPTQ weights written out in 16 bits for cuBLAS or gemm.cu, into a place that all layers share.

Host side of cuda/vptq_decode.cu. Vectors that are not of 8, codebooks in slices, and codebooks that
do not fit into this device's shared memory take the slower kernels of vptq_layout.cu.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.kernels import jit, workspace
from flyweight.kernels.linear.untile import product
from flyweight.kernels.vptq.layout import CHUNK, ItemFormat, Layout
from flyweight.kernels.vptq.parts import Parts, in_order, part_arguments, share_out

WARPS = 16
COPIES = 8


def multiply(parts: Parts, x: Tensor, out: Tensor, *, residual: Tensor | None = None) -> None:
    """x [rows, in] → out [rows, outputs of all parts]; a residual may be `out` itself."""
    if len(parts) == 1 or all(part.source is None for part in parts):  # one x for all
        product(stored_x(parts[0], x), dequantize(parts), out, residual=residual)
        return
    begin = 0
    for part in parts:
        here = slice(begin, begin := begin + part.out_features)
        y = stored_x(part, x) @ dequantize((part,)).t()
        out[:, here] = y if residual is None else y.add_(residual[:, here])


def takes_silu(parts: Parts) -> bool:
    """Whether `dequantize` can write gate and up in tiles."""
    gate = parts[0]
    alike = (
        len(parts) == 2
        and gate.out_features == parts[1].out_features
        and gate.out_features % 8 == 0
    )
    return (
        alike and in_order(parts) and not gate.dense_steps and not gate.sliced and gate.length == 8
    )


def dequantize(parts: Parts, *, tiles: bool = False) -> Tensor:
    """The dense matrix [outputs of all parts, stored columns], scale and bias applied; or `tiles`,
    gate and up by turns, as gemm.cu takes them.
    """
    layout = parts[0]
    device = gpu.of(layout.stream.device)
    stored = layout.affine.numel()
    outputs = sum(part.out_features for part in parts)
    here = workspace.current(layout.stream.device)
    weight = here.dequantized(outputs * stored, layout.dtype).view(-1, stored)
    if layout.sliced or layout.length != 8 or shared_bytes(layout.form) > device.shared_most:
        for part, rows in zip(
            parts, weight.split([part.out_features for part in parts]), strict=True
        ):
            _piece_by_piece(part, rows)
        return weight
    spans = layout.chunks * CHUNK // max(layout.form.window, CHUNK)
    ctas = share_out(tuple(part.row_blocks * spans for part in parts), device.processors)
    kernel = _kernel(layout.form, layout.dtype == torch.float16, tiles)
    args = (*part_arguments(parts, ctas), weight, stored, layout.chunks, layout.dense_steps)
    kernel.launch(sum(ctas), 32 * WARPS, args, shared=shared_bytes(layout.form), pdl=True)
    return weight


def shared_bytes(form: ItemFormat) -> int:
    residual = COPIES << form.residual if form.residual else 0
    return 16 * ((1 << form.main) + residual) + WARPS * max(form.window, CHUNK) * 128


@functools.cache
def _kernel(form: ItemFormat, fp16: bool, tiles: bool) -> jit.Kernel:
    """Kept: prefill launches it from Python, and should not wait for that."""
    defines = form.defines() | {
        "PIECES": 1,
        "COPIES": COPIES,
        "WARPS": WARPS,
        "FP16": int(fp16),
        "IN_TILES": int(tiles),
    }
    return jit.load("vptq_decode.cu", defines=defines).kernel("vptq_decode")


def _piece_by_piece(layout: Layout, weight: Tensor) -> None:
    form = layout.form
    stored = layout.affine.numel()
    defines = {
        "KERNEL": 2 if layout.sliced else 1,
        "PIECES": layout.halves,
        "FP16": int(layout.dtype == torch.float16),
    }
    module = jit.load("vptq_layout.cu", defines=form.defines() | defines)
    shape = (layout.out_features, stored, layout.length)
    if layout.sliced:
        kernel = module.kernel("vptq_dequantize_sliced")
        pieces = layout.ranges
        columns = max(layout.width + 2, 64)
        args: tuple = (
            layout.stream,
            layout.offsets,
            layout.book,
            layout.residual,
            layout.dense,
            layout.affine,
            weight,
            *shape,
            layout.slices,
            layout.residual_books,
            layout.ranges,
            layout.width,
            layout.dense_begin,
            layout.dense_steps,
        )
    else:
        span = max(form.window, CHUNK)
        kernel = module.kernel("vptq_dequantize")
        pieces = math.ceil(layout.chunks * CHUNK / span / 4)
        columns = 128 * span
        args = (
            layout.stream,
            layout.book,
            layout.residual,
            layout.dense,
            layout.affine,
            weight,
            *shape,
            layout.chunks,
            layout.dense_steps,
        )
    kernel.launch(
        (pieces + layout.dense_steps // 2, layout.row_blocks),
        128,
        args,
        shared=16 * layout.halves * columns,
    )


def stored_x(layout: Layout, x: Tensor) -> Tensor:
    """x in the order of the stored columns; the weight is zero where there is no input."""
    stored = layout.affine.numel()
    if layout.source is None:
        return torch.nn.functional.pad(x, (0, stored - x.shape[1])) if stored > x.shape[1] else x
    return x[:, layout.source.long() & 0xFFFF]
