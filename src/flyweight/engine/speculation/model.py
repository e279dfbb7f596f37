"""Guesses of a smaller model with the same vocabulary.

It runs as any model does: a runner, a cache of its own, and for each request that it follows a
shadow, a request with the same tokens, seed and parameters. So its sampler draws with the noise
that the large model's will draw with, and the two agree as often as their distributions let them
(verify.py). A round computes what the shadow has not seen, then one step for each further guess,
all launched before the first is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from flyweight.engine.contracts import Model
from flyweight.engine.flight import Flight
from flyweight.engine.kv_cache import BlockPool
from flyweight.engine.memory import CacheShape
from flyweight.engine.request import Request, State
from flyweight.engine.runner import Runner
from flyweight.engine.sampling import is_penalized
from flyweight.engine.work import Work
from flyweight.errors import OptionError

STEP_TOKENS = 2048  # of prompts, computed at once


class ModelDrafter:
    guesses_ahead = False

    def __init__(
        self,
        model: Model,
        shape: CacheShape,
        *,
        vocabulary: int,
        device: torch.device,
        context: int,
        sequences: int,
        blocks: int,
        block_size: int = 16,
    ):
        self.context = context
        self.pool = BlockPool(blocks, block_size)
        self.runner = Runner(
            model,
            shape,
            blocks=blocks,
            block_size=block_size,
            vocabulary=vocabulary,
            device=device,
            context=context,
            sequences=sequences,
        )
        self.shadows: dict[int, Request] = {}

    def warm_up(self) -> None:
        for captured in (self.runner.steps, self.runner.passes):
            if captured is not None:
                captured.warm_up()

    def guesses_unread(self, works: Sequence[Work]) -> bool:
        return False

    def expect(self, count: int) -> None:
        pass

    def promising(self, request: Request) -> bool:
        """A model always has a guess."""
        return len(request.tokens) + request.pending < self.context

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], most: Mapping[int, int]) -> dict[int, list[int]]:
        shadows = [self._follow(request) for request in requests]
        ready = [shadow for shadow in shadows if self._has_room(shadow, most[shadow.number])]
        if not ready:
            return {}
        known = {shadow.number: len(shadow.tokens) for shadow in ready}
        self.runner.rows.leave_behind(ready)
        self._compute_prompts(ready)
        flights = []
        for guess in range(max(most[shadow.number] for shadow in ready)):
            wanting = [shadow for shadow in ready if most[shadow.number] > guess]
            flights.append(self._launch(wanting))
        for flight in flights:
            for work, result in zip(flight.works, flight.results(), strict=True):
                work.request.pending -= 1
                work.request.tokens += result.tokens
        return {shadow.number: shadow.tokens[known[shadow.number] :] for shadow in ready}

    def release(self, request: Request) -> None:
        self.forget(request)

    def learn(self, works: Sequence[Work], seconds: float) -> None:
        pass

    def observe(self, request: Request, drafts: Sequence[int], accepted: int) -> None:
        pass

    def forget(self, request: Request) -> None:
        if (shadow := self.shadows.pop(request.number, None)) is not None:
            self.pool.release(shadow.blocks)
            shadow.state = State.FINISHED  # its row goes with the next step

    def _follow(self, request: Request) -> Request:
        """The request's shadow, with its tokens; what was computed for wrong guesses is computed
        again.
        """
        shadow = self.shadows.get(request.number)
        if shadow is None:
            params = replace(request.params, logprobs=None, prompt_logprobs=None)
            shadow = Request(
                number=request.number,
                prompt=request.prompt,
                params=params,
                seed=request.seed,
                limit=self.context,
                salt=None,
                end_ids=request.end_ids,
                tokens=list(request.tokens),
                state=State.RUNNING,
            )
            self.shadows[request.number] = shadow
        same = common_length(shadow.tokens, request.tokens)
        shadow.tokens[same:] = request.tokens[same:]
        shadow.computed = min(shadow.computed, same, len(shadow.tokens) - 1)
        if (
            is_penalized(shadow.params)
            and (row := self.runner.rows.row_of.get(shadow.number)) is not None
        ):
            self.runner.rows.sampling.enter([row], [shadow])  # wrong guesses do not count
        return shadow

    def _has_room(self, shadow: Request, guesses: int) -> bool:
        length = len(shadow.tokens) + guesses
        taken = self.pool.take(max(0, self.pool.blocks_for(length) - len(shadow.blocks)))
        if length >= self.context or taken is None:
            if taken:
                self.pool.release(taken)
            return False
        shadow.blocks += taken
        return True

    def _compute_prompts(self, shadows: Sequence[Request]) -> None:
        for shadow in shadows:
            while shadow.missing > STEP_TOKENS:
                self.runner.launch([Work(shadow, shadow.computed, STEP_TOKENS, samples=False)])
                shadow.computed += STEP_TOKENS

    def _launch(self, shadows: Sequence[Request]) -> Flight:
        works = [Work(shadow, shadow.computed, shadow.missing, samples=True) for shadow in shadows]
        flight = self.runner.launch(works)
        for work in works:
            work.request.computed += work.count
            work.request.pending += 1
        return flight


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two texts begin with alike. They differ near their ends, so it is looked for from
    there.
    """
    shorter = min(len(one), len(other))
    begin = max(0, shorter - 64)
    if one[:begin] != other[:begin]:
        begin = 0
    for i in range(begin, shorter):
        if one[i] != other[i]:
            return i
    return shorter


def check_vocabularies(
    target: str,
    target_vocabulary: Mapping[str, int] | int,
    drafter: str,
    vocabulary: Mapping[str, int] | int,
) -> None:
    """Guesses are token ids, which must mean the same in both models."""
    if target_vocabulary == vocabulary:
        return
    sizes = [one if isinstance(one, int) else len(one) for one in (target_vocabulary, vocabulary)]
    what = (
        (f"{sizes[0]:,} and {sizes[1]:,} tokens")
        if sizes[0] != sizes[1]
        else "other tokens for the same ids"
    )
    raise OptionError(
        f"{drafter} cannot guess for {target}: their vocabularies differ ({what}); "
        "take a smaller model of the same family"
    )
