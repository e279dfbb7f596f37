"""One block of the column recursions of GPTQ and of coordinate descent in one launch instead of a
thousand.

    x = w_i                (GPTQ)        x = v_i + w_i / m_ii        (descent: v the values so far,
                                                                     w the pull on them)
    q = the value of x's code on the column's grid
    e = (x − q) / m_ii     (GPTQ)        e = q − v_i                 (descent)
    w_j −= m_ij · e        for every later column j of the block

Rows of the weight (outputs) are independent: a program takes OUTPUTS of them and walks the columns
with its tile [columns, OUTPUTS] in registers.

            out →  ┌────┬────┬────┐   each program: one strip, top to bottom
      columns ↓    │ p0 │ p1 │ p2 │
                   └────┴────┴────┘
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

OUTPUTS = 32
ROUNDING = tl.constexpr(
    12582912.0
)  # 1.5 · 2²³: adding and taking it away rounds to the nearest whole number, ties to even


@triton.jit
def _walk(
    tile_at,
    matrix_at,
    scales_at,
    zeros_at,
    kept_at,
    values_at,
    codes_at,
    errors_at,
    columns,
    outputs,
    steps,
    DESCENT: tl.constexpr,
    MASKED: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    real = output < outputs
    tile = tl.load(
        tile_at + column[:, None] * outputs + output[None],
        (column < columns)[:, None] & real[None],
        0.0,
    )
    for i in range(columns):
        at = i * outputs + output
        pivot = tl.load(matrix_at + i * columns + i)
        x = tl.sum(tl.where(column[:, None] == i, tile, 0.0), 0)
        if DESCENT:
            value = tl.load(values_at + at, real, 0.0)
            x = value + tl.div_rn(x, pivot)
        scale = tl.load(scales_at + at, real, 1.0)
        zero = tl.load(zeros_at + at, real, 0.0)
        level = tl.minimum(tl.maximum(tl.div_rn(x, scale), -1000000.0), 1000000.0)
        code = tl.minimum(tl.maximum((level + ROUNDING) - ROUNDING + zero, 0.0), steps)
        if MASKED:
            code = tl.where(tl.load(kept_at + at, real, 0) != 0, code, zero)
        rounded = (code - zero) * scale
        if DESCENT:
            error = rounded - value
        else:
            error = tl.div_rn(x - rounded, pivot)
        tl.store(codes_at + at, code, real)
        tl.store(errors_at + at, error, real)
        row = tl.load(matrix_at + i * columns + column, (column < columns) & (column > i), 0.0)
        tile -= row[:, None] * error[None]


def walk(
    tile: Tensor,
    matrix: Tensor,
    scales: Tensor,
    zeros: Tensor,
    *,
    steps: int,
    kept: Tensor | None = None,
    values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(codes, errors), each [columns, out], of a tile [columns, out] under `matrix` [columns,
    columns]; with `values`: descent.

    All float32 and contiguous.
    """
    columns, outputs = tile.shape
    codes = torch.empty_like(tile)
    errors = torch.empty_like(tile)
    mask = tile if kept is None else kept.to(torch.int8).contiguous()
    _walk[(triton.cdiv(outputs, OUTPUTS),)](
        tile,
        matrix,
        scales,
        zeros,
        mask,
        tile if values is None else values,
        codes,
        errors,
        columns,
        outputs,
        float(steps),
        DESCENT=values is not None,
        MASKED=kept is not None,
        COLUMNS=triton.next_power_of_2(columns),
        OUTPUTS=OUTPUTS,
        num_warps=4,
    )
    return codes, errors
