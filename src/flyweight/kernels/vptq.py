"""VPTQ weights on the GPU: which kernel of cuda/vptq.cu multiplies with one, and its launch.

`prepare` lays a weight out once (see vptq_layout.py) and keeps nothing else of it. Up to 16 rows multiply straight from
the codebook, 8 at a time; for more the weight is decoded into a scratch matrix that torch multiplies with. A weight no
kernel takes (very long vectors, large residual books) is decoded once: `why` says so.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.kernels import jit
from flyweight.kernels.cuda_linear import scratch
from flyweight.kernels.vptq_layout import CHUNK, SLICE_BITS, Layout, lay_out, why_not
from flyweight.tensors import VectorQuant

KERNELS = {"staged": 0, "direct": 1, "sliced": 2}
FUSED_ROWS = 16
MILLION = 1 << 20

# Borders in lookups (weights / vector length), from the measurements on one H200.
DIRECT_ITEMS = MILLION // 4  # fewer do not pay for staging a codebook: 2048 × 1024
HALF_ITEMS = MILLION // 2  # so few that half of the processors are faster: the next launch stages its codebook on the rest
CROWDED_ITEMS = 2 * MILLION  # up to here two launches on one processor pay for fewer copies of the residual book
DOUBLED_ITEMS = 6 * MILLION  # from here a second copy of a codebook up to 4096 entries pays for its staging


@dataclass(frozen=True)
class Launch:
    """What of a launch is a matter of speed only."""

    kernel: str
    warps: int = 16
    copies: int = 8  # of the residual book
    resident: int = 1  # 2: small enough that the next launch stages its codebook while this one ends
    share: int = 1  # 2: one thread block for every second multiprocessor


@dataclass(frozen=True)
class Plan:
    """A launch for one number of rows, worked out."""

    launch: Launch
    rows: int
    grid: int
    shared: int  # bytes of dynamic shared memory
    phase: int = 0  # chunks whose x is staged at once
    x_columns: int = 0  # columns that the staged x has room for


@functools.cache
def processors(device: torch.device) -> int:
    return gpu.properties(device).multi_processor_count


@functools.cache
def shared_limit(device: torch.device, resident: int) -> int:
    """Shared memory of one thread block, 1 KB of which the system takes."""
    properties = gpu.properties(device)
    return min(properties.shared_memory_per_block_optin, properties.shared_memory_per_multiprocessor // resident - 1024)


def candidates(layout: Layout, rows: int) -> list[Launch]:
    """Launches for this weight, the fastest first."""
    items = layout.row_blocks * 256 * layout.chunks
    if layout.sliced:
        return [Launch("sliced", warps=32 if rows <= 2 else 16, copies=copies) for copies in (8, 4, 2, 1)]
    table = [
        (rows == 1 and layout.dense is None and items <= DIRECT_ITEMS, Launch("direct", warps=max(1, min(8, layout.chunks)))),
        (rows == 1, Launch("staged", resident=2)),
        (rows == 1 and items <= CROWDED_ITEMS, Launch("staged", resident=2, copies=4)),
        (items <= HALF_ITEMS, Launch("staged", share=2)),
    ]
    return [launch for fits, launch in table if fits] + [Launch("staged", copies=copies) for copies in (8, 4, 2, 1)]


def plan(layout: Layout, launch: Launch, rows: int, *, count: int, limit: int) -> Plan | None:
    """Work a launch out for `count` multiprocessors, or None where it does not fit into `limit` bytes."""
    blocks, halves, form = layout.row_blocks, layout.halves, layout.form
    books = 16 * halves * ((1 << form.main) + (launch.copies << form.residual if form.residual else 0))
    static = math.ceil((16 + 4 * rows * (launch.warps + 1)) / 128) * 128  # the kernel's own variables
    if launch.kernel == "direct":
        return Plan(launch, rows, blocks, 512 * layout.chunks) if 512 * layout.chunks <= 16384 else None
    if launch.kernel == "sliced":
        shared = books + 2 * rows * (layout.dense_begin + 32 * layout.dense_steps)
        grid = max(1, min(count // layout.slices, blocks)) * layout.slices
        return Plan(launch, rows, grid, shared) if shared + static <= limit else None
    grid = max(1, min(count // launch.share, blocks))
    here, align = math.ceil(blocks / grid), max(1, form.window // CHUNK)
    for several in (False, True):  # phases: then the sums of the row blocks need room of their own
        fixed = books + 4 * rows * 8 * halves * (launch.warps + here + here * several)
        most = ((limit - static - fixed) // (2 * rows) - 32 * layout.dense_steps) // (256 * align) * align  # chunks of x
        if several and (launch.resident > 1 or most < CHUNK):
            return None
        if several or most >= layout.chunks:
            break
    phase = math.ceil(math.ceil(layout.chunks / math.ceil(layout.chunks / most)) / align) * align
    x_columns = 256 * min(phase, layout.chunks) + 32 * layout.dense_steps
    return Plan(launch, rows, grid, fixed + 2 * rows * x_columns, phase, x_columns)


@dataclass(frozen=True, eq=False)
class Vptq:
    """A weight in the kernels' layout; call it with x [..., in]."""

    layout: Layout
    arrived: Tensor | None  # sliced: int32 counters, zero between launches
    plans: dict[tuple[int, Launch | None], Plan | None] = field(default_factory=dict)
    why: str = "up to 16 rows straight from the codebook; more are written out in 16 bits for cuBLAS"

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    def __call__(self, x: Tensor, out: Tensor | None = None, *, launch: Launch | None = None, pdl: bool = True) -> Tensor:
        layout = self.layout
        if out is None:
            out = torch.empty(*x.shape[:-1], layout.out_features, dtype=layout.dtype, device=x.device)
        flat, result = x.reshape(-1, layout.in_features).contiguous(), out.view(-1, layout.out_features)
        if flat.shape[0] > FUSED_ROWS:
            torch.mm(stored_x(layout, flat), dequantize(layout).t(), out=result)
            return out
        for begin in range(0, flat.shape[0], 8):
            self._multiply(flat[begin : begin + 8], result[begin : begin + 8], launch, pdl)
        return out

    def _multiply(self, x: Tensor, out: Tensor, launch: Launch | None, pdl: bool) -> None:
        step = 1 << (x.shape[0] - 1).bit_length()
        while (chosen := self.choose(step, x.device, launch)) is None:
            if step == 1:
                raise ValueError(f"{self.layout.in_features} inputs do not fit into the shared memory of {x.device}")
            step //= 2
        for begin in range(0, x.shape[0], step):
            run(self, chosen, x[begin : begin + step], out[begin : begin + step], pdl=pdl)

    def choose(self, rows: int, device: torch.device, launch: Launch | None = None) -> Plan | None:
        """The first candidate that fits, or the given one."""
        key = (rows, launch)
        if key not in self.plans:
            tried = [launch] if launch else candidates(self.layout, rows)
            plans = (plan(self.layout, c, rows, count=processors(device), limit=shared_limit(device, c.resident)) for c in tried)
            self.plans[key] = next((p for p in plans if p), None)
        return self.plans[key]


def run(weight: Vptq, chosen: Plan, x: Tensor, out: Tensor, *, pdl: bool) -> None:
    """One launch of up to `chosen.rows` rows."""
    layout, launch = weight.layout, chosen.launch
    defines = layout.form.defines() | {
        "KERNEL": KERNELS[launch.kernel], "HALVES": layout.halves, "COPIES": launch.copies, "ROWS": chosen.rows,
        "FP16": int(layout.dtype == torch.float16), "WARPS": launch.warps, "RESIDENT": launch.resident,
    }
    kernel = jit.load("vptq.cu", defines=defines).kernel(f"vptq_{launch.kernel}")
    columns = (layout.affine, layout.source, x, out)
    shape = (x.shape[0], layout.in_features, layout.out_features, layout.length)
    if launch.kernel == "direct":
        args: tuple = (layout.stream, layout.book, layout.residual, *columns, *shape, layout.chunks)
    elif launch.kernel == "staged":
        args = (layout.stream, layout.book, layout.residual, layout.dense, *columns, *shape, layout.row_blocks, layout.chunks,
                chosen.phase, chosen.x_columns, layout.dense_steps)
    else:
        workspace = torch.empty(layout.slices * chosen.rows * layout.row_blocks * 8 * layout.halves, device=x.device)
        args = (layout.stream, layout.offsets, layout.book, layout.residual, layout.dense, *columns, workspace, weight.arrived,
                *shape, layout.row_blocks, layout.slices, layout.residual_books, layout.ranges, layout.width,
                layout.dense_begin, layout.dense_steps)
    kernel.launch(chosen.grid, 32 * launch.warps, args, shared=chosen.shared, pdl=pdl)


def dequantize(layout: Layout) -> Tensor:
    """The dense matrix [out, stored columns], scale and bias applied, in the scratch that all layers share."""
    form, stored = layout.form, layout.affine.numel()
    weight = scratch(layout.out_features * stored, layout.dtype, layout.stream.device).view(-1, stored)
    defines = {"KERNEL": 2 if layout.sliced else 1, "HALVES": layout.halves, "FP16": int(layout.dtype == torch.float16)}
    module = jit.load("vptq_layout.cu", defines=form.defines() | defines)
    shape = (layout.out_features, stored, layout.length)
    if layout.sliced:
        kernel, pieces, columns = module.kernel("vptq_dequantize_sliced"), layout.ranges, max(layout.width + 2, 64)
        args: tuple = (layout.stream, layout.offsets, layout.book, layout.residual, layout.dense, layout.affine, weight, *shape,
                       layout.slices, layout.residual_books, layout.ranges, layout.width, layout.dense_begin, layout.dense_steps)
    else:
        span = max(form.window, CHUNK)
        kernel, pieces, columns = module.kernel("vptq_dequantize"), math.ceil(layout.chunks * CHUNK / span / 4), 128 * span
        args = (layout.stream, layout.book, layout.residual, layout.dense, layout.affine, weight, *shape, layout.chunks,
                layout.dense_steps)
    kernel.launch((pieces + layout.dense_steps // 2, layout.row_blocks), 128, args, shared=16 * layout.halves * columns)
    return weight


def stored_x(layout: Layout, x: Tensor) -> Tensor:
    """x in the order of the stored columns; the weight is zero where there is no input."""
    stored = layout.affine.numel()
    if layout.source is None:
        return torch.nn.functional.pad(x, (0, stored - x.shape[1])) if stored > x.shape[1] else x
    return x[:, layout.source.long() & 0xFFFF]


@dataclass(frozen=True, eq=False)
class Decoded:
    """A weight no kernel takes, decoded once."""

    weight: Tensor
    why: str

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight)


def worth_doubling(tensor: VectorQuant) -> bool:
    """Whether the codebook is stored twice, so that each lookup can choose between two banks."""
    main, residual = tensor.index_bits
    columns = tensor.in_features - tensor.outliers
    small = tensor.length <= 8 and main < SLICE_BITS and main + residual <= 21 and columns <= 16384
    return small and tensor.codebook.shape[0] == 1 and tensor.indices.shape[1] * columns >= DOUBLED_ITEMS


def prepare(tensor: VectorQuant, *, dtype: torch.dtype, doubled: bool | None = None) -> Vptq | Decoded:
    """Lay a weight out for the kernels, or decode it where none takes it."""
    if tensor.experts is not None:
        raise ValueError("a weight per expert: prepare them one by one")
    reason = why_not(tensor, dtype)
    if reason:
        return Decoded(tensor.dequantize(dtype), f"decoded once: {reason}")
    layout = lay_out(tensor, dtype=dtype, doubled=worth_doubling(tensor) if doubled is None else doubled)
    arrived = torch.zeros(1024, dtype=torch.int32, device=tensor.device) if layout.sliced else None
    return Vptq(layout, arrived)
