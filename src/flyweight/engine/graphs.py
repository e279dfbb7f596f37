"""Decode steps of a whole model as CUDA graphs, one for each number of rows: capture and replay.

What a step launches is `models.decode_step`, then the choice of tokens: the likeliest, or (another
graph) what each row asks for by temperature, filters and biases. That is data, so no mix of
requests needs a graph of its own. What needs the host or large tables, masks and penalties, is
sampled behind the graph of the likeliest tokens (`Rows.choose`). A graph is captured when it is
first needed, or by `warm_up`, largest first, so that the small ones live in the memory of the large
ones. Where adapters are loaded, steps in which no row has one have graphs of their own, which do
not look for any.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from flyweight.batch import KVStorage
from flyweight.engine.capture import capture
from flyweight.engine.rows import SIZES, Rows
from flyweight.engine.speculation.shared_rows import SharedRows
from flyweight.kernels.sample import When
from flyweight.kernels.token import GreedyChoice
from flyweight.models.buffers import Buffers, StepRows
from flyweight.models.decode_step import DecodeStep, pairs_of, unsupported_reason
from flyweight.models.decoder import Decoder

__all__ = ["DecodeGraphs", "Step", "unsupported_reason"]


class Choice(enum.Enum):
    """What ends a captured step."""

    NONE = enum.auto()  # its logits; the rows stay as they are
    GREEDY = enum.auto()
    SAMPLED = enum.auto()


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
        tokens, lengths = self.rows.taken
        self.greedy(self.decode.padded_logits, tokens[: self.size], lengths[: self.size])

    def sample(self) -> None:
        """The rows take tokens by temperature, filters and biases (`Rows.samples_in_step`)."""
        rows = self.rows
        assert isinstance(rows, Rows) and rows.sampler is not None
        table = rows.sampling.for_kernel(rows.tokens, rows.lengths)
        rows.sampler(self.logits, table, when=When.IN_STEP)


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
        whole_layers: bool = True,
        beside: DecodeGraphs | None = None,
    ):
        """`beside`: graphs of steps with adapters, of which these are the ones without;
        `whole_layers`: kernels leave each other room where all of a layer can.
        """
        self.decoder = decoder
        self.caches = caches
        self.rows = rows
        self.separate = separate
        self.whole_layers = whole_layers
        self.beside = beside
        self.sizes = [size for size in sizes if size <= rows.capacity]
        self.largest = max(self.sizes)
        self.pairs: dict[str | None, Tensor]
        self.buffers: Buffers
        if beside is not None:
            self.pairs, self.buffers = beside.pairs, beside.buffers
        else:
            self.pairs = pairs_of(decoder)
            self.buffers = Buffers(self.largest, dtype=decoder.dtype, device=decoder.device)
        self.unadapted: DecodeGraphs | None = None
        if rows.adapters is not None and beside is None:
            self.unadapted = DecodeGraphs(
                decoder,
                caches,
                rows,
                sizes=self.sizes,
                separate=separate,
                whole_layers=whole_layers,
                beside=self,
            )
        self.steps: dict[int, Step] = {}
        self.graphs: dict[tuple[int, Choice], torch.cuda.CUDAGraph] = {}

    def leave_out(self, sizes: Iterable[int]) -> None:
        """Steps of so many rows run as larger ones."""
        for size in sizes:
            self.sizes.remove(size)
            self.steps.pop(size, None)

    def logits(self, count: int) -> Tensor:
        """Of one step of the first `count` rows, which stay as they are."""
        return self._replay(count, Choice.NONE)

    def advance(self, count: int) -> Tensor:
        return self._replay(count, Choice.GREEDY)

    def sample(self, count: int) -> Tensor:
        return self._replay(count, Choice.SAMPLED)

    def _replay(self, count: int, choice: Choice) -> Tensor:
        if self.unadapted is not None and not self.rows.adapted:
            return self.unadapted._replay(count, choice)
        size = next(size for size in self.sizes if size >= count)
        if (size, choice) not in self.graphs:
            self.capture(size, choice)
        self.graphs[size, choice].replay()
        if self.decoder.taps is not None:
            self.decoder.taps.point(count)
        return self.steps[size].logits[:count]

    def warm_up(self, sizes: Iterable[int] | None = None, *, advances: bool = True) -> None:
        """Capture ahead of the first request, and load what samples."""
        if self.unadapted is not None:
            self.unadapted.warm_up(sizes, advances=advances)
        choices = [Choice.GREEDY] if advances else [Choice.NONE]
        if isinstance(self.rows, Rows) and self.rows.sampler is not None:
            self.rows.sampler.prepare(self.decoder.dtype, torch.float32)
            if advances:
                choices.append(Choice.SAMPLED)
        for size in sorted(self.sizes if sizes is None else sizes, reverse=True):
            for choice in choices:
                self.capture(size, choice)

    def step(self, size: int) -> Step:
        if size not in self.steps:
            rows = self.rows
            before = None if rows.before is None else rows.before[:size]
            adapters = None if rows.adapters is None or self.beside else rows.adapters[:size]
            states = None if rows.states is None else rows.states[:size]
            first = StepRows(
                rows.tokens[:size],
                rows.lengths[:size],
                rows.tables[:size],
                before,
                adapters,
                states,
            )
            decode = DecodeStep(
                self.decoder,
                self.caches,
                first,
                self.buffers,
                pairs=self.pairs,
                separate=self.separate,
                beside=self.whole_layers,
            )
            self.steps[size] = Step(decode, rows)
        return self.steps[size]

    def _try(self, step: Step) -> None:
        """States would move on twice, so this time the rows' are the spare one."""
        states = self.rows.states
        if states is None:
            return step.launch()
        held = states.clone()
        states.fill_(self.rows.spare_state or 0)
        step.launch()
        states.copy_(held)

    @torch.inference_mode()
    def capture(self, size: int, choice: Choice = Choice.GREEDY) -> None:
        """The step is run once before, which compiles what is not compiled yet. The rows may be in
        use: it writes the keys and values that the step itself will write, and takes no token.
        """
        with self.decoder.active():
            step = self.step(size)
            self._try(step)
            if choice is Choice.SAMPLED and isinstance(self.rows, Rows):
                self.rows.sampling.bias  # noqa: B018 (made now, for rows that may come with biases)
            torch.cuda.synchronize()
            captured = [
                *self.graphs.values(),
                *(self.beside.graphs.values() if self.beside else ()),
            ]

            def launch() -> None:
                step.launch()
                if choice is Choice.GREEDY:
                    step.advance()
                elif choice is Choice.SAMPLED:
                    step.sample()

            graph = capture(launch, pool=captured[0].pool() if captured else None)
            self.graphs[size, choice] = graph
