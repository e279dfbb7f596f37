"""Runs a scheduled step: a captured one where every row of `Rows` decodes, else packed into a
Batch: for a captured pass, or for the decoder where it is too long for one.

It owns the memory of the KV cache and nothing of the policy. Nothing here waits for the device:
tokens are sampled into the rows, from where the next step takes them, and come to the host on the
side, to be read when the host needs them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy
import torch
from torch import Tensor

from flyweight.engine.contracts import DecodeSteps, Follower, Model, Passes
from flyweight.engine.flight import Flight, Result
from flyweight.engine.memory import CacheShape
from flyweight.engine.packed import Padding, following, pack
from flyweight.engine.request import Constraint, Request
from flyweight.engine.rows import Rows, masked
from flyweight.engine.sampling import GREEDY, top_logprobs
from flyweight.engine.speculation.shared_rows import (
    FUSED_SIZES,
    SIZES,
    SharedRows,
    is_unread,
    runs_as_eight,
)
from flyweight.engine.speculation.verify import choose_after_drafts
from flyweight.engine.work import Work
from flyweight.kernels.sample import Guessed
from flyweight.models.adapters import Adapters
from flyweight.models.decoder import Decoder
from flyweight.transfer import Download, upload


def slots_of(model: Model) -> Mapping[str, int]:
    """The slots of a model's adapters by their names."""
    adapters: Adapters | None = getattr(model, "adapters", None)
    return {} if adapters is None else adapters.slots


class Runner:
    """`launch` starts a step and returns at once (on a GPU); nothing in it waits for the device."""

    def __init__(
        self,
        model: Model,
        shape: CacheShape,
        *,
        blocks: int,
        block_size: int,
        vocabulary: int,
        device: torch.device,
        context: int,
        sequences: int,
        state_slots: int = 0,
    ):
        self.model = model
        self.device = device
        self.follower: Follower | None = None
        self.block_size = block_size
        self.rows = Rows(
            sequences,
            pages=-(-context // block_size),
            vocabulary=vocabulary,
            device=device,
            adapted=bool(slots_of(model)),
            states=None if shape.states is None else state_slots,
        )
        self.spare = blocks  # a block that no sequence gets: the padding of a pass writes there
        # and a spare slot, where steps that are only captured leave their states
        self.caches = [
            shape.storage(layer, blocks + 1, block_size, device, slots=state_slots + 1)
            for layer in range(shape.layers)
        ]

    @functools.cached_property
    def steps(self) -> DecodeSteps | None:
        """Captured decode steps, or the model's own; or None, with the reason said once."""
        if (own := getattr(self.model, "decode_steps", None)) is not None:
            return own(self.caches, self.rows)
        if self.device.type != "cuda" or not isinstance(self.model, Decoder):
            return None
        from flyweight.engine.graphs import DecodeGraphs, unsupported_reason

        reason = unsupported_reason(self.model, self.block_size)
        if reason is not None:
            warnings.warn(f"decode steps are not captured as CUDA graphs: {reason}", stacklevel=2)
            return None
        return DecodeGraphs(self.model, self.caches, self.rows)

    @functools.cached_property
    def shared_rows(self) -> SharedRows:
        return SharedRows(self.rows)

    @functools.cached_property
    def shared_steps(self) -> DecodeSteps | None:
        """Captured steps of rows of which several may be of one sequence, where decode steps are
        captured.
        """
        if self.steps is None or not isinstance(self.model, Decoder):
            return None
        from flyweight.engine.graphs import DecodeGraphs

        graphs = DecodeGraphs(self.model, self.caches, self.shared_rows, sizes=SIZES)
        for one in filter(None, (graphs, graphs.unadapted)):
            one.leave_out([size for size in FUSED_SIZES if runs_as_eight(one.step(size).decode)])
        return graphs

    @functools.cached_property
    def passes(self) -> Passes | None:
        """Captured passes, where decode steps are captured and Triton is there."""
        if (
            self.steps is None
            or not isinstance(self.model, Decoder)
            or self.rows.states is not None
        ):
            return None
        from flyweight.engine.passes import PassGraphs, alone_reason, unsupported_reason

        if unsupported_reason(self.model, self.block_size):
            return None
        alone = alone_reason(self.model) is not None
        return PassGraphs(self.model, self.caches, self.rows, alone=alone)

    def rest(self) -> bool:
        """Nobody is there: prepare a pass for the next time. Whether there was one to prepare."""
        return self.passes is not None and self.passes.rest()

    @torch.inference_mode()
    def launch(self, works: Sequence[Work], launched: Callable[[], None] | None = None) -> Flight:
        """`launched` is called when the model is on its way, before tokens are chosen: constraints
        are asked after it.
        """
        with self.model.active() if isinstance(self.model, Decoder) else contextlib.nullcontext():
            self.rows.retain()
            followed = self.follower is not None and self.follower.wants(works)
            shared = self._is_shared(works, followed=followed)
            if self._is_captured(works) and not (shared and followed):
                choose = self._replay(works)
            elif shared:
                choose = self._replay_shared(works, followed=followed)
            else:
                choose = self._forward(works)
            if launched is not None:
                launched()
            return choose()

    @torch.inference_mode()
    def prepare(self) -> None:
        """Tables for the next step with guesses, while the device is busy."""
        self.rows.extend()
        if self.shared_steps is not None:
            self.shared_rows.copy_tables()

    def can_follow(self, works: Sequence[Work]) -> bool:
        """Whether the rows of all that run are those of this step with guesses, which has left
        there what a captured step goes on from.
        """
        rows = self.rows
        return (
            self.steps is not None
            and len(rows) == len(works) <= self.steps.largest
            and all(
                work.request.number in rows.row_of and work.request.number not in rows.behind
                for work in works
            )
        )

    def can_guess_on(self, works: Sequence[Work]) -> bool:
        """Whether a step like this one with guesses can be launched behind it, unread."""
        return (
            self.shared_steps is not None
            and len(self.rows) == len(works)
            and self.shared_rows.repeats(works)
        )

    def _is_captured(self, works: Sequence[Work]) -> bool:
        """One new token for each row and nobody else: a decode step."""
        rows, steps = self.rows, self.steps
        return (
            steps is not None
            and len(rows) == len(works) <= steps.largest
            and all(
                work.samples and work.count == 1 and work.request.number in rows.row_of
                for work in works
            )
        )

    def _is_shared(self, works: Sequence[Work], *, followed: bool) -> bool:
        """Answers with several new tokens: guesses, or what a drafting model has not seen; or whose
        steps a head follows.
        """
        several = followed or any(
            work.count > 1 and work.request.number in self.rows.row_of for work in works
        )
        return several and self.shared_steps is not None and self.shared_rows.takes(works)

    def _replay(self, works: Sequence[Work]) -> Callable[[], Flight]:
        rows, steps, count = self.rows, self.steps, len(works)
        assert steps is not None
        rows.extend()
        rows.catch_up()
        sampled = rows.samples_in_step
        logits = steps.sample(count) if sampled else steps.advance(count)
        places = {i: rows.row_of[work.request.number] for i, work in enumerate(works)}

        def choose() -> Flight:
            tokens = (
                rows.tokens[:count]
                if sampled
                else rows.choose(logits, allowed=allowed_by(rows.requests))
            )
            if self.follower is not None:
                self.follower.skipped(works)
            return self._land(works, places, logits, tokens)

        return choose

    def _replay_shared(self, works: Sequence[Work], *, followed: bool) -> Callable[[], Flight]:
        """Answers, some of them with several rows."""
        rows, steps = self.shared_rows, self.shared_steps
        assert steps is not None
        self.rows.extend()
        count = rows.guess_on(works) if is_unread(works) else rows.fill(works)
        outputs = sum(work.outputs for work in works)
        counts = outputs == count and self.rows.mode.penalized
        logits = steps.advance(count)

        def choose() -> Flight:
            sampled, at, lengths, likeliest = (
                logits,
                rows.at[:count],
                rows.lengths[:count],
                rows.chosen[:count],
            )
            if outputs < count:
                kept = rows.sampled[:outputs]
                sampled, at, lengths, likeliest = (
                    tensor.index_select(0, kept) for tensor in (sampled, at, lengths, likeliest)
                )
            guessed = rows.guessed if counts else None
            tokens = self._choose(works, sampled, at, lengths, likeliest, guessed)
            starts = itertools.accumulate((work.outputs for work in works), initial=0)
            flight = self._land(
                works, dict(zip(range(len(works)), starts, strict=False)), sampled, tokens
            )
            # once the tokens are on their way to the host
            if counts and flight.speculative:
                flight = replace(flight, counted=True)
                rows.count(tokens)
            if self.follower is not None and followed:
                self.follower.after_rows(works, rows, tokens)
                return flight
            if self.follower is not None:
                self.follower.skipped(works)
            if flight.speculative:
                if outputs == count:
                    rows.hold(tokens)
                rows.go_on(tokens)
            return flight

        return choose

    def _forward(self, works: Sequence[Work]) -> Callable[[], Flight]:
        """Any mix of prompts and answers, packed."""
        rows, sampling = self.rows, [i for i, work in enumerate(works) if work.samples]
        if fresh := [
            works[i].request for i in sampling if works[i].request.number not in rows.row_of
        ]:
            rows.enter(fresh)
        size = self.passes.padded_tokens(works) if self.passes else None
        padding = Padding(size, self.spare, self.passes.inputs) if self.passes and size else None
        packed = pack(works, rows, block_size=self.block_size, padding=padding)
        logits = (
            self.passes.forward(packed.batch)
            if self.passes and padding
            else self.model.forward(packed.batch, self.caches)
        )
        chosen = [works[i] for i in sampling]
        starts = [0, *itertools.accumulate(work.outputs for work in chosen)]
        places = dict(zip(sampling, starts, strict=False))

        def choose() -> Flight:
            tokens, last = rows.tokens[:0], logits[:0]
            if sampling:
                last = logits if len(logits) == starts[-1] else logits.index_select(0, packed.last)
                tokens = self._choose(chosen, last, packed.rows, packed.lengths - 1)
            flight = self._land(works, places, last, tokens, logits, packed.spans)
            if self.follower is not None:
                self.follower.after_pass(works, packed, tokens)
            return flight

        return choose

    def _choose(
        self,
        works: Sequence[Work],
        logits: Tensor,
        at: Tensor,
        positions: Tensor,
        likeliest: Tensor | None = None,
        guessed: Guessed | None = None,
    ) -> Tensor:
        """Tokens after the rows of `works`, which all sample: of each its place in `Rows`, the
        position that it fills (int32), and its likeliest token where that is known. Where none of
        them has drafts they are the next step's input; else the host says what is kept (`settle`).
        """
        rows = self.rows
        requests = [work.request for work in works for _ in range(work.outputs)]
        allowed = allowed_by(requests)
        if any(work.drafts for work in works):
            rows.leave_behind(requests)
            if rows.mode == GREEDY and likeliest is not None and not allowed:
                return likeliest
            return choose_after_drafts(
                masked(logits, allowed) if allowed else logits,
                rows,
                works,
                at,
                positions.long(),
                guessed,
            )
        rows.lengths.index_copy_(0, at, positions + 1)
        rows.behind.difference_update(request.number for request in requests)
        return rows.choose(logits, at, allowed)

    @torch.inference_mode()
    def settle(self, works: Sequence[Work], results: Sequence[Result]) -> None:
        """After a step with drafts, where a row has penalties and the device did not see to it: the
        tokens that were kept count.
        """
        rows = self.rows
        pairs = [
            (rows.row_of[work.request.number], token)
            for work, result in zip(works, results, strict=True)
            if work.request.number in rows.row_of
            for token in result.tokens
        ]
        at, tokens = upload(self.device, *numpy.array(pairs, dtype=numpy.int64).reshape(-1, 2).T)
        rows.sampling.count(rows.mode, tokens, at)

    def _land(
        self,
        works: Sequence[Work],
        places: dict[int, int],
        logits: Tensor,
        tokens: Tensor,
        every: Tensor | None = None,
        spans: Sequence[tuple[int, int]] = (),
    ) -> Flight:
        """Send what the host wants to know on its way."""
        most = max(
            (
                work.request.params.logprobs
                for work in works
                if work.samples and work.request.params.logprobs is not None
            ),
            default=None,
        )
        wanted = [] if most is None else [*top_logprobs(logits.float(), tokens, most)]
        prompts = []
        for i, span in enumerate(spans):
            count, follow = works[i].request.params.prompt_logprobs, following(works[i])
            if count is not None and follow:
                assert every is not None
                (after,) = upload(self.device, numpy.array(follow, dtype=numpy.int64))
                wanted += top_logprobs(every[span[0] : span[0] + len(follow)], after, count)
                prompts.append((i, follow))
        return Flight(works, places, Download(tokens, *wanted), most is not None, prompts)


def allowed_by(requests: Sequence[Request]) -> dict[int, numpy.ndarray]:
    """What constraints let follow, by the request's place: uint8, a bit a token. They are asked
    when every token before it is known. An answer that has just been found to be over gets any
    token, which nobody reads.
    """
    asked: dict[type[Constraint], list[tuple[int, Constraint, list[int]]]] = {}
    for row, request in enumerate(requests):
        constraint = request.constraint
        if constraint is not None and not request.finished:
            generated = request.tokens[len(request.prompt) :]
            asked.setdefault(type(constraint), []).append((row, constraint, generated))
    found: dict[int, numpy.ndarray] = {}
    for kind, alike in asked.items():
        masks = kind.masks([(constraint, generated) for _, constraint, generated in alike])
        for (row, _, _), mask in zip(alike, masks, strict=True):
            if mask is not None:
                found[row] = mask
    return found
