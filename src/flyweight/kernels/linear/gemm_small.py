"""A linear of 3 to 64 rows: host side of cuda/batch_pack.cu and cuda/batch.cu, and how it is cut.

x is converted once (norm weights multiplied in, W8A8 quantized) into images that the product
fetches step by step beside the weights. `choose` cuts tiles and inputs over the SMs by an estimate
(bytes, instructions, steps one after the other); nothing is measured at run time. Only mma.sync and
asynchronous copies are needed, so every GPU from Ampere on runs it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from torch import Tensor

from flyweight import gpu
from flyweight.gpu import KB, Gpu
from flyweight.kernels import jit, tuned, workspace
from flyweight.kernels.linear.fused import Norm
from flyweight.kernels.linear.tiles import EPILOGUES, Matrix, TiledWeight

ROWS = (8, 16, 32, 64)
RESERVED = 27 * KB  # of an SM: batch_pack's few bytes always fit beside
# 128 registers for each of 12 + 4
WARPS = 12
LOADERS = 4
PACK_WARPS = 8
MOST_MAIL = 64 << 20


@dataclass(frozen=True)
class Choice:
    """How a linear is cut."""

    rows: int  # that the kernel is compiled for
    slices: int
    tiles: int  # at a time
    together: int  # of one warp
    column_warps: int
    stages: int
    shared: int
    microseconds: float  # estimated, batch_pack included

    @property
    def warps(self) -> int:
        return math.ceil(self.tiles / self.together) * self.column_warps


def x_bytes(matrix: Matrix, rows: int) -> int:
    """Of an image of 128 inputs."""
    form = matrix.format
    group = matrix.group
    if not form.grouped:
        return rows * (128 if form.quantizes_input else 256)
    scales = 4 if group == 32 else 1 if group % 128 == 0 else 2
    return rows * (256 + 8 * scales)


def column_warps(matrix: Matrix, rows: int) -> int:
    """Parts that the columns are cut into: a warp holds x of a step for its part in at most 32
    registers.
    """
    return max(1, rows // (32 if matrix.format.quantizes_input else 16))


@functools.cache
def choose(matrix: Matrix, rows: int, device: Gpu, slices: int | None = None) -> Choice | None:
    """The cut with the least estimated time; None where there is none."""
    if "gemm_small" not in matrix.format.kernels or not 1 < rows <= ROWS[-1]:
        return None
    padded = next(size for size in ROWS if size >= rows)
    most = tuned.of(device).small.most_slices
    found = [
        _cut(matrix, padded, count, device)
        for count in ((slices,) if slices else range(1, most + 1))
    ]
    return min((one for one in found if one), key=lambda choice: choice.microseconds, default=None)


def _cut(matrix: Matrix, padded: int, slices: int, device: Gpu) -> Choice | None:
    form = matrix.format
    group = matrix.group
    parts = column_warps(matrix, padded)
    steps = math.ceil(matrix.in_features / 128)
    cut = group // 128 if form.grouped and 128 < group < matrix.in_features else 1
    if slices > min(device.processors, math.ceil(steps / cut)):
        return None
    records = (128 // group if group < 128 else 1) * 64 if form.grouped else 0
    step = 2 * form.block_bytes + records
    mine = math.ceil(matrix.tiles / (device.processors // slices))
    length = math.ceil(math.ceil(steps / cut) / slices) * cut
    rounds = math.ceil(mine / 16)
    tiles = math.ceil(mine / rounds)
    together = max(1 if parts == 1 else 2, math.ceil(tiles * parts / WARPS))
    stage = tiles * step + x_bytes(matrix, padded)
    stages = min(12, (device.shared_alone(RESERVED) - KB) // (stage + 16))
    if stages < 3 or together > 4:
        return None
    if slices > 1 and slices * matrix.tiles * 16 * padded * 4 > MOST_MAIL:
        return None
    shared = max(device.shared_excluding, stages * (stage + 16) + padded * 4 + 256)
    work = Work(
        weights=mine * length * step,
        inputs=rounds * length * x_bytes(matrix, padded),
        blocks=mine * length * 2,
        steps=rounds * length,
        sums=mine * 16 * padded if slices > 1 else 0,
    )
    return Choice(
        padded,
        slices,
        tiles,
        together,
        parts,
        stages,
        shared,
        estimate(matrix, work, padded, device),
    )


@dataclass(frozen=True)
class Work:
    """Of the busiest SM."""

    weights: int  # bytes
    inputs: int  # bytes
    blocks: int
    steps: int
    sums: int  # words


def estimate(matrix: Matrix, work: Work, rows: int, device: Gpu) -> float:
    """Microseconds. Fetching, multiplying and waiting overlap in part."""
    numbers = tuned.of(device)
    costs = numbers.small
    cycles = numbers.formats[matrix.format.name].small_cycles
    assert cycles is not None
    fetched = max(work.weights * costs.weight_byte, (work.weights + work.inputs) * costs.l2_byte)
    multiplied = work.blocks * (cycles[0] * column_warps(matrix, rows) + cycles[1] * rows)
    handed_over = costs.hand_over + work.sums * costs.sum_word if work.sums else 0
    return (
        costs.start + math.hypot(fetched, multiplied, work.steps * costs.step) + handed_over
    ) / numbers.clock


def multiply(
    weight: TiledWeight,
    x: Tensor,
    out: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    pdl: bool = True,
    slices: int | None = None,
) -> Tensor:
    """x [rows, in], up to 64 rows → [rows, out] (half of it for an interleaved gate/up: act(gate)
    · up).
    """
    rows = x.shape[0]
    device = gpu.of(x.device)
    matrix = weight.matrix
    chosen = choose(matrix, rows, device, slices)
    if chosen is None:
        raise ValueError(
            f"{rows} rows of {weight.in_features} inputs do not go through batch.cu as "
            f"{weight.format}"
        )
    out = weight.empty_result(rows, x.device) if out is None else out
    parts = max(1, device.processors // chosen.rows)
    pack, product = _kernels(
        weight, chosen, norm=norm is not None, epilogue=weight.epilogue(residual), parts=parts
    )
    here = workspace.current(x.device)
    packed = here.bytes(
        "small gemm", math.ceil(weight.in_features / 128) * x_bytes(matrix, chosen.rows)
    )
    factors = here.bytes("small gemm factors", 4 * chosen.rows)
    mailbox = (
        here.mailbox(chosen.slices * matrix.tiles * 16 * chosen.rows) if chosen.slices > 1 else None
    )
    pack.launch(
        max(device.processors, parts * chosen.rows),
        32 * PACK_WARPS,
        (
            x,
            norm and norm.weight,
            packed,
            factors,
            weight.static_scale,
            norm.epsilon if norm else 0.0,
            rows,
        ),
        pdl=pdl,
    )
    product.launch(
        device.processors,
        32 * (chosen.warps + LOADERS),
        (
            weight.weights,
            weight.records,
            weight.channel_scale,
            packed,
            factors,
            weight.bias,
            residual,
            out,
            mailbox,
            rows,
        ),
        shared=chosen.shared,
        pdl=pdl,
    )
    return out


def _kernels(
    weight: TiledWeight, chosen: Choice, *, norm: bool, epilogue: str, parts: int
) -> tuple[jit.Kernel, jit.Kernel]:
    types = weight.type_defines
    common = {
        **weight.format.defines(symmetric=weight.symmetric),
        "STATIC": int(weight.static),
        "FP16": types["FP16"],
        "KDIM": weight.in_features,
        "GROUP": weight.group,
        "ROWS": chosen.rows,
    }
    pack = jit.load(
        "batch_pack.cu", defines=common | {"NORM": int(norm), "PARTS": parts, "WARPS": PACK_WARPS}
    )
    product = jit.load(
        "batch.cu",
        defines=common
        | types
        | {
            "NDIM": weight.out_features,
            "EPILOGUE": EPILOGUES[epilogue],
            "BIAS": int(weight.bias is not None),
            "ROUND": chosen.tiles,
            "PER_WARP": chosen.together,
            "COLUMN_WARPS": chosen.column_warps,
            "SLICES": chosen.slices,
            "STAGES": chosen.stages,
            "LOADERS": LOADERS,
            "SHARED_BYTES": chosen.shared,
        },
    )
    return pack.kernel("batch_pack"), product.kernel("batch")
