"""Rows of x times VPTQ weights that are never written out: host side of cuda/vptq_pack.cu and
vptq_rows.cu (Hopper).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from flyweight import gpu
from flyweight.gpu import Gpu
from flyweight.kernels import jit, workspace
from flyweight.kernels.linear.fused import KvPrefetch, PackedInput
from flyweight.kernels.vptq.layout import CHUNK
from flyweight.kernels.vptq.parts import MOST as MOST_PARTS
from flyweight.kernels.vptq.parts import Ends, Parts, in_order, part_arguments, share_out

PACK_WARPS = 4
PACKERS = 6  # thread blocks of vptq_pack.cu for a processor, at most
# bytes left for a thread block of vptq_pack.cu on the same SM, and for the kernel's own variables
BESIDE = 2176
# warps that multiply, each two row blocks of a tile → steps whose lookups are under way
AHEAD = {12: 1, 8: 2}
# Rows of a launch → steps of 32 columns in a stage of x; how long a lookup of 8 warps takes where
# that of 12 takes 1; lookups of 32 items in the time that a share of a second tile costs. More rows
# are faster written out.
SHAPES = {
    8: (8, 1.1, 500),
    16: (8, 1.1, 500),
    32: (4, 1.0, 500),
    64: (4, 0.97, 900),
    128: (2, 1.0, 900),
}
MOST = max(SHAPES)
PREFETCHED_BYTES = 40 << 20  # of keys and values that L2 holds beside what passes through it
PAUSE = 300  # nanoseconds after each piece of them, so that items do not queue behind


@dataclass(frozen=True)
class Shape:
    """What the kernel is compiled for, besides the weight's form."""

    tokens: int
    warps: int
    steps: int  # of a stage
    stages: int
    copies: int  # of the residual book
    shared: int
    paired: bool  # tiles are shared by pairs of thread blocks

    @property
    def registers(self) -> int:
        """At most so many a thread at launch: 64 of 128 threads of vptq_pack.cu are left."""
        return (65536 - 8192) // (32 * (self.warps + 4)) // 8 * 8

    @property
    def defines(self) -> dict[str, int]:
        return {
            "TOKENS": self.tokens,
            "WARPS": self.warps,
            "STAGE_STEPS": self.steps,
            "AHEAD": AHEAD[self.warps],
            "STAGES": self.stages,
            "COPIES": self.copies,
            "REGISTERS": self.registers,
            **({"PAIRED": 1} if self.paired else {}),
        }


EMPTY = Shape(0, 8, 0, 0, 0, 0, False)
NOTHING = torch.empty(0)


@functools.cache
def shape_for(
    main: int, residual: int, tokens: int, warps: int, limit: int, *, paired: bool = False
) -> Shape | None:
    """For index bits; None where two stages do not fit into `limit` bytes."""
    steps, _, _ = SHAPES[tokens]
    sums = 32 * tokens * warps if paired else 0  # of half a tile
    for copies in (8, 4, 2):
        fixed = 16 * ((1 << main) + (copies << residual if residual else 0)) + sums
        stage = 64 * tokens * steps
        stages = min(8, (limit - BESIDE - fixed) // (stage + 16))
        if stages >= 2:
            return Shape(
                tokens, warps, steps, stages, copies, fixed + stages * (stage + 16) + 16, paired
            )
    return None


@dataclass(frozen=True)
class Cut:
    """The work of a launch."""

    ctas: tuple[int, ...]  # thread blocks of each part
    most: float  # units of the busiest
    apart: int = 0  # of them for a last tile that is small
    each: int = 0  # of them for every other tile; 0: they are cut anywhere

    def paired(self, tokens: int) -> bool:
        """Whether pairs of thread blocks have as many whole columns of 8 rows to end each."""
        half = tokens // 16
        shared = [n for n in (self.each, self.apart) if n]
        return (
            half > 0
            and self.each > 0
            and all(n % 2 == 0 and n <= 8 and half % (n // 2) == 0 for n in shared)
        )


@functools.cache
def cut(blocks: tuple[int, ...], tile: int, units: int, count: int, spanning: float) -> Cut:
    """For row blocks of parts; shares of two tiles cost `spanning` units. So either every tile has
    as many thread blocks, those with few row blocks at least half as many, or the line of all units
    is cut evenly.
    """
    tiles = [-(-n // tile) for n in blocks]
    small = [0 < n % tile <= tile // 3 for n in blocks]
    spread = share_out(tuple(units * n for n in tiles), count)
    found = [
        Cut(
            spread,
            spanning + max(-(-units * n // ctas) for n, ctas in zip(tiles, spread, strict=True)),
        )
    ]
    whole = sum(tiles) - sum(small)
    for each in range(1, min(count // max(1, whole), units) + 1):
        apart = min(each, (count - each * whole) // sum(small)) if any(small) else 0
        if apart >= each / 2 or not any(small):
            ctas = tuple(
                each * (n - last) + apart * last for n, last in zip(tiles, small, strict=True)
            )
            found.append(Cut(ctas, -(-units // each), apart, each))
    return min(found, key=lambda one: one.most)


def cut_for(parts: Parts, tokens: int, warps: int, count: int) -> tuple[Cut, float]:
    """And how many lookups of 32 items the busiest thread block has."""
    layout, (_, eight, spanning) = parts[0], SHAPES[tokens]
    span = max(CHUNK, layout.form.window)
    # of a tile; of a unit
    units = layout.chunks * CHUNK // span + (layout.dense_steps > 0)
    lookups = 2 * warps * span
    found = cut(
        tuple(part.row_blocks for part in parts), 2 * warps, units, count, spanning / lookups
    )
    return found, found.most * lookups * (eight if warps == 8 else 1)


def warps_for(parts: Parts, tokens: int, count: int) -> int:
    """With which the busiest thread block is done first."""
    most = 12 if tokens <= 64 else 8  # sums of more rows leave no registers for more
    return min(
        (warps for warps in AHEAD if warps <= most),
        key=lambda warps: cut_for(parts, tokens, warps, count)[1],
    )


def choose(parts: Parts, rows: int, device: Gpu) -> Shape | None:
    """The smallest shape that takes so many rows, up to MOST, at once."""
    layout = parts[0]
    tokens = next(tokens for tokens in SHAPES if tokens >= rows)
    warps = warps_for(parts, tokens, device.processors)
    paired = cut_for(parts, tokens, warps, device.processors)[0].paired(tokens)
    return shape_for(
        layout.form.main, layout.form.residual, tokens, warps, device.shared_most, paired=paired
    )


def takes(parts: Parts, rows: int, device: Gpu) -> bool:
    layout = parts[0]
    if layout.sliced or layout.length != 8 or not device.has_warpgroups:
        return False
    return choose(parts, rows, device) is not None


@dataclass(frozen=True, eq=False)
class VptqInput(PackedInput):
    """x of a linear in the order of its products, its columns' scales in it: by vptq_pack.cu, or by
    decode attention.
    """

    # float32 [part, row, slice]: they add up to what the columns' biases add; then squares of the
    # rows
    sums: Tensor = NOTHING
    part_bytes: int = 0
    slices: int = 0
    late: bool = False  # the norm's factor is left to the products
    parts: Parts = ()
    shape: Shape = EMPTY

    @classmethod
    def make(cls, parts: Parts, shape: Shape, rows: int, slices: int, *, late: bool) -> VptqInput:
        affine = parts[0].affine
        stored = affine.numel()
        here = workspace.current(affine.device)
        part_bytes = -(-stored // (32 * shape.steps)) * shape.steps * shape.tokens * 64
        sums = here.bytes("vptq sums", 4 * (len(parts) + 1) * rows * slices)
        return cls(
            here.bytes("vptq packed", len(parts) * part_bytes),
            rows,
            shape.tokens // 8,
            {"VECTORS": shape.steps},
            (affine, sums),
            sums=sums,
            part_bytes=part_bytes,
            slices=slices,
            late=late,
            parts=parts,
            shape=shape,
        )

    @property
    def squares(self) -> Tensor | None:
        return self.sums[4 * len(self.parts) * self.rows * self.slices :] if self.late else None


def prefetch_arguments(wanted: KvPrefetch, count: int) -> tuple[Tensor | int, ...]:
    """Keys and values that come to L2 while lookups leave memory idle: with how many pages each of
    `count` CTAs asks for.
    """
    page = wanted.keys.shape[1]
    token = wanted.keys.shape[2] * wanted.keys.shape[3] * wanted.keys.element_size()
    return (
        wanted.lengths,
        wanted.tables,
        wanted.keys,
        wanted.values,
        wanted.tables.shape[1],
        len(wanted.lengths),
        page,
        token,
        -(-PREFETCHED_BYTES // (2 * page * token * count)),
        PAUSE,
    )


def packed_results(
    parts: Parts, rows: int, kv_heads: int, device: torch.device
) -> VptqInput | None:
    """Where decode attention leaves x, a slice for each kv head."""
    shape = choose(parts, rows, gpu.of(device))
    if len(parts) > 1 or not in_order(parts) or shape is None:
        return None
    return VptqInput.make(parts, shape, rows, kv_heads, late=False)


def multiply(
    parts: Parts,
    x: Tensor | PackedInput,
    out: Tensor,
    ends: Ends,
    *,
    prefetch: KvPrefetch | None = None,
    pdl: bool = True,
) -> None:
    """x [up to MOST rows, in] → out [rows, outputs of all parts]."""
    layout = parts[0]
    device = gpu.of(out.device)
    if isinstance(x, Tensor):
        shape = choose(parts, x.shape[0], device)
        assert shape is not None
        x = pack(parts, x, ends, shape, count=device.processors, pdl=pdl)
    assert isinstance(x, VptqInput)
    shape = x.shape
    work, _ = cut_for(parts, shape.tokens, shape.warps, device.processors)
    kernel = jit.load(
        "vptq_rows.cu",
        defines=layout.form.defines()
        | shape.defines
        | {
            "FP16": int(layout.dtype == torch.float16),
            "PIECES": 1,
            "DENSE": int(layout.dense_steps > 0),
            **({"COMING": 1} if prefetch else {}),
        },
    ).kernel("vptq_rows")
    partials = workspace.current(out.device).mailbox(
        device.processors * 2 * shape.tokens * shape.warps * 16
    )
    args = (
        *part_arguments(parts, work.ctas),
        x.data,
        x.sums,
        x.squares,
        ends.bias,
        ends.residual,
        out,
        partials,
        float(ends.epsilon),
        x.rows,
        out.shape[1],
        layout.in_features,
        layout.chunks,
        layout.dense_steps,
        x.part_bytes,
        x.slices,
        work.apart,
        *(prefetch_arguments(prefetch, sum(work.ctas)) if prefetch else ()),
    )
    grid = device.processors // 2 * 2 if shape.paired else device.processors
    kernel.launch(
        grid, 32 * (shape.warps + 4), args, shared=shape.shared, pdl=pdl, cluster=1 + shape.paired
    )


def pack(parts: Parts, x: Tensor, ends: Ends, shape: Shape, *, count: int, pdl: bool) -> VptqInput:
    layout = parts[0]
    rows = x.shape[0]
    stored = layout.affine.numel()
    whole = in_order(parts)
    slices = -(-stored // (256 * PACK_WARPS))
    if len(parts) == 1:
        slices = max(1, min(slices, PACKERS * count // rows))
    # fewer all fit beside the products before: then the fewer the better
    apart = len(parts) > 1 and rows * slices > count
    late = whole and ends.norm is not None and layout.dtype != torch.float16
    packed = VptqInput.make(parts, shape, rows, slices, late=late)
    kernel = jit.load(
        "vptq_pack.cu",
        defines=ends.defines
        | {
            "FP16": int(layout.dtype == torch.float16),
            "STAGE_STEPS": shape.steps,
            "WARPS": PACK_WARPS,
            "PARTS": len(parts),
            "APART": int(apart),
            "BOOK_BYTES": 16 << layout.form.main,
            "WHOLE": int(whole),
        },
    ).kernel("vptq_pack")
    columns = [tensor for part in parts for tensor in (part.source, part.pairs, part.book)]
    given = (
        *columns,
        *[None] * (3 * MOST_PARTS - len(columns)),
        x,
        ends.norm,
        packed.data,
        packed.sums,
        float(ends.epsilon),
        rows,
        layout.in_features,
        stored,
        packed.groups,
        slices,
    )
    kernel.launch(rows * slices * (len(parts) if apart else 1), 32 * PACK_WARPS, given, pdl=pdl)
    return packed
