"""VPTQ weights on the GPU: host side of cuda/vptq.cu.

`prepare` re-lays the packed index stream out once. An item (one codebook lookup) becomes 3 bytes where main index,
residual index and a position fit into 24 bits, else 4; a lane of a warp owns every 32nd column and takes its items in
an order that lets few lookups clash in shared memory. Codebooks above 8192 entries, and one codebook per group of
columns, are cut into slices, with the items of each slice in lists of their own. Outlier columns (about one in a
hundred) are expanded to dense matrix fragments: cheaper in time than a third codebook, and in memory hardly more.

Up to 16 rows multiply straight from the codebook; more are dequantized by torch and multiplied there.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flyweight.kernels import jit
from flyweight.packing import unpack
from flyweight.tensors import VectorQuant

KERNELS = {"staged": 0, "direct": 1, "sliced": 2}
CHUNK = 8  # steps of 32 items that a lane loads at once
SLICE_BITS = 13  # 8192 entries of 16 bytes: what shared memory holds beside residuals and x
BANKS = 8  # groups of banks that serve 16 bytes each
FUSED_ROWS = 16

# Lane → the lane that supplies x for the entry it fetches: how ldmatrix and mma.m16n8k16 number rows and columns.
COLUMN_LANE = [(i >> 3 & 1) << 4 | (i >> 4 & 1) << 3 | (i & 1) << 2 | (i >> 1 & 3) for i in range(32)]
ADDRESS_LANE = [COLUMN_LANE.index(i) for i in range(32)]


@dataclass(frozen=True)
class ItemFormat:
    """Bits of one item, lowest first: main index, residual index, position within the window."""

    main: int
    residual: int
    position: int
    item_bytes: int

    @property
    def window(self) -> int:
        """Steps among which a lane may reorder its items."""
        return 1 << self.position

    @classmethod
    def choose(cls, main: int, residual: int, columns: int, *, item_bytes: int | None = None,
               position: int | None = None) -> ItemFormat:
        item_bytes = item_bytes or (3 if main + residual <= 24 else 4)
        if position is None:  # columns are padded to whole windows: no larger window than the last one can fill
            position = min(8 * item_bytes - main - residual, 4 if columns % 512 == 0 or columns > 8192 else 3)
        return cls(main, residual, position, item_bytes)


def schedule(banks: Tensor) -> Tensor:
    """Order the items of 8 lanes that are served together; banks [groups, 8, window] → order [groups, 8, window].

    Greedy: step by step, each lane takes an item whose bank is still free in this step, from the fullest bank first.
    Random banks cost 2.60 cycles a step; a window of 4, 8, 16 steps brings that to 2.02, 1.80, 1.58.
    """
    groups, lanes, window = banks.shape
    banks = banks.long()
    load = torch.zeros(groups, BANKS, dtype=torch.int32, device=banks.device)
    load.scatter_add_(1, banks.flatten(1), torch.ones_like(banks.flatten(1), dtype=torch.int32))
    taken = torch.zeros(groups, lanes, window, dtype=torch.int32, device=banks.device)
    order = torch.empty(groups, lanes, window, dtype=torch.uint8, device=banks.device)
    for step in range(window):
        used = torch.zeros_like(load)
        for i in range(lanes):
            lane = (i + step) % lanes  # so that no lane is always the last to choose
            bank = banks[:, lane]
            busy = used.gather(1, bank)
            clash = busy * (busy >= used.amax(1, keepdim=True).clamp(min=1))  # a bank below the step's worst is free
            choice = (4 * load.gather(1, bank) - busy - 1000 * clash - 1_000_000 * taken[:, lane]).argmax(1, keepdim=True)
            order[:, lane, step] = choice[:, 0]
            taken[:, lane].scatter_(1, choice, 1)
            chosen = bank.gather(1, choice)
            used.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.int32))
            load.scatter_add_(1, chosen, torch.full_like(chosen, -1, dtype=torch.int32))
    return order


def stream(joint: Tensor, form: ItemFormat) -> Tensor:
    """Indices [row blocks, columns] (residual above main, columns whole windows and chunks) → bytes as the kernel reads them."""
    blocks, columns = joint.shape
    window, steps = form.window, columns // 32
    lanes = torch.tensor(COLUMN_LANE, device=joint.device)
    items = joint.view(blocks, steps // window, window, 32)[..., lanes].transpose(2, 3)  # [block, window, entry lane, step]
    position = torch.arange(window, device=joint.device).expand_as(items)
    if form.position:
        order = schedule((items % BANKS).reshape(-1, 8, window)).view(items.shape).long()
        items, position = items.gather(3, order), order
    # A lane's word holds the indices of the entry it fetches and the position of the x it supplies.
    position = position[:, :, torch.tensor(ADDRESS_LANE, device=joint.device)]
    words = (items.long() | (position << (form.main + form.residual) if form.position else 0)).transpose(2, 3)
    lane_words = words.reshape(blocks, steps // CHUNK, CHUNK, 32).transpose(2, 3)  # [block, chunk, lane, step]
    octets = torch.stack([lane_words >> (8 * i) & 0xFF for i in range(form.item_bytes)], -1).to(torch.uint8).flatten(3)
    return torch.cat([octets[..., :16].flatten(2), octets[..., 16:].flatten(2)], 2).contiguous()


def lists(joint: Tensor, part: Tensor, *, slices: int, ranges: int, width: int, form: ItemFormat) -> tuple[Tensor, Tensor]:
    """Items sorted into one list per (row block, slice, range of `width` columns), each padded to whole steps.

    joint and part (the slice of each item) [row blocks, columns] → int32 words [steps, 32], int32 offsets in steps.
    Within a list, items are dealt out over its steps bank by bank, so that eight neighbours mostly differ in theirs.
    """
    blocks, columns = joint.shape
    device = joint.device
    column = torch.arange(columns, device=device)
    owner = (torch.arange(blocks, device=device)[:, None] * slices + part) * ranges + column // width
    key, where = (owner * BANKS + joint % BANKS).flatten().sort(stable=True)
    owner = key // BANKS
    counts = torch.bincount(owner, minlength=blocks * slices * ranges)
    steps = (counts + 31) // 32
    offsets = torch.nn.functional.pad(steps.cumsum(0), (1, 0))
    rank = torch.arange(owner.numel(), device=device) - (counts.cumsum(0) - counts)[owner]
    stride = 4 * steps[owner]  # groups of eight lanes in this list; rank → (lane of eight, group)
    group, lane = rank % stride, rank // stride
    slot = offsets[owner] * 32 + group // 4 * 32 + group % 4 * 8 + lane
    total = int(offsets[-1]) * 32
    position = torch.full((total,), width, dtype=torch.int64, device=device)  # padding: entry 0 times the zero behind the range
    index = torch.zeros(total, dtype=torch.int64, device=device)
    index[slot] = joint.flatten()[where]
    position[slot] = (column % width).expand(blocks, columns).flatten()[where]
    position = position.view(-1, 32)[:, torch.tensor(ADDRESS_LANE, device=device)]
    words = index.view(-1, 32) | position << (form.main + form.residual)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32), offsets.to(torch.int32)


def planes(book: Tensor, dtype: torch.dtype) -> Tensor:
    """Codebook [..., entries, length] → [..., halves, entries, 8]: entries in 16-byte pieces, padded with zeros."""
    length = book.shape[-1]
    return torch.nn.functional.pad(book.to(dtype), (0, -length % 8)).unflatten(-1, (-1, 8)).transpose(-3, -2).contiguous()


def fragments(dense: Tensor, *, length: int, dtype: torch.dtype) -> Tensor:
    """Dense columns [out, count] → [row blocks, steps, halves, lane, 8]: A fragments in the lane order of the mma."""
    halves, count = math.ceil(length / 8), dense.shape[1]
    rows = torch.nn.functional.pad(dense.to(dtype), (0, -count % 32, 0, -dense.shape[0] % length))
    rows = torch.nn.functional.pad(rows.view(-1, length, rows.shape[1]), (0, 0, 0, 8 * halves - length))
    tiles = rows.view(rows.shape[0], halves, 8, -1, 32)[..., torch.tensor(COLUMN_LANE, device=dense.device)]
    # entry lane = 16 · (item / 8) + 8 · (row half) + item % 8; a lane (g, t) holds items 2t, 2t + 1 of output g in each quarter
    tiles = tiles.unflatten(-1, (4, 4, 2))  # [block, half, g, step, quarter, t, pair]
    return tiles.permute(0, 3, 1, 2, 5, 4, 6).reshape(tiles.shape[0], tiles.shape[3], halves, 32, 8).contiguous()


@dataclass(frozen=True)
class Launch:
    """What of a launch is a matter of speed only."""

    kernel: str
    warps: int = 32
    cluster: int = 1  # thread blocks that share one fetch of the codebook
    split: bool = False  # the cluster splits the columns instead of the row blocks
    copies: int = 8  # of the residual book
    resident: int = 1  # 2: small enough that the next launch stages its codebook while this one ends
    processors: int | None = None  # thread blocks; None: one for each multiprocessor


@dataclass(frozen=True, eq=False)
class Vptq:
    """A weight in the kernel's layout; call it with x [rows, in], rows up to 16."""

    form: ItemFormat
    stream: Tensor
    offsets: Tensor | None  # sliced: int32 [row blocks · slices · ranges + 1]
    book: Tensor  # [slices, halves, entries, 8]
    residual: Tensor | None  # [books, halves, entries, 8]
    dense: Tensor | None
    affine: Tensor  # int32 [stored columns]
    source: Tensor | None  # int16 (unsigned) [stored columns]
    out_features: int
    in_features: int
    length: int
    slices: int
    ranges: int
    width: int  # columns of a range
    dtype: torch.dtype
    workspace: Tensor | None  # sliced: float32 partial sums
    arrived: Tensor | None  # sliced: int32 counters, zero between launches

    @property
    def nbytes(self) -> int:
        parts = (self.stream, self.offsets, self.book, self.residual, self.dense, self.affine, self.source, self.workspace)
        return sum(t.nbytes for t in parts if t is not None)

    @property
    def row_blocks(self) -> int:
        return math.ceil(self.out_features / self.length)

    @property
    def halves(self) -> int:
        return self.book.shape[-3]

    @property
    def dense_steps(self) -> int:
        return 0 if self.dense is None else self.dense.shape[1]

    @property
    def chunks(self) -> int:
        return 0 if self.offsets is not None else self.stream.shape[1]

    def shared_bytes(self, launch: Launch, rows: int, grid: int) -> int:
        """Dynamic shared memory, as the kernel lays it out."""
        books = 16 * self.halves * ((1 << self.form.main) + (launch.copies << self.form.residual if self.form.residual else 0))
        sums = rows * 8 * self.halves
        if launch.kernel == "sliced":
            columns = self.ranges * (self.width + 2) + 32 * self.dense_steps
            return books + math.ceil(2 * rows * columns / 16) * 16 + 4 * launch.warps * rows
        here = math.ceil(self.row_blocks / (grid // launch.cluster if launch.split else grid))
        align = max(1, self.form.window // CHUNK)
        chunks = math.ceil(self.chunks // align / launch.cluster) * align if launch.split else self.chunks
        columns = math.ceil((256 * chunks + 32 * self.dense_steps) / 64) * 64
        slots = launch.warps + here * (2 if launch.split else 1)
        return books + 2 * rows * columns + 4 * (launch.warps * rows + slots * sums)

    def __call__(self, x: Tensor, out: Tensor | None = None, *, launch: Launch | None = None, pdl: bool = True) -> Tensor:
        rows = x.shape[0]
        if out is None:
            out = torch.empty(rows, self.out_features, dtype=self.dtype, device=x.device)
        step = 1
        while step < min(rows, 4) and self._fits(launch, 2 * step, x.device):
            step *= 2
        for begin in range(0, rows, step):
            self._launch(x[begin : begin + step], out[begin : begin + step], launch or self.choose(step, x.device), step, pdl)
        return out

    def _fits(self, launch: Launch | None, rows: int, device: torch.device) -> bool:
        try:
            chosen = launch or self.choose(rows, device)
        except ValueError:
            return False
        return chosen.kernel == "direct" or self.shared_bytes(chosen, rows, self.grid(chosen, device)) <= shared_limit(device)

    def grid(self, launch: Launch, device: torch.device) -> int:
        if launch.kernel == "direct":
            return self.row_blocks
        count = launch.processors or processors(device)
        if launch.kernel == "sliced":
            return max(1, min(count // self.slices, self.row_blocks)) * self.slices
        useful = self.row_blocks * (launch.cluster if launch.split else 1)
        return max(1, min(count, useful) // launch.cluster) * launch.cluster

    def choose(self, rows: int, device: torch.device) -> Launch:
        """The fastest launch that fits; see the table in docs/kernels.md for where the borders come from."""
        candidates = [Launch("sliced")] if self.offsets is not None else [Launch("staged"), Launch("staged", warps=16)]
        if self.offsets is None and self.dense is None and self.row_blocks * self.chunks <= DIRECT_CHUNKS:
            return Launch("direct", warps=min(16, max(1, self.chunks)))
        for candidate in candidates:
            for copies in (8, 4, 2, 1):
                launch = Launch(candidate.kernel, warps=candidate.warps, copies=copies)
                if self.shared_bytes(launch, rows, self.grid(launch, device)) <= shared_limit(device):
                    return launch
        raise ValueError(f"{rows} rows of {self.in_features} inputs do not fit into shared memory")

    def _launch(self, x: Tensor, out: Tensor, launch: Launch, rows: int, pdl: bool) -> None:
        form = self.form
        defines = {
            "KERNEL": KERNELS[launch.kernel], "MAIN_BITS": form.main, "RES_BITS": form.residual, "POS_BITS": form.position,
            "ITEM_BYTES": form.item_bytes, "HALVES": self.halves, "COPIES": launch.copies, "ROWS": rows,
            "FP16": int(self.dtype == torch.float16), "WARPS": launch.warps, "RESIDENT": launch.resident,
            "CLUSTER": launch.cluster, "SPLIT": int(launch.split),
        }
        kernel = jit.load("vptq.cu", defines=defines).kernel(f"vptq_{launch.kernel}")
        grid = self.grid(launch, x.device)
        shape = (x.shape[0], self.in_features, self.out_features, self.length)
        shared = 0
        if launch.kernel == "direct":
            args: tuple = (self.stream, self.book, self.residual, self.affine, self.source, x, out, *shape, self.chunks)
        else:
            shared = self.shared_bytes(launch, rows, grid)
        if launch.kernel == "staged":
            args = (self.stream, self.book, self.residual, self.dense, self.affine, self.source, x, out, *shape,
                    self.row_blocks, self.chunks, self.dense_steps)
        elif launch.kernel == "sliced":
            books = 1 if self.residual is None else self.residual.shape[0]
            args = (self.stream, self.offsets, self.book, self.residual, self.dense, self.affine, self.source, x, out,
                    self.workspace, self.arrived, *shape, self.row_blocks, self.slices, books, self.ranges, self.width,
                    self.dense_steps)
        cluster = launch.cluster if launch.cluster > 1 else None
        kernel.launch(grid, 32 * launch.warps, args, shared=shared, pdl=pdl, cluster=cluster)


DIRECT_CHUNKS = 2048  # chunks of 256 items, 4.2 M weights of vector length 8: fewer do not pay for staging a codebook


@functools.cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_limit(device: torch.device) -> int:
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin - 256  # the kernel's own variables


def why_not(tensor: VectorQuant, dtype: torch.dtype) -> str | None:
    """Why this weight has no fused kernel, or None where it has."""
    main, residual = tensor.index_bits
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the kernel multiplies float16 and bfloat16, not {dtype}"
    if tensor.experts is not None:
        return "one weight per expert has no fused kernel yet"
    if tensor.length > 16:
        return f"vectors of {tensor.length} are longer than 16"
    if residual > 9:
        return f"{1 << residual} residual centroids are more than 512"
    if main > 16:
        return f"{1 << main} centroids are more than 65536"
    if tensor.in_features > (1 << 16 if main <= SLICE_BITS else 31 * 1022):
        return f"{tensor.in_features} inputs are too many"
    if tensor.outliers == tensor.in_features:
        return "every column is an outlier"
    return None


def _stored_columns(tensor: VectorQuant, main: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """affine and source of the stored columns `main` (−1: padding), followed by the outlier columns in whole steps."""
    device = tensor.codebook.device
    outliers = torch.arange(tensor.outliers, device=device)
    order = torch.cat([main, torch.nn.functional.pad(outliers, (0, -tensor.outliers % 32), value=-1)])
    perm = torch.arange(tensor.in_features, device=device) if tensor.perm is None else tensor.perm.long()
    inputs = perm[order.clamp(min=0)]

    def bits(value: Tensor | None, default: float) -> Tensor:
        full = torch.full((tensor.in_features,), default, device=device) if value is None else value
        return full.to(dtype)[inputs].view(torch.int16).long() & 0xFFFF

    affine = torch.where(order >= 0, bits(tensor.scale, 1.0) | bits(tensor.bias, 0.0) << 16, 0)
    affine = torch.where(affine >= 1 << 31, affine - (1 << 32), affine).to(torch.int32)
    place = torch.arange(order.numel(), device=device)
    return affine, None if bool((inputs == place)[order >= 0].all()) else torch.where(inputs >= 1 << 15, inputs - (1 << 16), inputs).to(torch.int16)


def prepare(tensor: VectorQuant, *, dtype: torch.dtype, item_bytes: int | None = None, position: int | None = None,
            batch: int = 1 << 23) -> Vptq:
    """Lay a weight out for the kernels; `batch` bounds the items that are in the works at once."""
    reason = why_not(tensor, dtype)
    if reason:
        raise ValueError(f"no fused kernel: {reason}")
    groups, blocks, columns = tensor.codebook.shape[0], tensor.indices.shape[1], tensor.in_features - tensor.outliers
    main_bits, residual_bits = tensor.index_bits
    halves = math.ceil(tensor.length / 8)
    book, residual = planes(tensor.codebook, dtype), None if tensor.residual is None else planes(tensor.residual, dtype)
    first = torch.arange(tensor.outliers, tensor.in_features, device=tensor.device)
    sliced = groups > 1 or main_bits > SLICE_BITS + 1 - halves
    dense = None
    if tensor.outlier_indices is not None and tensor.outlier_codebook is not None:
        wide = tensor.outlier_codebook[tensor.outlier_indices.long()].permute(0, 2, 1).flatten(0, 1)[: tensor.out_features]
        dense = fragments(wide, length=tensor.length, dtype=dtype)
    common: dict[str, Any] = dict(dense=dense, out_features=tensor.out_features, in_features=tensor.in_features,
                                  length=tensor.length, dtype=dtype)
    per_batch = max(1, batch // columns)
    if not sliced:
        form = ItemFormat.choose(main_bits, residual_bits, columns, item_bytes=item_bytes, position=position)
        padding = -columns % (32 * max(CHUNK, form.window))
        parts = [stream(_joint(tensor, begin, begin + per_batch, padding), form) for begin in range(0, blocks, per_batch)]
        affine, source = _stored_columns(tensor, torch.nn.functional.pad(first, (0, padding), value=-1), dtype)
        residual = None if residual is None else _padded(residual, residual_bits)
        return Vptq(form, torch.cat(parts), None, _padded(book, main_bits), residual, affine=affine, source=source, slices=1,
                    ranges=0, width=0, workspace=None, arrived=None, **common)
    return _prepare_sliced(tensor, book, residual, first, per_batch, common)


def _padded(book: Tensor, bits: int) -> Tensor:
    """Centroid counts that are no power of two are filled up with zeros."""
    return torch.nn.functional.pad(book, (0, 0, 0, (1 << bits) - book.shape[-2]))


def _joint(tensor: VectorQuant, begin: int, end: int, padding: int) -> Tensor:
    """Joint indices [row blocks, columns + padding] of row blocks begin..end: group after group."""
    joint = unpack(tensor.indices[:, begin:end], sum(tensor.index_bits), tensor.group_columns)  # [groups, blocks, columns]
    return torch.nn.functional.pad(joint.transpose(0, 1).flatten(1), (0, padding))


def _prepare_sliced(tensor: VectorQuant, book: Tensor, residual: Tensor | None, first: Tensor, per_batch: int,
                    common: dict[str, Any]) -> Vptq:
    """One slice per group, or per 8192 entries of a codebook that is too large."""
    groups, (main_bits, residual_bits) = book.shape[0], tensor.index_bits
    slice_bits = min(main_bits, SLICE_BITS + 1 - book.shape[1])
    pieces = 1 << (main_bits - slice_bits)
    columns, slices = first.numel(), groups * pieces
    book = _padded(book, main_bits).unflatten(2, (pieces, -1)).transpose(1, 2).flatten(0, 1).contiguous()
    residual = None if residual is None else _padded(residual, residual_bits).repeat_interleave(pieces if groups > 1 else 1, 0)
    position = min(32 - slice_bits - residual_bits, 14)
    ranges = math.ceil(columns / ((1 << position) - 2))
    width = math.ceil(columns / ranges / 2) * 2
    form = ItemFormat(slice_bits, residual_bits, position, 4)
    words, offsets, start = [], [torch.zeros(1, dtype=torch.int32, device=book.device)], 0
    for begin in range(0, tensor.indices.shape[1], per_batch):
        joint = _joint(tensor, begin, begin + per_batch, 0).long()
        group = torch.arange(columns, device=joint.device) // tensor.group_columns
        part = group * pieces + (joint >> slice_bits & (pieces - 1))
        residual_index = joint >> main_bits
        local = joint & ((1 << slice_bits) - 1) | residual_index << slice_bits
        found, ends = lists(local, part, slices=slices, ranges=ranges, width=width, form=form)
        words.append(found)
        offsets.append(ends[1:] + start)
        start += found.shape[0]
    stored = torch.full((ranges, width + 2), -1, dtype=torch.long, device=book.device)
    stored[:, :width] = torch.nn.functional.pad(first, (0, ranges * width - columns), value=-1).view(ranges, width)
    affine, source = _stored_columns(tensor, stored.flatten(), common["dtype"])
    blocks = tensor.indices.shape[1]
    workspace = torch.empty(slices * 4 * blocks * 8 * book.shape[1], device=book.device)
    arrived = torch.zeros(1024, dtype=torch.int32, device=book.device)
    return Vptq(form, torch.cat(words), torch.cat(offsets), book, residual, affine=affine, source=source, slices=slices,
                ranges=ranges, width=width, workspace=workspace, arrived=arrived, **common)
