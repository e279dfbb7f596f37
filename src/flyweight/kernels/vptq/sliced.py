"""The sliced layout of a VPTQ weight, whose codebooks are cut into what shared memory holds: those
above 8192 entries, and one for each group of columns. The items of each slice lie in lists of their
own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from flyweight.kernels.vptq.columns import (
    ADDRESS_LANE,
    joint_indices,
    planes,
    signed,
    stored_columns,
)
from flyweight.kernels.vptq.layout import BANKS, SLICE_BITS, ItemFormat, Layout
from flyweight.tensors import VectorQuant
from flyweight.values import has_values

RANGE_BITS = 11  # a range of columns of a sliced weight is decoded in shared memory at once


def lists(
    joint: Tensor, part: Tensor, *, slices: int, ranges: int, width: int, form: ItemFormat
) -> tuple[Tensor, Tensor]:
    """Items sorted into one list per (row block, slice, range of `width` columns), each padded to
    whole steps.

    joint and part (the slice of each item) [row blocks, columns] → int32 words [steps, 32], int32
    offsets in steps. Within a list, items are dealt out over its steps bank by bank, so that eight
    neighbours mostly differ in theirs.
    """
    blocks, columns = joint.shape
    device = joint.device
    column = torch.arange(columns, device=device)
    owner = (
        torch.arange(blocks, device=device)[:, None] * slices + part
    ) * ranges + column // width
    key, where = (owner * BANKS + joint % BANKS).flatten().sort(stable=True)
    owner = key // BANKS
    counts = torch.zeros(blocks * slices * ranges, dtype=torch.int64, device=device).index_add_(
        0, owner, torch.ones_like(owner)
    )
    steps = (counts + 31) // 32
    offsets = pad(steps.cumsum(0), (1, 0))
    rank = torch.arange(owner.numel(), device=device) - (counts.cumsum(0) - counts)[owner]
    stride = 4 * steps[owner]  # groups of eight lanes in this list; rank → (lane of eight, group)
    group = rank % stride
    lane = rank // stride
    slot = offsets[owner] * 32 + group // 4 * 32 + group % 4 * 8 + lane
    total = (int(offsets[-1]) if has_values(offsets) else columns) * 32
    # padding: entry 0 times the zero behind the range
    position = torch.full((total,), width, dtype=torch.int64, device=device)
    index = torch.zeros(total, dtype=torch.int64, device=device)
    index[slot] = joint.flatten()[where]
    position[slot] = (column % width).expand(blocks, columns).flatten()[where]
    position = position.view(-1, 32)[:, torch.tensor(ADDRESS_LANE, device=device)]
    return signed(index.view(-1, 32) | position << (form.main + form.residual)), offsets.to(
        torch.int32
    )


def sliced(tensor: VectorQuant, dense: Tensor | None, *, dtype: torch.dtype, step: int) -> Layout:
    """One slice per group, or per 8192 entries of a codebook that is too large."""
    groups, (main_bits, residual_bits) = tensor.codebook.shape[0], tensor.index_bits
    book = planes(tensor.codebook, main_bits, dtype)
    slice_bits = min(main_bits, SLICE_BITS + 1 - book.shape[1])
    pieces = 1 << (main_bits - slice_bits)
    book = book.unflatten(2, (pieces, -1)).transpose(1, 2).flatten(0, 1).contiguous()
    residual = None if tensor.residual is None else planes(tensor.residual, residual_bits, dtype)
    if residual is not None and groups > 1:
        residual = residual.repeat_interleave(pieces, 0)
    columns = tensor.in_features - tensor.outliers
    slices = groups * pieces
    position = min(32 - slice_bits - residual_bits, RANGE_BITS)
    ranges = math.ceil(columns / ((1 << position) - 2))
    # two zeros behind a range; whole eights
    width = math.ceil((math.ceil(columns / ranges) + 2) / 8) * 8 - 2
    form = ItemFormat(slice_bits, residual_bits, position, 4)
    group = torch.arange(columns, device=book.device) // tensor.group_columns
    words = []
    offsets = [torch.zeros(1, dtype=torch.int32, device=book.device)]
    start = 0
    for begin in range(0, tensor.indices.shape[1], step):
        joint = joint_indices(tensor, begin, begin + step).long()
        part = group * pieces + (joint >> slice_bits & (pieces - 1))
        local = joint & ((1 << slice_bits) - 1) | joint >> main_bits << slice_bits
        found, ends = lists(local, part, slices=slices, ranges=ranges, width=width, form=form)
        words.append(found)
        offsets.append(ends[1:] + start)
        start += found.shape[0]
    stored = torch.full((ranges, width + 2), -1, dtype=torch.long, device=book.device)
    first = torch.arange(tensor.outliers, tensor.in_features, device=book.device)
    stored[:, :width] = pad(first, (0, ranges * width - columns), value=-1).view(ranges, width)
    affine, source = stored_columns(tensor, stored.flatten(), dtype, in_order=False)
    return Layout(
        form,
        torch.cat(words),
        torch.cat(offsets),
        book,
        residual,
        dense,
        affine,
        None,
        source,
        tensor.out_features,
        tensor.in_features,
        tensor.length,
        dtype,
        slices=slices,
        ranges=ranges,
        width=width,
    )
