"""How a step's attention is cut up: which sequences prefill_attention.cu takes, which torch's
attention, and which the Triton kernel. Made by the host from the lists of the batch, so that
nothing waits for the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy
import torch
import triton
from torch import Tensor

from flyweight import gpu
from flyweight.batch import Batch, KVStorage
from flyweight.kernels.attention import prefill
from flyweight.kernels.attention.prefill import Heads, Span, Units
from flyweight.kernels.attention.tiles import (
    SHORTEST_PART,
    SMALL_COLUMNS,
    Cut,
    Launch,
    Rows,
    Tile,
    cut_tiles,
    large_tile,
)
from flyweight.kernels.attention.torch_runs import Run
from flyweight.transfer import ALIGNMENT, upload

FRESH_FROM = 64  # new tokens; from here on a sequence is a prompt, not rows of one
# tokens; from here on neighbours of different lengths are apart, since cuDNN's kernel is faster
# than one for all
LONG = 2048
MOST_ENDS = 4  # of prompts in one pass, that go with the large tiles


class Plan:
    """How a step's attention is cut up, made once and used by every layer with the same window."""

    def __init__(self, batch: Batch, window: int | None):
        self.batch = batch
        self.window = window or 0
        starts = batch.query_starts
        lengths = batch.kv_lengths
        self.spans = [
            (start, end - start, length)
            for start, end, length in zip(starts, starts[1:], lengths, strict=False)
        ]
        self.held: dict[
            tuple[bool, int, int, Tile, frozenset[int]], tuple[list[Run], list[Launch]]
        ] = {}
        self.units: dict[Heads, tuple[list[Units], frozenset[int]]] = {}

    def prompts(
        self, heads: Heads, page: int, *, codes: bool
    ) -> tuple[list[Units], frozenset[int]]:
        """What prefill_attention.cu takes, and which sequences those are: whole prompts, and chunks
        of others where they fill half the GPU (the Triton kernel cuts long contexts of few rows)
        and that kernel reads pages of so many tokens, or `codes`, which are read before it.
        """
        if heads not in self.units:
            device = self.batch.tokens.device
            whole = {i: Span(*span, span[0]) for i, span in enumerate(self.spans) if self.fresh(i)}
            chunks = [
                i
                for i, (_, new, _) in enumerate(self.spans)
                if i not in whole
                and new >= FRESH_FROM
                and not self.window
                and (codes or page % prefill.BOX == 0)
            ]
            if sum(
                -(-self.spans[i][1] // heads.tokens) for i in chunks
            ) * heads.kv_heads * 2 < _processors(device):
                chunks = []
            cuts = [Units.cut(list(whole.values()), heads, 0, device)] if whole else []
            if chunks and codes:
                cuts.append(self._read_chunks(chunks, heads, page))
            elif chunks:
                width = self.batch.block_tables.shape[1]
                spans = [Span(*self.spans[i], i * width) for i in chunks]
                cuts.append(Units.cut(spans, heads, page, device))
            self.units[heads] = cuts, frozenset(whole) | frozenset(chunks)
        return self.units[heads]

    def _read_chunks(self, chunks: Sequence[int], heads: Heads, page: int) -> Units:
        """Of sequences whose keys and values are read one sequence after the other."""
        tables = self.batch.block_tables
        inside = torch.arange(page, device=tables.device)
        spans, slots, base = list[Span](), list[Tensor](), 0
        for i in chunks:
            length = self.spans[i][2]
            spans.append(Span(*self.spans[i], base))
            blocks = tables[i, : -(-length // page)].long()
            slots.append((blocks[:, None] * page + inside).flatten()[:length])
            base += length
        return Units.cut(spans, heads, 0, tables.device, torch.cat(slots))

    def fresh(self, sequence: int) -> bool:
        _, new, length = self.spans[sequence]
        return new == length >= FRESH_FROM and (not self.window or length <= self.window)

    def cut(
        self,
        group: int,
        kv_heads: int,
        *,
        large: Tile,
        fresh: bool,
        apart: frozenset[int] = frozenset(),
    ) -> tuple[list[Run], list[Launch]]:
        """Runs for torch and launches for the kernel, without the sequences `apart`; `group` query
        heads share each kv head.
        """
        key = (fresh, group, kv_heads, large, apart)
        if key not in self.held:
            device = self.batch.tokens.device
            cuts = self.cuts(group, kv_heads, large=large, fresh=fresh, apart=apart)
            self.held[key] = (
                self._runs(apart) if fresh else [],
                [cut.launch(device) for cut in cuts],
            )
        return self.held[key]

    def cuts(
        self,
        group: int,
        kv_heads: int,
        *,
        large: Tile,
        fresh: bool,
        apart: frozenset[int] = frozenset(),
    ) -> list[Cut]:
        small = Tile(
            max(16, triton.next_power_of_2(group)),
            min(SMALL_COLUMNS, large.columns),
            4,
            large.stages,
        )
        sequences: dict[Tile, list[int]] = {large: [], small: []}
        for i, (_, new, _) in enumerate(self.spans):
            if i not in apart and not (fresh and self.fresh(i)):
                sequences[small if new * group * 8 <= large.rows else large].append(i)
        if sequences[large] and self._few_ends(sequences[small]):
            sequences = {large: sorted(sequences[large] + sequences[small])}
        return [
            self._cut(which, tile, group, kv_heads) for tile, which in sequences.items() if which
        ]

    def _few_ends(self, short: list[int]) -> bool:
        """Ends of prompts, and padding, no answers: too few for a launch of their own, which would
        make a pass of prompts one of another kind.
        """
        answers = any(self.spans[i][1] == 1 < self.spans[i][2] for i in short)
        return len(short) <= MOST_ENDS and not answers

    def _runs(self, apart: frozenset[int]) -> list[Run]:
        def kind(i: int) -> tuple[bool, int]:
            return i not in apart and self.fresh(i), self.spans[i][1] if self.spans[i][
                1
            ] >= LONG else 0

        runs = []
        for (fresh, _), members in itertools.groupby(range(len(self.spans)), key=kind):
            if fresh:
                spans = [self.spans[i] for i in members]
                starts = [start - spans[0][0] for start, *_ in spans]
                lengths = [length for *_, length in spans]
                end = spans[-1][0] + lengths[-1]
                longest = max(lengths)
                equal = min(lengths) == longest
                runs.append(
                    Run(
                        spans[0][0],
                        end,
                        longest,
                        None if equal else self._starts([*starts, end - spans[0][0]]),
                    )
                )
        return runs

    def _starts(self, starts: list[int]) -> Tensor:
        return upload(self.batch.tokens.device, numpy.array(starts, dtype=numpy.int32))[0]

    def _cut(self, sequences: list[int], tile: Tile, group: int, kv_heads: int) -> Cut:
        tokens = tile.rows // group
        width = self.batch.block_tables.shape[1]
        tiles: Rows = []
        for i in sequences:
            start, new, length = self.spans[i]
            for first in range(0, new, tokens):
                position = length - new + first
                count = min(tokens, new - first)
                begin = max(0, position - self.window + 1) if self.window else 0
                tiles.append(
                    (i * width, start + first, count, position, begin, position + count, 0)
                )
        tiles.sort(key=lambda t: t[4] - t[5])
        room = _processors(self.batch.tokens.device) // (len(tiles) * kv_heads)
        longest = tiles[0][5] - tiles[0][4]
        if room < 2 or longest < 2 * SHORTEST_PART:
            return Cut(tile, tiles, [])
        length = max(SHORTEST_PART, -(-longest // room))
        return Cut(tile, *cut_tiles(tiles, -(-length // tile.columns) * tile.columns))


class FixedPlan(Plan):
    """All sequences through pages, by tables that stay where they are and keep their sizes: what a
    captured pass reads.

    Plans of the same `shape` are the same launches; `fill` gives one the tables of another.
    """

    def __init__(self, batch: Batch, cache: KVStorage, window: int | None, *, heads: int):
        super().__init__(batch, window)
        kv_heads, size = cache.keys.shape[2:]
        cuts = self.cuts(
            heads // kv_heads, kv_heads, large=large_tile(size, cache.dtype), fresh=False
        )
        self.padded = [cut.padded() for cut in cuts]
        self.shape = tuple(cut.shape for cut in self.padded)
        self.places: list[Tensor] = []
        self.launches: list[Launch] = []

    def place(self) -> FixedPlan:
        """Take memory for the tables, and fill it."""
        sizes = [28 * tiles + 16 * merges + 2 * ALIGNMENT for _, tiles, merges in self.shape]
        self.places = [
            torch.empty(size, dtype=torch.uint8, device=self.batch.tokens.device) for size in sizes
        ]
        self.fill(self)
        return self

    def fill(self, other: FixedPlan) -> None:
        assert self.shape == other.shape
        device = self.batch.tokens.device
        self.launches = [
            cut.launch(device, place) for cut, place in zip(other.padded, self.places, strict=True)
        ]

    def prompts(
        self, heads: Heads, page: int, *, codes: bool
    ) -> tuple[list[Units], frozenset[int]]:
        return [], frozenset()

    def cut(
        self,
        group: int,
        kv_heads: int,
        *,
        large: Tile,
        fresh: bool,
        apart: frozenset[int] = frozenset(),
    ) -> tuple[list[Run], list[Launch]]:
        return [], self.launches


def _processors(device: torch.device) -> int:
    return gpu.of(device).processors if device.type == "cuda" else 8


def plan_attention(batch: Batch, cache: KVStorage, window: int | None = None) -> Plan:
    return Plan(batch, window)
