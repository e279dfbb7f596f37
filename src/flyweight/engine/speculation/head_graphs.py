"""A drafting head's work after a step of the model, as two kinds of CUDA graphs.

    follow(rows)      the model's hidden states of all rows of the step, with the tokens chosen
                      after them, go through the head's layer; the last right row of each sequence
                      is kept
    chain(sequences, guesses)  head ─► likeliest token ─► layer ─► head ─► …: one guess after the
                      other

Nothing in between comes to the host: which guesses of the step were right is found out on the
device (accept.cu), and wrong rows are written over by the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from flyweight.batch import KVStorage
from flyweight.engine.capture import capture
from flyweight.engine.speculation.shared_rows import (
    CAPACITY,
    FUSED_SIZES,
    SIZES,
    SharedRows,
    eight_rows_differ,
)
from flyweight.kernels import jit
from flyweight.kernels.accept import ChainState, CheckedRows, accept
from flyweight.kernels.attention.decode import rope_pairs
from flyweight.kernels.token import GreedyChoice
from flyweight.models.buffers import Buffers
from flyweight.models.decode_step import DecodeAttention, StepRows, head_shape
from flyweight.models.decoder import Decoder
from flyweight.models.heads.head import DraftHead

# of which rows of a step fill one at least: `accept` writes as many
SEQUENCES = (1, 2, 4, 8, 16, 24, 32, 48, 64)


def unsupported_reason(head: DraftHead, page: int) -> str | None:
    """None, or why its steps cannot be captured."""
    if head.block.mlp.uncaptured_reason:
        return head.block.mlp.uncaptured_reason
    if sum(head.head.sizes) % 8:
        return f"a vocabulary of {sum(head.head.sizes)} tokens is no multiple of 8"
    return head_shape(head.block, head.ropes, page).unsupported_reason()


class HeadGraphs:
    def __init__(
        self,
        head: DraftHead,
        target: Decoder,
        cache: KVStorage,
        rows: SharedRows,
        *,
        guesses: int,
    ):
        assert target.taps is not None
        self.head = head
        self.target = target
        self.cache = cache
        self.rows = rows
        self.guesses = guesses
        device = head.device
        width = head.config.hidden_size
        self.states = target.taps.fixed
        self.chosen = rows.chosen
        blank = len(cache.keys) - 1
        shape = (CAPACITY, rows.tables.shape[1] + 1)
        self.state = ChainState(
            torch.zeros(CAPACITY, width, dtype=head.dtype, device=device),
            torch.zeros(CAPACITY, dtype=torch.int32, device=device),
            torch.full(shape, blank, dtype=torch.int32, device=device),
        )
        self.found = torch.zeros(guesses * CAPACITY, dtype=torch.int64, device=device)
        self.ids = torch.zeros(CAPACITY, dtype=torch.int64, device=device)
        self.buffers = Buffers(CAPACITY, dtype=head.dtype, device=device)
        self.pairs = {name: rope_pairs(*tables) for name, tables in head.ropes.items()}
        # a lone layer's qkv and attention are two kernels
        left_out = FUSED_SIZES if eight_rows_differ(head.block) else ()
        self.sizes = [size for size in SIZES if size not in left_out]
        self.launches: dict[Hashable, Callable[[], None]] = {}
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def warm_up(self, *, least: int) -> None:
        """With chains of at least so many guesses."""
        for size in sorted(self.sizes, reverse=True):
            self._capture(("follow", size), self._follow(size))
        for size in sorted(SEQUENCES, reverse=True):
            for guesses in range(least, self.guesses + 1):
                self._capture(("chain", size, guesses), self._chain(size, guesses))

    def follow(self, rows: int) -> None:
        """The step's rows are in `rows`, and so are the tokens chosen after them."""
        size = next(size for size in self.sizes if size >= rows)
        self._replay(("follow", size), lambda: self._follow(size))

    def chain(self, sequences: int, guesses: int) -> Tensor:
        """Guesses after `state`, which goes on with them: int64 [guesses, at least so many]."""
        size = next(size for size in SEQUENCES if size >= sequences)
        self._replay(("chain", size, guesses), lambda: self._chain(size, guesses))
        return self._places(size, guesses)

    def _places(self, size: int, guesses: int) -> Tensor:
        return self.found[: guesses * size].view(guesses, size)

    # -- what is captured ------------------------------------------------------------------

    def _stage(self, rows: StepRows) -> DecodeAttention:
        return DecodeAttention(
            [self.head.block],
            [self.cache],
            rows,
            ropes=self.head.ropes,
            pairs=self.pairs,
            buffers=self.buffers,
        )

    def _embed(self, tokens: Tensor) -> Tensor:
        table = self.head.embedding
        out = self.buffers.take("embedded", self.head.config.hidden_size, len(tokens))
        table.write(tokens, out)
        return out

    def _follow(self, size: int) -> Callable[[], None]:
        head = self.head
        shared = self.rows
        step = StepRows(
            self.chosen[:size], shared.lengths[:size], shared.tables[:size], shared.before[:size]
        )
        stage = self._stage(step)
        checked = CheckedRows(
            self.chosen[:size],
            shared.tokens[:size],
            shared.before[:size],
            shared.lengths[:size],
            shared.tables[:size],
            shared.first[:size],
        )
        hidden = self.buffers.take("hidden", head.config.hidden_size, size)

        def launch() -> None:
            with jit.overlap(head.block.mlp.overlaps(size)):
                head.begin(self.states[:size], hidden)
                stage.place = 0
                result = head.step(self._embed(self.chosen[:size]), hidden, stage, self.buffers)
                accept(checked, result, self.state)

        return launch

    def _chain(self, size: int, guesses: int) -> Callable[[], None]:
        head = self.head
        state = self.state
        hidden = state.hidden[:size]
        lengths = state.lengths[:size]
        found = self._places(size, guesses)
        stage = self._stage(StepRows(self.ids[:size], lengths, state.tables[:size]))
        logits = self.buffers.take("logits", sum(head.head.sizes), size)
        greedy = GreedyChoice(size, head.device)

        def launch() -> None:
            with jit.overlap(head.block.mlp.overlaps(size)):
                for guess, tokens in enumerate(found):
                    head.logits(hidden, logits)
                    if head.to_model is None:
                        greedy(logits, tokens, lengths)
                    else:
                        greedy(logits, self.ids[:size], lengths)
                        torch.index_select(head.to_model, 0, self.ids[:size], out=tokens)
                    if guess + 1 < guesses:
                        stage.place = 0
                        result = head.step(self._embed(tokens), hidden, stage, self.buffers)
                        if result.data_ptr() != hidden.data_ptr():
                            hidden.copy_(result)

        return launch

    # -- capture and replay ----------------------------------------------------------------

    def _replay(self, key: Hashable, make: Callable[[], Callable[[], None]]) -> None:
        if key not in self.graphs:
            self._capture(key, make())
        self.graphs[key].replay()

    @torch.inference_mode()
    def _capture(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Run once before, which compiles what is not compiled yet. The state is put back: a chain
        that ran twice would have gone on from itself.
        """
        with self.target.active():
            kept = self.state.hidden.clone(), self.state.lengths.clone()
            launch()
            torch.cuda.synchronize()
            self.state.hidden.copy_(kept[0])
            self.state.lengths.copy_(kept[1])
            torch.cuda.synchronize()
            pool = next(iter(self.graphs.values())).pool() if self.graphs else None
            self.graphs[key] = capture(launch, pool)
            self.launches[key] = launch
