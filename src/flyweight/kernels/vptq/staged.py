"""The staged layout of a VPTQ weight, whose codebook a thread block holds whole in shared memory.

An item becomes 3 bytes where main index, residual index and a position fit into 24 bits, else 4. A
lane of a warp owns 2 of 64 columns and takes its items in an order that lets few lookups clash in
shared memory. Where the codebooks are also kept in bytes (vptq_bytes.cu) the fields lie such that
an index is an offset. Where there is room a codebook is stored twice, the copy rotated, so that
each item can choose between two banks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from flyweight.kernels import jit
from flyweight.kernels.vptq.columns import (
    ADDRESS_LANE,
    COLUMN_LANE,
    by_steps,
    joint_indices,
    planes,
    signed,
    stored_columns,
)
from flyweight.kernels.vptq.layout import BANKS, CHUNK, ItemFormat, Layout
from flyweight.tensors import VectorQuant


def schedule(banks: Tensor, residuals: Tensor | None = None) -> Tensor:
    """The order in which 8 or 16 lanes take the items of a window, such that few of them meet in a
    bank.

    banks uint8 [groups, lanes, window]: the bank of an entry (there are as many as lanes), and of
    its copy (or the same) in the upper four bits; residuals, same shape: that of the residual entry
    that is added to it, where those meet, too → order uint8, same shape: which item, plus 128 where
    it is read from the copy. Without a GPU the natural order.
    """
    groups, lanes, window = banks.shape
    if banks.device.type != "cuda":
        return torch.arange(window, dtype=torch.uint8, device=banks.device).expand_as(banks)
    order = torch.empty_like(banks)
    defines = {"KERNEL": 0, "POS_BITS": window.bit_length() - 1, "LANES": lanes}
    if residuals is not None:
        defines |= {"RESIDUALS": 1}
        residuals = residuals.contiguous()
    kernel = jit.load("vptq_layout.cu", defines=defines).kernel("vptq_schedule")
    tries = 96 * lanes * window
    args = (banks.contiguous(), residuals, order, groups, tries)
    kernel.launch(math.ceil(groups / 64), 64, args)
    return order


def rotated(entry: Tensor) -> Tensor:
    """Where the copy of an entry lies: in the same row of eight, in another bank, by a shift that
    differs from row to row.
    """
    return entry & ~7 | (entry + 1 + (entry >> 3) % 7) % 8


def stream(
    joint: Tensor, form: ItemFormat, *, main_bits: int, residual_copies: int = BANKS
) -> Tensor:
    """Indices [row blocks, columns] (residual above main, columns whole windows and chunks) → bytes
    as the kernel reads them. With eight copies of the residual book no two lanes meet there.
    """
    blocks = joint.shape[0]
    window = form.window
    device = joint.device
    items = by_steps(joint.long())[..., torch.tensor(COLUMN_LANE, device=device)]
    items = items.unflatten(1, (-1, window)).transpose(2, 3)  # [block, window, entry lane, step]
    main = items & ((1 << main_bits) - 1)
    extra = items >> main_bits
    position = torch.arange(window, device=device).expand_as(items)
    if form.position:
        doubled = form.main > main_bits
        count = form.banks
        banks = main % count | (rotated(main) if doubled else main) % count << 4
        meeting: tuple[Tensor, ...] = ()
        if form.residual and residual_copies < BANKS and not form.own:
            copy = torch.arange(32, device=device)[:, None] % residual_copies
            meeting = (((extra * residual_copies + copy) % BANKS).to(torch.uint8),)
        tables = (banks.to(torch.uint8), *meeting)
        order = schedule(*(one.reshape(-1, count, window) for one in tables)).view(items.shape)
        position = (order & 127).long()
        main = main.gather(3, position)
        extra = extra.gather(3, position)
        if doubled:
            main = torch.where(order > 127, rotated(main) | 1 << main_bits, main)
    if form.own:
        return own_pieces(main << form.position | position, extra)
    # A lane's word holds the indices of the entry it fetches and the position of the x it supplies.
    position = position[:, :, torch.tensor(ADDRESS_LANE, device=device)]
    words = (
        main
        | extra << form.main
        | (position << (form.main + form.residual) if form.position else 0)
    ).transpose(2, 3)
    lane_words = words.reshape(blocks, -1, CHUNK, 32).transpose(2, 3)  # [block, chunk, lane, step]
    octets = (
        torch.stack([lane_words >> (8 * i) & 0xFF for i in range(form.item_bytes)], -1)
        .to(torch.uint8)
        .flatten(3)
    )
    return torch.cat([octets[..., :16].flatten(2), octets[..., 16:].flatten(2)], 2)


def own_pieces(halves: Tensor, extra: Tensor) -> Tensor:
    """Items [row blocks, windows, lane, 8 steps] in two pieces: of a lane 8 × 16 bits, and behind
    those of all lanes 8 × 8 bits.
    """
    octets = torch.stack([halves & 0xFF, halves >> 8], -1).flatten(2)  # [block, chunk, bytes]
    return torch.cat([octets, extra.flatten(2)], 2).to(torch.uint8)


def paired(affine: Tensor) -> Tensor:
    """affine as vptq_pack.cu needs it: of 16 columns the even ones, then the odd ones, 2j beside 2j
    + 8; scales, then biases.
    """
    # [sixteen, odd, j, + 8]
    sixteen = (affine.long() & 0xFFFFFFFF).view(-1, 2, 4, 2).permute(0, 3, 2, 1)
    both = torch.stack([sixteen & 0xFFFF, sixteen >> 16], 2)
    return signed(both[..., 0] | both[..., 1] << 16).contiguous()


def staged(
    tensor: VectorQuant,
    dense: Tensor | None,
    *,
    dtype: torch.dtype,
    step: int,
    doubled: bool,
    form: ItemFormat | None,
    residual_copies: int,
) -> Layout:
    columns, (main_bits, residual_bits) = tensor.in_features - tensor.outliers, tensor.index_bits
    form = form or ItemFormat.choose(main_bits + doubled, residual_bits, columns)
    padding = form.padding(columns)
    blocks = tensor.indices.shape[1]
    items = torch.empty(
        blocks,
        (columns + padding) // 256,
        256 * form.item_bytes,
        dtype=torch.uint8,
        device=tensor.device,
    )
    for begin in range(0, blocks, step):
        joint = pad(joint_indices(tensor, begin, begin + step), (0, padding))
        items[begin : begin + step] = stream(
            joint, form, main_bits=main_bits, residual_copies=residual_copies
        )
    book = planes(tensor.codebook, main_bits, dtype)
    if doubled:
        copy = torch.empty_like(book)
        copy[:, :, rotated(torch.arange(1 << main_bits, device=book.device))] = book
        book = torch.cat([book, copy], 2)
    first = torch.arange(tensor.outliers, tensor.in_features, device=tensor.device)
    affine, source = stored_columns(
        tensor, pad(first, (0, padding), value=-1), dtype, in_order=True
    )
    residual = None if tensor.residual is None else planes(tensor.residual, residual_bits, dtype)
    return Layout(
        form,
        items,
        None,
        book,
        residual,
        dense,
        affine,
        paired(affine),
        source,
        tensor.out_features,
        tensor.in_features,
        tensor.length,
        dtype,
    )
