"""Which launch gathers a few rows of a VPTQ weight on a GPU: candidates by size, the fastest first,
of which the first that fits is taken. gather.py runs it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flyweight.gpu import KB, Gpu
from flyweight.kernels import dependent_launch
from flyweight.kernels.vptq.layout import BANKS, CHUNK, SLICE_BITS, ItemFormat, Layout
from flyweight.kernels.vptq.parts import Parts, share_out
from flyweight.tensors import VectorQuant

BYTE_ROWS = 2  # of vptq_bytes.cu
BYTE_COPIES = (16, 8, 4, 2, 1)  # of the residual book, of which the first that fits is taken
MILLION = 1 << 20

# Borders in lookups (weights / vector length), from benchmarks/h200/000-vptq.jsonl and
# 001-vptq.jsonl.
DIRECT_ITEMS = MILLION // 4  # fewer do not pay for staging a codebook: 2048 × 1024
# so few that half of the processors are faster: the next launch stages its codebook on the rest
HALF_ITEMS = MILLION // 2
# up to here two launches on one processor pay for fewer copies of the residual book
CROWDED_ITEMS = 2 * MILLION
# the same two borders where older GPUs overlap launches (dependent_launch.py)
HALF_ITEMS_BY_COUNTERS = MILLION
# by copies of the residual book, of which lookups meet in the fewer banks the fewer there are
CROWDED_ITEMS_BY_COUNTERS = {4: 2 * MILLION, 2: 2 * MILLION, 1: MILLION}
# from here a second copy of a codebook up to 4096 entries pays for its staging
DOUBLED_ITEMS = 6 * MILLION
# so few of so small a weight that fewer warps are faster before Hopper
# (workshop/vptq-launches-h200.jsonl)
FEW_CHUNKS = 8
# Slices that the columns of a row block are cut into, where that takes less time: in chunks of
# lookups, what x of a chunk takes to stage and what handing sums over does. Two were never faster
# by more than 1 %, eight slower (workshop/vptq-launches-h200.jsonl).
SPLIT = 4
STAGED_CHUNK = 0.3
HAND_OVER = 20.0
WORTH_SLICING = 0.97  # 8192 × 28672 is slower in slices


@dataclass(frozen=True)
class Launch:
    """What of a launch is a matter of speed only."""

    kernel: str
    warps: int = 16
    copies: int = 8  # of the residual book
    # 2: small enough that the next launch stages its codebook while this one ends
    resident: int = 1
    share: int = 1  # 2: one thread block for every second multiprocessor
    split: int = 1  # neighbouring thread blocks with the same row blocks, each a slice of columns


@dataclass(frozen=True)
class Plan:
    """A launch for one number of rows, worked out."""

    launch: Launch
    rows: int
    ctas: tuple[int, ...]  # of each part
    shared: int  # bytes of dynamic shared memory
    phase: int = 0  # chunks whose x is staged at once
    x_columns: int = 0  # columns that the staged x has room for
    most_blocks: int = 0  # row blocks of a thread block

    def letters(self, layout: Layout) -> int:
        """Words that a thread block of several slices leaves: sums, and those of squares."""
        return self.rows * (8 * layout.halves * self.most_blocks + 1)


def shared_limit(device: Gpu, resident: int) -> int:
    """Shared memory of one thread block, 1 KB of which the system takes."""
    return min(device.shared_most, device.shared_memory_per_multiprocessor // resident - KB)


def candidates(parts: Parts, rows: int, device: Gpu, *, plain: bool = True) -> list[Launch]:
    """Launches for this weight, the fastest first. `plain`: nothing but the product."""
    layout = parts[0]
    items = sum(part.row_blocks for part in parts) * 256 * layout.chunks
    if layout.sliced:
        return [
            Launch("sliced", warps=32 if rows <= 2 else 16, copies=copies)
            for copies in (8, 4, 2, 1)
        ]
    alone = rows == 1 and plain and len(parts) == 1
    staged_ahead = device.has_dependent_launch  # while the launch before ends
    by_counters = not staged_ahead and dependent_launch.enabled  # the same, on older GPUs
    small = items <= HALF_ITEMS and layout.chunks <= FEW_CHUNKS
    table = [
        (
            alone and layout.dense is None and items <= DIRECT_ITEMS,
            Launch("direct", warps=max(1, min(8, layout.chunks))),
        ),
        (staged_ahead and rows == 1, Launch("staged", resident=2)),
        (
            staged_ahead and rows == 1 and items <= CROWDED_ITEMS,
            Launch("staged", resident=2, copies=4),
        ),
        (staged_ahead and plain and items <= HALF_ITEMS, Launch("staged", share=2)),
        *(
            (
                by_counters and rows == 1 and items <= most,
                Launch("staged", resident=2, copies=copies, warps=8 if small else 16),
            )
            for copies, most in CROWDED_ITEMS_BY_COUNTERS.items()
        ),
        *(
            (
                by_counters and rows == 1 and plain and items <= HALF_ITEMS_BY_COUNTERS,
                Launch("staged", share=2, copies=copies),
            )
            for copies in (8, 4, 2, 1)
        ),
        (not staged_ahead and small, Launch("staged", warps=8)),
    ]
    if layout.byte_book is not None and rows <= BYTE_ROWS:
        smallest = [launch for fits, launch in table[:1] if fits]
        return smallest + [Launch("bytes", copies=copies) for copies in BYTE_COPIES]
    return [launch for fits, launch in table if fits] + [
        Launch("staged", copies=copies) for copies in (8, 4, 2, 1)
    ]


def plan(parts: Parts, launch: Launch, rows: int, *, count: int, limit: int) -> Plan | None:
    """Work a launch out for `count` multiprocessors, or None where it does not fit into `limit`
    bytes.
    """
    layout = parts[0]
    if launch.kernel == "bytes":
        return byte_plan(parts, launch, rows, count=count, limit=limit)
    halves = layout.halves
    form = layout.form
    books = (
        16 * halves * ((1 << form.main) + (launch.copies << form.residual if form.residual else 0))
    )
    # the kernel's own variables
    squares = 4 * rows * (launch.split > 1)
    static = math.ceil((40 + 8 * rows * (launch.warps + 1) + squares) / 128) * 128
    if launch.kernel == "direct":
        fits = 512 * layout.chunks <= 16384
        return Plan(launch, rows, (layout.row_blocks,), 512 * layout.chunks) if fits else None
    if launch.kernel == "sliced":
        shared = books + 2 * rows * (layout.dense_begin + 32 * layout.dense_steps)
        grid = max(1, min(count // layout.slices, layout.row_blocks)) * layout.slices
        return Plan(launch, rows, (grid,), shared) if shared + static <= limit else None
    blocks = tuple(part.row_blocks for part in parts)
    align = max(1, form.window // CHUNK)
    units = layout.chunks // align
    groups = share_out(blocks, count // (launch.share * launch.split))
    ctas = tuple(launch.split * some for some in groups)
    if launch.split > 1 and (units < launch.split or sum(ctas) > count // launch.share):
        return None
    here = max(math.ceil(b / g) for b, g in zip(blocks, groups, strict=True))
    chunks = math.ceil(units / launch.split) * align  # of the longest slice
    for several in (False, True):  # phases: then the sums of the row blocks need room of their own
        fixed = books + 4 * rows * 8 * halves * (launch.warps + here + here * several)
        # chunks of x
        most = (
            ((limit - static - fixed) // (2 * rows) - 32 * layout.dense_steps)
            // (256 * align)
            * align
        )
        if several and (launch.resident > 1 or most < CHUNK):
            return None
        if several or most >= chunks:
            break
    phase = math.ceil(math.ceil(chunks / math.ceil(chunks / most)) / align) * align
    x_columns = 256 * min(phase, chunks) + 32 * layout.dense_steps
    return Plan(launch, rows, ctas, fixed + 2 * rows * x_columns, phase, x_columns, here)


def byte_plan(parts: Parts, launch: Launch, rows: int, *, count: int, limit: int) -> Plan | None:
    """`plan` of vptq_bytes.cu, which stages all of x."""
    layout = parts[0]
    form = layout.form
    blocks = tuple(part.row_blocks for part in parts)
    ctas = share_out(blocks, count // launch.share)
    here = max(math.ceil(b / c) for b, c in zip(blocks, ctas, strict=True))
    residual = launch.copies << form.residual if form.residual else 0
    books = math.ceil(8 * ((1 << form.main) + residual) / 512) * 512
    shared = books + 512 * rows * layout.chunks + 32 * rows * (launch.warps + here)
    return Plan(launch, rows, ctas, shared, most_blocks=here) if shared <= limit else None


def choose(
    parts: Parts,
    rows: int,
    device: Gpu,
    launch: Launch | None = None,
    *,
    plain: bool = True,
) -> Plan | None:
    """The first candidate that fits, or the given one."""
    tried = [launch] if launch else candidates(parts, rows, device, plain=plain)
    if launch is None:
        tried = [sliced(parts, one, device) for one in tried]
    plans = (
        plan(
            parts,
            one,
            rows,
            count=device.processors,
            limit=shared_limit(device, one.resident),
        )
        for one in tried
    )
    return next((found for found in plans if found), None)


def sliced(parts: Parts, launch: Launch, device: Gpu) -> Launch:
    """With columns in slices on all processors, where that is faster: it evens out what thread
    blocks have to do, and leaves each little x to stage, but sums are handed over. Hopper begins
    the next launch meanwhile.
    """
    units = parts[0].chunks // max(1, parts[0].form.window // CHUNK)
    fits = units >= SPLIT and device.processors >= len(parts) * SPLIT
    if launch.kernel != "staged" or device.has_dependent_launch or not fits:
        return launch
    blocks = tuple(part.row_blocks for part in parts)

    def chunks(split: int) -> float:
        groups = share_out(blocks, device.processors // split)
        here = max(math.ceil(b / g) for b, g in zip(blocks, groups, strict=True))
        longest = math.ceil(units / split) * parts[0].chunks / units
        return (here + STAGED_CHUNK) * longest

    if chunks(SPLIT) + HAND_OVER > WORTH_SLICING * chunks(1):
        return launch
    return replace(launch, split=SPLIT, share=1)


def residual_copies(tensor: VectorQuant, device: Gpu, *, doubled: bool) -> int:
    """Of the residual book, in the launch that one row of this weight gets by itself: with fewer
    than eight its lookups meet, too, and the layout keeps them apart.
    """
    if not tensor.index_bits[1] or tensor.codebook.shape[0] > 1:
        return BANKS
    chosen = choose((outline(tensor, doubled=doubled),), 1, device)
    staged = chosen is not None and chosen.launch.kernel == "staged"
    return min(BANKS, chosen.launch.copies) if chosen is not None and staged else BANKS


def outline(tensor: VectorQuant, *, doubled: bool) -> Layout:
    """The layout that a weight will have, without values: what `choose` looks at."""
    main, residual = tensor.index_bits
    columns = tensor.in_features - tensor.outliers
    form = ItemFormat.choose(main + doubled, residual, columns)
    chunks = (columns + form.padding(columns)) // (32 * CHUNK)
    halves = math.ceil(tensor.length / 8)
    blocks = tensor.indices.shape[1]
    dense = (blocks, math.ceil(tensor.outliers / 64) * 2, halves, 32, 8)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device="meta")

    return Layout(
        form,
        stream=empty(blocks, chunks, 1),
        offsets=None,
        book=empty(1, halves, 1 << form.main, 8),
        residual=empty(1, halves, 1 << residual, 8),
        dense=empty(*dense) if tensor.outliers else None,
        affine=empty(256 * chunks),
        pairs=None,
        source=None,
        out_features=tensor.out_features,
        in_features=tensor.in_features,
        length=tensor.length,
        dtype=torch.bfloat16,
    )


def worth_doubling(tensor: VectorQuant) -> bool:
    """Whether the codebook is stored twice, so that each lookup can choose between two banks."""
    main, residual = tensor.index_bits
    columns = tensor.in_features - tensor.outliers
    small = tensor.length <= 8 and main < SLICE_BITS and main + residual <= 21 and columns <= 16384
    return (
        small
        and tensor.codebook.shape[0] == 1
        and tensor.indices.shape[1] * columns >= DOUBLED_ITEMS
    )


def takes_direct(parts: Parts, device: Gpu) -> bool:
    """Whether rows can be gathered through L1 and L2 one by one, the codebook being too large for
    this device's shared memory.
    """
    layout = parts[0]
    plain = layout.dense is None and not layout.sliced
    return plain and 512 * layout.chunks <= device.shared_most


def fits(parts: Parts, device: Gpu) -> bool:
    """Whether any launch of one row fits the device."""
    return (
        choose(parts, 1, device, plain=False) is not None and choose(parts, 1, device) is not None
    )
