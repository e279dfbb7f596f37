"""What the kernels read of one VPTQ weight, whose items (codebook lookups) are steps of a row block
(staged.py) or lists of a slice (sliced.py). choose_layout.py makes it; cuda/vptq.cu explains steps,
lanes and windows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 8  # steps of 32 items that a lane loads at once
SLICE_BITS = 13  # 8192 entries of 16 bytes: what shared memory holds beside residuals and x
BANKS = 8  # groups of banks that serve 16 bytes each
BYTE_BANKS = 16  # the same of entries in bytes, 8 each


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
