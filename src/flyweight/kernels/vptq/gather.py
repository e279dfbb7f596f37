"""One or two rows straight from the codebook, up to 8 without warpgroup products: host side of
cuda/vptq.cu and, for codebooks in bytes, of cuda/vptq_bytes.cu. gather_plan.py chooses launches.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.kernels import jit, workspace
from flyweight.kernels.vptq.gather_plan import Launch, Plan, choose
from flyweight.kernels.vptq.layout import CHUNK, Layout
from flyweight.kernels.vptq.parts import Ends, Parts, part_arguments

KERNELS = {"staged": 0, "direct": 1, "sliced": 2}
FEW_ROWS = 8  # of vptq.cu at once


def defines_of(layout: Layout, launch: Launch, ends: Ends, *, rows: int) -> dict[str, int]:
    """What vptq.cu is compiled for."""
    chosen = {
        "KERNEL": KERNELS[launch.kernel],
        "PIECES": layout.halves,
        "COPIES": launch.copies,
        "ROWS": rows,
        "FP16": int(layout.dtype == torch.float16),
        "WARPS": launch.warps,
        "RESIDENT": launch.resident,
    }
    split = {"SPLIT": launch.split} if launch.split > 1 else {}
    return layout.form.defines() | ends.defines | chosen | split


def run(
    parts: Parts, chosen: Plan, x: Tensor, out: Tensor, ends: Ends, *, arrived: Tensor, pdl: bool
) -> None:
    """One launch of up to `chosen.rows` rows. `arrived`: counters of thread blocks that meet
    (sliced).
    """
    layout = parts[0]
    launch = chosen.launch
    if launch.kernel == "bytes":
        run_bytes(parts, chosen, x, out, ends, pdl=pdl)
        return
    defines = defines_of(layout, launch, ends, rows=chosen.rows)
    kernel = jit.load("vptq.cu", defines=defines).kernel(f"vptq_{launch.kernel}")
    if launch.kernel == "staged":
        args = staged_arguments(parts, chosen, x, out, ends)
    else:
        args = plain_arguments(layout, chosen, x, out, arrived)
    kernel.launch(sum(chosen.ctas), 32 * launch.warps, args, shared=chosen.shared, pdl=pdl)


def staged_arguments(
    parts: Parts, chosen: Plan, x: Tensor, out: Tensor, ends: Ends
) -> tuple[Any, ...]:
    """Of vptq_staged."""
    layout = parts[0]
    args = (
        *part_arguments(parts, chosen.ctas),
        x,
        ends.norm,
        ends.bias,
        ends.residual,
        out,
        float(ends.epsilon),
        x.shape[0],
        layout.in_features,
        out.shape[1],
        layout.length,
        layout.chunks,
        chosen.phase,
        chosen.x_columns,
        layout.dense_steps,
    )
    if chosen.launch.split == 1:
        return args
    letters = chosen.letters(layout)
    return (*args, workspace.current(x.device).mailbox(letters * sum(chosen.ctas)), letters)


def plain_arguments(
    layout: Layout, chosen: Plan, x: Tensor, out: Tensor, arrived: Tensor
) -> tuple[Any, ...]:
    """Of vptq_direct or vptq_sliced."""
    columns = (layout.affine, layout.source, x, out)
    shape = (x.shape[0], layout.in_features, layout.out_features, layout.length)
    if chosen.launch.kernel == "direct":
        books = (layout.stream, layout.book, layout.residual)
        return (*books, *columns, *shape, layout.chunks)
    partial = torch.empty(
        layout.slices * chosen.rows * layout.row_blocks * 8 * layout.halves, device=x.device
    )
    return (
        layout.stream,
        layout.offsets,
        layout.book,
        layout.residual,
        layout.dense,
        *columns,
        partial,
        arrived,
        *shape,
        layout.row_blocks,
        layout.slices,
        layout.residual_books,
        layout.ranges,
        layout.width,
        layout.dense_begin,
        layout.dense_steps,
    )


def run_bytes(parts: Parts, chosen: Plan, x: Tensor, out: Tensor, ends: Ends, *, pdl: bool) -> None:
    """One launch of vptq_bytes.cu."""
    layout = parts[0]
    launch = chosen.launch
    threads = 32 * launch.warps
    defines = (
        layout.form.defines()
        | ends.defines
        | {
            "PIECES": 1,
            "COPIES": launch.copies,
            "ROWS": chosen.rows,
            "FP16": int(layout.dtype == torch.float16),
            "WARPS": launch.warps,
            "RESIDENT": launch.resident,
            "UNITS": math.ceil(32 * layout.chunks / threads),
        }
    )
    # the most that x may be, so that the sums of a lane's products fit into 32 bits
    most = min(32767, (1 << 31) // (255 * CHUNK * layout.chunks))
    args = (
        *part_arguments(parts, chosen.ctas, byte_books=True),
        x,
        ends.norm,
        ends.bias,
        ends.residual,
        out,
        float(ends.epsilon),
        float(most),
        x.shape[0],
        layout.in_features,
        out.shape[1],
        layout.chunks,
        chosen.most_blocks,
    )
    kernel = jit.load("vptq_bytes.cu", defines=defines).kernel("vptq_bytes")
    kernel.launch(sum(chosen.ctas), threads, args, shared=chosen.shared, pdl=pdl)


def gather(
    parts: Parts,
    x: Tensor,
    out: Tensor,
    ends: Ends,
    *,
    arrived: Tensor,
    launch: Launch | None = None,
    pdl: bool = True,
) -> None:
    """x [rows, in] → out, a few rows at a time."""
    device = gpu.of(x.device)
    step = 1 << (min(x.shape[0], FEW_ROWS) - 1).bit_length()
    if step == 4 and not parts[0].sliced:
        step = FEW_ROWS  # which brings x in a better order
    while (chosen := choose(parts, step, device, launch, plain=not ends.some)) is None:
        if step == 1:
            raise ValueError(
                f"{parts[0].in_features} inputs do not fit into the shared memory of {x.device}"
            )
        step //= 2
    for begin in range(0, x.shape[0], step):
        here = slice(begin, begin + step)
        run(parts, chosen, x[here], out[here], ends.of(here), arrived=arrived, pdl=pdl)


def direct(parts: Parts, x: Tensor, out: Tensor, *, arrived: Tensor, pdl: bool) -> None:
    """x [rows, in] → out, a launch for each row of each part."""
    begin = 0
    for part in parts:
        columns = slice(begin, begin := begin + part.out_features)
        launch = Launch("direct", warps=max(1, min(8, part.chunks)))
        chosen = Plan(launch, 1, (part.row_blocks,), 512 * part.chunks)
        for row in range(x.shape[0]):
            target = out[row : row + 1, columns]
            run((part,), chosen, x[row : row + 1], target, Ends(), arrived=arrived, pdl=pdl)
