"""Tiles of the Triton attention kernel: their shapes, and how the host cuts a step into them.

tile      rows of one kv head: (token, query head) pairs of all heads that share it, so that a
          page is read once for the group
order     longest first: causal tiles differ in length, and the short ones fill the gaps
part      where tiles are too few for the GPU, each is cut along the cache; a second kernel adds
          the parts up
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch
import triton
from torch import Tensor

from flyweight.transfer import upload

Rows = list[tuple[int, ...]]
SHORTEST_PART = 512  # cached tokens worth a program of their own


@dataclass(frozen=True)
class Tile:
    """Rows of queries × columns of the cache that a program holds at once."""

    rows: int
    columns: int
    warps: int
    stages: int


# by head_dim, up to
LARGE = {64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 8, 3), 256: Tile(128, 32, 8, 2)}
FLOAT32 = Tile(32, 16, 4, 2)  # no speed is asked of it
SMALL_COLUMNS = 64  # of a tile for rows that fill less than an eighth of a large one


@dataclass(frozen=True)
class Cut:
    """Tiles of one shape, on the host."""

    tile: Tile
    # where its pages begin in the tables, first token, tokens, its position, first and end of the
    # columns, part
    tiles: Rows
    merges: Rows  # first token, tokens, first part, parts; none where tiles are whole

    def padded(self) -> Cut:
        """With tiles and merges of no tokens up to a number that comes again."""
        tiles: Rows = [
            (0, 0, 0, 0, 0, 0, part) for part in range(len(self.tiles), rounded(len(self.tiles)))
        ]
        merges: Rows = (
            [(0, 0, 0, 0)] * (rounded(len(self.merges)) - len(self.merges)) if self.merges else []
        )
        return Cut(self.tile, self.tiles + tiles, self.merges + merges)

    @property
    def shape(self) -> tuple[Tile, int, int]:
        return self.tile, len(self.tiles), len(self.merges)

    def launch(self, device: torch.device, into: Tensor | None = None) -> Launch:
        tables = [
            numpy.array(table, dtype=numpy.int32) for table in (self.tiles, self.merges) if table
        ]
        tiles, *merges = upload(device, *tables, into=into)
        return Launch(self.tile, tiles, len(tiles) if merges else 0, merges[0] if merges else None)


@dataclass(frozen=True)
class Launch:
    """Tiles of one shape."""

    tile: Tile
    tiles: Tensor  # int32 [tiles, 7]
    parts: int  # 0: tiles are whole
    merges: Tensor | None  # int32 [merged tiles, 4]


def cut_tiles(tiles: Rows, length: int) -> tuple[Rows, Rows]:
    """The parts of all tiles, `length` columns each, and which parts make a tile."""
    parts: Rows = []
    merges: Rows = []
    for sequence, token, count, position, begin, end, _ in tiles:
        starts = range(begin, end, length)
        merges.append((token, count, len(parts), len(starts)))
        for start in starts:
            parts.append(
                (sequence, token, count, position, start, min(start + length, end), len(parts))
            )
    return parts, merges


def rounded(count: int) -> int:
    """Up to the next power of two, from 8 on."""
    return max(8, 1 << (count - 1).bit_length())


def large_tile(size: int, dtype: torch.dtype) -> Tile:
    return FLOAT32 if dtype == torch.float32 else LARGE[max(64, triton.next_power_of_2(size))]
