"""A linear of 2 to 16 rows with its inputs cut into slices (split-K): host side of
cuda/gemv_split.cu.

Every CTA of gemv.cu fetches and converts all of x for itself, which with several rows takes longer
than the weights, and x no longer fits beside another kernel. A slice has 1 / slices of both;
partial sums then meet in memory, which costs about a microsecond. `choose` weighs these by
estimates (`tuned`); nothing is measured at run time.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

from torch import Tensor

from flyweight import gpu
from flyweight.gpu import Gpu
from flyweight.kernels import jit, tuned, workspace
from flyweight.kernels.linear import gemv, gemv_plan
from flyweight.kernels.linear.fused import Norm
from flyweight.kernels.linear.gemv import tickets
from flyweight.kernels.linear.gemv_plan import Plan, Wanted, plan_beside, slice_blocks
from flyweight.kernels.linear.tiles import Matrix, TiledWeight

ROWS = (2, 4, 8, 16)
WARPS = 8
WIDE_WARPS = 16
MOST_MAIL = 32 << 20  # bytes of partial sums
# bytes of a stage, and how many there must be: the first that fit
STAGES = ((16384, 3), (8192, 3), (4096, 4))


@dataclass(frozen=True)
class Choice:
    """How a linear is cut."""

    rows: int  # that the kernel is compiled for
    slices: int
    plan: Plan
    microseconds: float  # estimated

    def mail_words(self, tiles: int, grid: int) -> int:
        return (grid + tiles * 16) * self.slices * self.rows


def estimate(matrix: Matrix, rows: int, slices: int, device: Gpu) -> float:
    """Microseconds of the CTA with the largest share: weights fetched or multiplied, inputs before
    and sums after that.
    """
    numbers = tuned.of(device)
    costs = numbers.splitk
    cycles = numbers.formats[matrix.format.name].splitk_cycles
    assert cycles is not None
    tiles = math.ceil(matrix.tiles / (device.processors // slices))
    _, blocks, _ = slice_blocks(matrix, slices)
    form = matrix.format
    block = form.block_bytes + (64 * form.record_bytes / matrix.group if form.grouped else 0)
    fetched = tiles * blocks * block * costs.weight_byte
    per_block, per_tile = (fixed + row * rows for fixed, row in (cycles, costs.tile))
    multiplied = tiles * (blocks * per_block + per_tile)
    handed_over = 0.0
    if slices > 1:
        handed_over = (
            costs.hand_over + costs.per_slice * slices + tiles * 16 * rows * costs.sum_word
        )
    return (
        max(fetched, multiplied) + rows * blocks * 64 * costs.input + handed_over
    ) / numbers.clock


@functools.cache
def choose(matrix: Matrix, rows: int, device: Gpu, slices: int | None = None) -> Choice | None:
    """The cut with the least estimated time of those that leave room for another kernel; None where
    there is none.
    """
    if "gemv_splitk" not in matrix.format.kernels or not 1 < rows <= ROWS[-1]:
        return None
    most = min(tuned.of(device).splitk.most_slices, device.processors)
    padded = next(size for size in ROWS if size >= rows)
    found = [
        _cut(matrix, padded, count, device)
        for count in ((slices,) if slices else range(2, most + 1))
    ]
    return min((one for one in found if one), key=lambda choice: choice.microseconds, default=None)


def _cut(matrix: Matrix, padded: int, slices: int, device: Gpu) -> Choice | None:
    if slice_blocks(matrix, slices)[2] < 1:
        return None
    tiles = math.ceil(matrix.tiles / (device.processors // slices))
    wide = padded in tuned.of(device).formats[matrix.format.name].splitk_wide_rows
    own = gemv_plan.own_bytes(device)
    shares = (own, own // 2) if own else (0,)
    for own_bytes, (stage_bytes, fewest) in itertools.product(shares, STAGES):
        wanted = Wanted(
            tiles,
            WIDE_WARPS if wide else WARPS,
            stage_bytes=stage_bytes,
            slices=slices,
            fewest=fewest,
            own_bytes=own_bytes,
        )
        plan = plan_beside(matrix, padded, wanted, device)
        if plan is not None:
            choice = Choice(padded, slices, plan, estimate(matrix, padded, slices, device))
            fits = choice.mail_words(matrix.tiles, device.processors) * 4 <= MOST_MAIL
            return choice if fits else None
    return None


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
    """x [rows, in], 2 to 16 rows → [rows, out] (half of it for an interleaved gate/up: act(gate) ·
    up).
    """
    rows = x.shape[0]
    device = gpu.of(x.device)
    chosen = choose(weight.matrix, rows, device, slices)
    if chosen is None:
        raise ValueError(
            f"{rows} rows of {weight.in_features} inputs cannot be cut into slices for "
            f"{weight.format}"
        )
    out = weight.empty_result(rows, x.device) if out is None else out
    flags = gemv.defines(
        weight,
        chosen.rows,
        chosen.plan,
        device,
        norm=norm is not None,
        epilogue=weight.epilogue(residual),
    )
    kernel = jit.load("gemv_split.cu", defines=flags | {"SLICES": chosen.slices}).kernel(
        "gemv_split"
    )
    mailbox = workspace.current(x.device).mailbox(
        chosen.mail_words(weight.matrix.tiles, device.processors)
    )
    args = (
        weight.weights,
        weight.records,
        x,
        norm and norm.weight,
        weight.bias,
        residual,
        out,
        mailbox,
        norm.epsilon if norm else 0.0,
        rows,
        tickets(weight, rows, x.device),
    )
    kernel.launch(device.processors, chosen.plan.threads, args, shared=chosen.plan.shared, pdl=pdl)
    return out
