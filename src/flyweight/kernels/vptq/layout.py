"""VPTQ weights re-laid out for cuda/vptq.cu, whose opening explains steps, lanes and windows.

An item (one codebook lookup) becomes 3 bytes where main index, residual index and a position fit
into 24 bits, else 4. A lane of a warp owns 2 of 64 columns and takes its items in an order that
lets few lookups clash in shared memory. Where the codebooks are also kept in bytes (vptq_bytes.cu)
the fields lie such that an index is an offset. Where there is room a codebook is stored twice, the
copy rotated, so that each item can choose between two banks. Codebooks above 8192 entries, and one
codebook per group of columns, are cut into slices, with the items of each slice in lists of their
own. Outlier columns (about one in a hundred) are expanded to dense matrix fragments: cheaper in
time than a third codebook, and in memory hardly more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from flyweight.kernels import jit
from flyweight.packing import unpack
from flyweight.tensors import ByteVectorQuant, VectorQuant
from flyweight.tensors.vector import packed
from flyweight.values import has_values, known

CHUNK = 8  # steps of 32 items that a lane loads at once
SLICE_BITS = 13  # 8192 entries of 16 bytes: what shared memory holds beside residuals and x
BANKS = 8  # groups of banks that serve 16 bytes each
BYTE_BANKS = 16  # the same of entries in bytes, 8 each
MOST_BYTE_COLUMNS = 16384  # that vptq_bytes.cu stages in a few registers of each thread
OWN_POSITION = 3  # bits of a position beside a main index of 13 bits
RANGE_BITS = 11  # a range of columns of a sliced weight is decoded in shared memory at once

# Lane → the lane that supplies x for the entry it fetches: how ldmatrix and mma.m16n8k16 number
# rows and columns.
COLUMN_LANE = [
    (i >> 3 & 1) << 4 | (i >> 4 & 1) << 3 | (i & 1) << 2 | (i >> 1 & 3) for i in range(32)
]
ADDRESS_LANE = [COLUMN_LANE.index(i) for i in range(32)]


@dataclass(frozen=True)
class ItemFormat:
    """Bits of one item, lowest first: main index, residual index, position within the window."""

    main: int
    residual: int
    position: int
    item_bytes: int
    # the position is of the item's own column, and lies below the main index: 16 bits, then 8 bits
    own: bool = False

    @property
    def banks(self) -> int:
        """Lanes that look up at once, and banks that serve them."""
        return BYTE_BANKS if self.own else BANKS

    @property
    def window(self) -> int:
        """Steps among which a lane may reorder its items."""
        return 1 << self.position

    def padding(self, columns: int) -> int:
        """Columns behind the weight's own: whole chunks and windows."""
        return -columns % (32 * max(CHUNK, self.window))

    @classmethod
    def choose(cls, main: int, residual: int, columns: int) -> ItemFormat:
        item_bytes = 3 if main + residual <= 24 else 4
        # columns are padded to whole windows
        most = 4 if columns % 512 == 0 or columns > 8192 else 3
        return cls(main, residual, min(8 * item_bytes - main - residual, most), item_bytes)

    def defines(self) -> dict[str, int]:
        return {
            "MAIN_BITS": self.main,
            "RES_BITS": self.residual,
            "POS_BITS": self.position,
            "ITEM_BYTES": self.item_bytes,
        } | ({"OWN": 1} if self.own else {})


@dataclass(frozen=True, eq=False)
class Layout:
    """What the kernels read of one weight."""

    form: ItemFormat
    stream: Tensor  # uint8 [row blocks, chunks, bytes]; sliced: int32 [steps, 32]
    offsets: Tensor | None  # sliced: int32 [row blocks · slices · ranges + 1], in steps
    book: Tensor  # [slices, halves, entries, 8]
    residual: Tensor | None  # [books, halves, entries, 8]
    dense: Tensor | None  # [row blocks, steps, halves, lane, 8]
    affine: Tensor  # int32 [stored columns]: scale and bias
    # staged: int32 [stored columns / 16, 2, scale and bias, 4]: the same in the order of
    # vptq_pack.cu
    pairs: Tensor | None
    # int16 (unsigned) [stored columns]: the input of a column, None where they are the same
    source: Tensor | None
    out_features: int
    in_features: int
    length: int
    dtype: torch.dtype
    slices: int = 1
    ranges: int = 0
    width: int = 0  # columns of a range
    # uint8 [entries · 8 + 64]: the main book in bytes, step and least of its places; and the
    # residual book in bytes. `book` and `residual` hold the same values.
    byte_book: Tensor | None = None
    byte_residual: Tensor | None = None

    @property
    def nbytes(self) -> int:
        parts = (
            self.stream,
            self.offsets,
            self.book,
            self.residual,
            self.dense,
            self.affine,
            self.pairs,
            self.source,
            self.byte_book,
            self.byte_residual,
        )
        return sum(t.nbytes for t in parts if t is not None)

    @property
    def sliced(self) -> bool:
        return self.offsets is not None

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
        return 0 if self.sliced else self.stream.shape[1]

    @property
    def residual_books(self) -> int:
        return 1 if self.residual is None else self.residual.shape[0]

    @property
    def dense_begin(self) -> int:
        """The stored column at which the outliers begin."""
        return self.ranges * (self.width + 2) if self.sliced else 256 * self.chunks


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


def by_steps(columns: Tensor) -> Tensor:
    """[…, 64 n] → […, steps, lanes]: a lane owns two neighbouring columns of 64."""
    return columns.unflatten(-1, (-1, 32, 2)).transpose(-1, -2).flatten(-3, -2)


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


def signed(words: Tensor) -> Tensor:
    """int64 values below 2^32 → int32 of the same bits."""
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def planes(book: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Codebook [books, entries, length] → [books, halves, 2^bits, 8]: entries in 16-byte pieces,
    filled up with zeros.
    """
    entries, length = book.shape[-2:]
    filled = pad(book.to(dtype), (0, -length % 8, 0, (1 << bits) - entries))
    return filled.unflatten(-1, (-1, 8)).transpose(-3, -2).contiguous()


def fragments(wide: Tensor, *, length: int, dtype: torch.dtype) -> Tensor:
    """Dense columns [out, count] → [row blocks, steps, halves, lane, 8]: A fragments in the lane
    order of the mma.
    """
    halves = math.ceil(length / 8)
    count = wide.shape[1]
    rows = pad(wide.to(dtype), (0, -count % 64, 0, -wide.shape[0] % length))
    rows = pad(rows.view(-1, length, rows.shape[1]), (0, 0, 0, 8 * halves - length))
    tiles = by_steps(rows.unflatten(1, (halves, 8)))[
        ..., torch.tensor(COLUMN_LANE, device=wide.device)
    ]
    # entry lane = 16 · (item / 8) + 8 · (row half) + item % 8; a lane (g, t) holds items 2t, 2t + 1
    # of output g in each quarter
    tiles = tiles.unflatten(-1, (4, 4, 2))  # [block, half, g, step, quarter, t, pair]
    return (
        tiles.permute(0, 3, 1, 2, 5, 4, 6)
        .reshape(tiles.shape[0], tiles.shape[3], halves, 32, 8)
        .contiguous()
    )


def stored_columns(
    tensor: VectorQuant, main: Tensor, dtype: torch.dtype, *, in_order: bool
) -> tuple[Tensor, Tensor | None]:
    """affine and source of the stored columns `main` (−1: padding; `in_order`: else 0, 1, 2 …, but
    for outliers), followed by the outlier columns in whole lines.
    """
    device = tensor.device
    outliers = torch.arange(tensor.outliers, device=device)
    order = torch.cat([main, pad(outliers, (0, -tensor.outliers % 64), value=-1)])
    perm = (
        torch.arange(tensor.in_features, device=device)
        if tensor.perm is None
        else tensor.perm.long()
    )
    inputs = perm[order.clamp(min=0)]

    def bits(value: Tensor | None, default: float) -> Tensor:
        full = torch.full((tensor.in_features,), default, device=device) if value is None else value
        return full.to(dtype)[inputs].view(torch.int16).long() & 0xFFFF

    affine = signed(
        torch.where(order >= 0, bits(tensor.scale, 1.0) | bits(tensor.bias, 0.0) << 16, 0)
    )
    place = torch.arange(order.numel(), device=device)
    same = known(
        ((inputs == place) | (order < 0)).all(),
        otherwise=in_order and tensor.perm is None and not tensor.outliers,
    )
    return affine, None if same else torch.where(inputs >= 1 << 15, inputs - (1 << 16), inputs).to(
        torch.int16
    )


def paired(affine: Tensor) -> Tensor:
    """affine as vptq_pack.cu needs it: of 16 columns the even ones, then the odd ones, 2j beside 2j
    + 8; scales, then biases.
    """
    # [sixteen, odd, j, + 8]
    sixteen = (affine.long() & 0xFFFFFFFF).view(-1, 2, 4, 2).permute(0, 3, 2, 1)
    both = torch.stack([sixteen & 0xFFFF, sixteen >> 16], 2)
    return signed(both[..., 0] | both[..., 1] << 16).contiguous()


def joint_indices(tensor: VectorQuant, begin: int, end: int) -> Tensor:
    """Joint indices [row blocks, columns] of row blocks begin..end: group after group."""
    # [groups, blocks, columns]
    joint = unpack(tensor.indices[:, begin:end], sum(tensor.index_bits), tensor.group_columns)
    return joint.transpose(0, 1).flatten(1)


def unsupported_reason(tensor: VectorQuant, dtype: torch.dtype) -> str | None:
    """Why this weight has no fused kernel, or None where it has."""
    main, residual = tensor.index_bits
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the kernel multiplies float16 and bfloat16, not {dtype}"
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


def lay_out(
    tensor: VectorQuant,
    *,
    dtype: torch.dtype,
    doubled: bool = False,
    form: ItemFormat | None = None,
    residual_copies: int = BANKS,
    batch: int = 1 << 23,
) -> Layout:
    """The layout of a weight that has a kernel, which will have so many copies of its residual
    book; `batch` bounds the items that are in the works at once.
    """
    if isinstance(tensor, ByteVectorQuant) and form is None:
        return _with_byte_books(tensor, dtype=dtype, batch=batch)
    halves = math.ceil(tensor.length / 8)
    dense = None
    if tensor.outlier_indices is not None and tensor.outlier_codebook is not None:
        wide = (
            tensor.outlier_codebook[tensor.outlier_indices.long()]
            .permute(0, 2, 1)
            .flatten(0, 1)[: tensor.out_features]
        )
        dense = fragments(wide, length=tensor.length, dtype=dtype)
    sliced = tensor.codebook.shape[0] > 1 or tensor.index_bits[0] > SLICE_BITS + 1 - halves
    step = max(1, batch // (tensor.in_features - tensor.outliers))
    if sliced:
        return _sliced(tensor, dense, dtype=dtype, step=step)
    return _staged(
        tensor,
        dense,
        dtype=dtype,
        step=step,
        doubled=doubled,
        form=form,
        residual_copies=residual_copies,
    )


def takes_byte_books(tensor: VectorQuant) -> bool:
    """Whether vptq_bytes.cu can multiply with this weight, its codebooks rounded to bytes."""
    main, residual = tensor.index_bits
    fields = 6 <= main <= SLICE_BITS and residual <= 8
    plain = tensor.length == 8 and tensor.codebook.shape[0] == 1 and not tensor.outliers
    return fields and plain and tensor.in_features <= MOST_BYTE_COLUMNS


def _with_byte_books(tensor: ByteVectorQuant, *, dtype: torch.dtype, batch: int) -> Layout:
    books = tensor.books
    main, residual = tensor.index_bits
    form = ItemFormat(main, residual, OWN_POSITION, 3, own=True)
    layout = lay_out(tensor, dtype=dtype, form=form, batch=batch)
    numbers = torch.stack([books.step, books.least]).contiguous()
    codes = torch.cat([_filled(books.main, main), numbers.view(torch.uint8).flatten()])
    extra = None if books.residual is None else _filled(books.residual, residual)
    return replace(layout, byte_book=codes, byte_residual=extra)


def _filled(codes: Tensor, bits: int) -> Tensor:
    """Codes [1, entries, 8] → uint8 [2^bits · 8], with zeros behind."""
    return pad(packed(codes[0]), (0, 0, 0, (1 << bits) - codes.shape[1])).flatten()


def _staged(
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


def _sliced(tensor: VectorQuant, dense: Tensor | None, *, dtype: torch.dtype, step: int) -> Layout:
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
