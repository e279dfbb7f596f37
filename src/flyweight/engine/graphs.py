"""Decode steps of a whole model as CUDA graphs, one for each number of rows and way of sampling:
capture and replay.

What a step launches is `models.decode_step`. A graph is captured when it is first needed, or by
`warm_up`, largest first, so that the small ones live in the memory of the large ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from flyweight.batch import KVStorage
from flyweight.engine.rows import SIZES, Rows
from flyweight.engine.sampling import GREEDY, Mode
from flyweight.engine.speculation.shared_rows import SharedRows
from flyweight.kernels.token import GreedyChoice
from flyweight.models.buffers import Buffers
from flyweight.models.decode_step import DecodeStep, StepRows, pairs_of, unsupported_reason
from flyweight.models.decoder import Decoder

__all__ = ["DecodeGraphs", "Step", "unsupported_reason"]


class Step:
    """A decode step of the first `size` rows, and the choice of their next tokens."""

    def __init__(self, decode: DecodeStep, rows: Rows | SharedRows):
        self.decode = decode
        self.rows = rows
        self.size = decode.size
        self.logits = decode.logits
        self.greedy = GreedyChoice(self.size, decode.logits.device)

    def launch(self) -> None:
        self.decode.launch()

    def choose(self, mode: Mode) -> Tensor:
        assert isinstance(self.rows, Rows), "rows of guesses are sampled from outside of the step"
        return self.rows.choose(
            self.logits, mode, slice(0, self.size), self.rows.lengths[: self.size].long()
        )

    def advance(self, mode: Mode) -> None:
        """The rows take their next tokens."""
        assert isinstance(self.rows, Rows)
        if mode == GREEDY:
            self.greedy(
                self.decode.padded_logits,
                self.rows.tokens[: self.size],
                self.rows.lengths[: self.size],
            )
        else:
            self.rows.advance(self.choose(mode), mode, self.size)


class DecodeGraphs:
    """Captured steps; n rows run as the next larger size, padded with rows of length 0."""

    def __init__(
        self,
        decoder: Decoder,
        caches: Sequence[KVStorage],
        rows: Rows | SharedRows,
        *,
        sizes: Sequence[int] = SIZES,
        separate: str | None = None,
    ):
        self.decoder = decoder
        self.caches = caches
        self.rows = rows
        self.separate = separate
        self.sizes = [size for size in sizes if size <= rows.capacity]
        self.largest = max(self.sizes)
        self.pairs = pairs_of(decoder)
        self.buffers = Buffers(self.largest, dtype=decoder.dtype, device=decoder.device)
        self.steps: dict[int, Step] = {}
        self.graphs: dict[tuple[int, Mode | None], torch.cuda.CUDAGraph] = {}

    def logits(self, count: int) -> Tensor:
        return self._replay(count, None)

    def advance(self, count: int, mode: Mode) -> Tensor:
        return self._replay(count, mode)

    def _replay(self, count: int, mode: Mode | None) -> Tensor:
        size = next(size for size in self.sizes if size >= count)
        if (size, mode) not in self.graphs:
            self.capture(size, mode)
        self.graphs[size, mode].replay()
        return self.steps[size].logits[:count]

    def warm_up(
        self, sizes: Iterable[int] | None = None, modes: Sequence[Mode | None] = (GREEDY,)
    ) -> None:
        """Capture ahead of the first request."""
        for size in sorted(self.sizes if sizes is None else sizes, reverse=True):
            for mode in modes:
                self.capture(size, mode)

    def step(self, size: int) -> Step:
        if size not in self.steps:
            rows = self.rows
            before = None if rows.before is None else rows.before[:size]
            adapters = None if rows.adapters is None else rows.adapters[:size]
            first = StepRows(
                rows.tokens[:size], rows.lengths[:size], rows.tables[:size], before, adapters
            )
            decode = DecodeStep(
                self.decoder,
                self.caches,
                first,
                self.buffers,
                pairs=self.pairs,
                separate=self.separate,
            )
            self.steps[size] = Step(decode, rows)
        return self.steps[size]

    @torch.inference_mode()
    def capture(self, size: int, mode: Mode | None) -> None:
        """The step is run once before, which compiles what is not compiled yet. The rows may be in
        use: it writes the keys and values that the step itself will write, and takes no token.
        """
        with self.decoder.active():
            step = self.step(size)
            step.launch()
            if mode is not None:
                step.choose(mode)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            pool = next(iter(self.graphs.values())).pool() if self.graphs else None
            # other threads may go on allocating
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                step.launch()
                if mode is not None:
                    step.advance(mode)
            self.graphs[size, mode] = graph
