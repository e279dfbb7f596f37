"""Decode steps of a whole model as CUDA graphs, one for each number of rows: capture and replay.

What a step launches is `models.decode_step`, then the choice of the likeliest tokens. Rows that want
theirs chosen otherwise are sampled behind the graph (`Rows.choose`): what they ask for is data, so
no mix of requests needs a graph of its own. A graph is captured when it is first needed, or by
`warm_up`, largest first, so that the small ones live in the memory of the large ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from flyweight.batch import KVStorage
from flyweight.engine.rows import SIZES, Rows
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

    def advance(self) -> None:
        """The rows take their likeliest tokens."""
        rows = self.rows
        assert isinstance(rows, Rows), "rows of guesses are sampled from outside of the step"
        self.greedy(
            self.decode.padded_logits, rows.tokens[: self.size], rows.lengths[: self.size]
        )


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
        # by size, and whether rows take tokens
        self.graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}

    def leave_out(self, sizes: Iterable[int]) -> None:
        """Steps of so many rows run as larger ones."""
        for size in sizes:
            self.sizes.remove(size)
            self.steps.pop(size, None)

    def logits(self, count: int) -> Tensor:
        """Of one step of the first `count` rows, which stay as they are."""
        return self._replay(count, False)

    def advance(self, count: int) -> Tensor:
        return self._replay(count, True)

    def _replay(self, count: int, advances: bool) -> Tensor:
        size = next(size for size in self.sizes if size >= count)
        if (size, advances) not in self.graphs:
            self.capture(size, advances)
        self.graphs[size, advances].replay()
        if self.decoder.taps is not None:
            self.decoder.taps.point(count)
        return self.steps[size].logits[:count]

    def warm_up(self, sizes: Iterable[int] | None = None, *, advances: bool = True) -> None:
        """Capture ahead of the first request, and load what samples."""
        for size in sorted(self.sizes if sizes is None else sizes, reverse=True):
            self.capture(size, advances)
        if isinstance(self.rows, Rows) and self.rows.sampler is not None:
            self.rows.sampler.prepare(self.decoder.dtype, torch.float32)

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
    def capture(self, size: int, advances: bool = True) -> None:
        """The step is run once before, which compiles what is not compiled yet. The rows may be in
        use: it writes the keys and values that the step itself will write, and takes no token.
        """
        with self.decoder.active():
            step = self.step(size)
            step.launch()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            pool = next(iter(self.graphs.values())).pool() if self.graphs else None
            # other threads may go on allocating
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                step.launch()
                if advances:
                    step.advance()
            self.graphs[size, advances] = graph
