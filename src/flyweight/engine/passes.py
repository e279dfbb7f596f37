"""Prefill passes of a whole model, and mixed ones, as CUDA graphs: one launch instead of some four
hundred from Python.

A step's tokens are padded to one of SIZES (`packed.Padding`), and all that it reads lies in a fixed
place: its integers in `inputs`, how its attention is cut up in the tables of a `FixedPlan`. So what
is captured for one step serves every other of the same key: size, and the numbers of tiles of its
attention, rounded up. Sizes are chosen so that the matrix kernels, whose tiles have up to 256 rows,
do nothing more for the padding. A prompt that runs alone from its first token needs no tables:
torch's attention takes it, and tokens see nothing of what comes after them.

A pass is launched one by one before it is captured, which compiles what is not compiled yet. A
prompt alone from its first token is captured at once; mixed steps, of which there are many kinds,
when a kind comes again. Parts of prompts without answers, which take turns with them in a server,
come in few kinds (`packed.PART_SIZES`), all captured before its first request (`warm_up_parts`).
Capturing takes as long as several steps. So a server, whose readers wait meanwhile, leaves it for
when nobody is there (`rest`), unless a kind keeps coming. Longer passes are launched one by one:
they keep the device busy for longer than that takes; their kernels are compiled before the first
request, too (`warm_up_long`). The head and the choice of tokens follow outside of the graph, while
the device is busy.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy
import torch
from torch import Tensor

from flyweight.batch import NOBODY, Batch, KVStorage
from flyweight.engine import graphs, packed
from flyweight.engine.capture import capture
from flyweight.engine.packed import PART_SIZES, SIZES, filler
from flyweight.engine.rows import Rows
from flyweight.engine.work import Work
from flyweight.kernels.dispatch import unsupported_by_triton
from flyweight.models.attention import Paged, Plans
from flyweight.models.decoder import Decoder
from flyweight.transfer import upload

INSISTENT = 4  # times that a kind has come: then it is captured even though readers wait
MOST = 96  # kinds of passes held; the one that was not used for longest goes
# cached tokens: with so many the attention of a part of a prompt is cut up in different ways
AFTER = (16, 1024, 2048)
END = 16  # tokens of one prompt's end beside the beginning of another
# passes that are not captured: numbers of tokens within so many ask for the same kernels
LONG_STEP = 256
HEADS = 8  # prompts that a pass ends: with more the head has no kernels of its own


def unsupported_reason(decoder: Decoder, page: int) -> str | None:
    """None, or why this model's passes cannot be captured."""
    return graphs.unsupported_reason(decoder, page) or unsupported_by_triton()


def alone_reason(decoder: Decoder) -> str | None:
    """None, or why of its passes only prompts alone from their first token can be captured."""
    if any(block.latent is not None for block in decoder.blocks):
        return "what latent attention reads of the cache is cut up on the host"
    return None


@dataclass
class Captured:
    plans: Plans = field(default_factory=dict)
    graph: torch.cuda.CUDAGraph | None = None
    seen: int = 0  # times
    waiting: Batch | None = None  # one of its kind, to be captured when there is time


class PassGraphs:
    patient = False  # whether to capture mixed steps when nobody waits

    def __init__(
        self, decoder: Decoder, caches: Sequence[KVStorage], rows: Rows, *, alone: bool = False
    ):
        self.alone = alone
        self.decoder, self.caches, self.device = decoder, caches, decoder.device
        most, sequences = SIZES[-1], rows.capacity + 1  # the padding may be one
        blocks = max(rows.pages, most // caches[0].block_size + 1)
        # tokens, positions, slots and what is sampled from them; tables; and room to align
        size = 8 * (7 * most + 4 * sequences) + 4 * sequences * (blocks + 1) + 256
        self.adapted = rows.adapters is not None
        size += 4 * most if self.adapted else 0
        self.inputs = torch.zeros(size, dtype=torch.uint8, device=self.device)
        self.states = torch.zeros(
            most, decoder.config.hidden_size, dtype=decoder.dtype, device=self.device
        )
        self.windows, self.context = set(decoder.config.windows), rows.pages * caches[0].block_size
        self.held: dict[Hashable, Captured] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def padded_tokens(self, works: Sequence[Work]) -> int | None:
        if self.alone and not packed.begins_alone(works):
            return None
        return packed.padded_tokens(works)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture prompts alone of every size that the context allows; the largest first, whose
        memory the others live in.
        """
        for size in sorted((size for size in SIZES if size < self.context + 128), reverse=True):
            self._prepare([(size, 0)])

    @torch.inference_mode()
    def warm_up_parts(self) -> None:
        """And parts of prompts: after little and after much of the same prompt, and the end of one
        beside the beginning of another, which take a tile more.
        """
        if self.alone:
            return
        for size in reversed(PART_SIZES):
            fitting = [cached for cached in AFTER if cached + size <= self.context]
            for cached in fitting:
                self._prepare([(size, cached)])
            for cached in fitting[1:2]:
                self._prepare([(size - END, 0), (END, cached)])

    @torch.inference_mode()
    def warm_up_long(self, most: int) -> None:
        """Compile what passes of more tokens ask for, up to `most`, and heads of several prompts: a
        stall in the first pass of a kind would hold up whoever is there. A layer of each kind is
        enough.
        """
        decoder = self.decoder
        if self.alone or decoder.config.state_layers or decoder.offload is not None:
            return
        kinds = {(block.plan.attention, type(block.mlp)): block for block in decoder.blocks[::-1]}
        page, spare = self.caches[0].block_size, len(self.caches[0].keys) - 1
        with decoder.active():
            for size in range(SIZES[-1] + LONG_STEP, most + 1, LONG_STEP):
                starts = [*range(0, size, min(size // 2, self.context)), size]
                lengths = [end - begin for begin, end in itertools.pairwise(starts)]
                table = numpy.full((len(lengths), -(-lengths[0] // page)), spare, dtype=numpy.int32)
                adapters = [numpy.full(size, NOBODY, dtype=numpy.int32)] if self.adapted else []
                tokens, positions, slots, *chosen, tables = upload(
                    self.device, *filler(size, spare, page), *adapters, table
                )
                batch = Batch(
                    tokens, positions, slots, tables, starts, lengths, tokens[:0], *chosen
                )
                stage = Paged(batch, self.caches, decoder.ropes, decoder.ops)
                hidden = decoder.embedding(tokens)
                for block in kinds.values():
                    hidden = block.run(hidden, stage, in_place=True)
            for ended in range(1, HEADS + 1):
                decoder.logits(self.states[:ended])

    def _prepare(self, parts: Sequence[tuple[int, int]]) -> None:
        """Capture a pass of sequences that nobody asked for: tokens of each, and how many of it are
        cached.
        """
        page, spare = self.caches[0].block_size, len(self.caches[0].keys) - 1
        size = sum(new for new, _ in parts)
        lengths = [new + cached for new, cached in parts]
        starts = [0, *itertools.accumulate(new for new, _ in parts)]
        table = numpy.full((len(parts), -(-max(lengths) // page)), spare, dtype=numpy.int32)
        with self.decoder.active():
            adapters = [numpy.full(size, NOBODY, dtype=numpy.int32)] if self.adapted else []
            tokens, positions, slots, *chosen, tables = upload(
                self.device, *filler(size, spare, page), *adapters, table, into=self.inputs
            )
            batch = Batch(tokens, positions, slots, tables, starts, lengths, tokens[:0], *chosen)
            captured = self._find(batch)
            if captured.graph is None:
                self.decoder.hidden(batch, self.caches, captured.plans)
                captured.graph = self._capture(batch, captured.plans)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """As `Decoder.forward`, for a batch that was packed into `inputs`."""
        return self.decoder.logits(self.hidden(batch).index_select(0, batch.output_rows))

    def hidden(self, batch: Batch) -> Tensor:
        """[tokens, hidden], until the next pass."""
        size = len(batch.tokens)
        captured = self._find(batch)
        captured.seen += 1
        if captured.graph is not None:
            captured.graph.replay()
            if self.decoder.taps is not None:
                self.decoder.taps.point(size)
            return self.states[:size]
        result = self.decoder.hidden(batch, self.caches, captured.plans)
        if batch.begins_alone or captured.seen >= (INSISTENT if self.patient else 2):
            captured.graph = self._capture(batch, captured.plans)
            captured.waiting = None
        elif captured.seen > 1:
            captured.waiting = batch
        return result

    @torch.inference_mode()
    def rest(self) -> bool:
        """Nobody is there: capture a kind that came again. Whether there was one."""
        for captured in self.held.values():
            if captured.waiting is not None:
                with self.decoder.active():
                    captured.graph = self._capture(captured.waiting, captured.plans)
                captured.waiting = None
                return True
        return False

    def _find(self, batch: Batch) -> Captured:
        """The pass of this batch's kind, with this batch's tables, whether it is captured or
        not.
        """
        fixed = {} if batch.begins_alone else self._plans(batch)
        key = (len(batch.tokens), *((window, plan.shape) for window, plan in fixed.items()))
        if key in self.held:
            captured = self.held.pop(key)
            for window, plan in fixed.items():
                captured.plans[window].fill(plan)
        else:
            self._make_room()
            captured = Captured({window: plan.place() for window, plan in fixed.items()})
        self.held[key] = captured  # behind all others: the last used
        return captured

    def _plans(self, batch: Batch) -> Plans:
        from flyweight.kernels.attention.plan import FixedPlan

        return {
            window: FixedPlan(batch, self.caches[0], window, heads=self.decoder.config.heads)
            for window in self.windows
        }

    def _make_room(self) -> None:
        if len(self.held) >= MOST:
            torch.cuda.synchronize(self.device)  # it may be running
            del self.held[next(iter(self.held))]

    def _capture(self, batch: Batch, plans: Plans) -> torch.cuda.CUDAGraph:
        def launch() -> None:
            self.states[: len(batch.tokens)].copy_(self.decoder.hidden(batch, self.caches, plans))

        return capture(launch, pool=self.pool)
