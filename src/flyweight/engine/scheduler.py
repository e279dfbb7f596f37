"""Which tokens of which requests run in the next step.

    1. every decoding request: one token            } in order of arrival; out of blocks: the
       youngest request
    2. every request in mid-prompt: its next chunk  } not yet in this step gives its blocks back and
       starts over
    3. waiting requests, first come first served, as long as tokens, seats and blocks last

A step may be scheduled while the one before is still running: a token that is sampled but not read
counts as there (`Request.pending`). One that turns out to be the last leaves a step too much
behind, whose token nobody takes: its block was reserved like any other, and later owners of the
block write after it.

All share one budget of tokens. Decoding comes first, so a flood of long prompts never stops the
running answers; beside them prompts get a smaller share (`prompt_tokens_beside`, or less where
`pace.py` says so), so that it does not slow them much either. A victim is computed again later,
prompt and answer so far (most of it usually from the prefix cache); that costs time but, unlike
swapping, no memory and no copies.

In turns (`turn_tokens`, a server on a GPU) steps of answers and passes of prompts alternate, the
passes of up to so many tokens. A step of answers alone is captured whatever their number, and a
pass of prompts alone is one of a few kinds, all captured before the first request (`passes.py`); a
step of both would be of a new kind with every number of answers, and slower than the two. A reader
sees the longest gap between two tokens: a step and a pass. Only after a burst of requests, while
nearly as many wait as answer, are all prompts that wait read at once, up to `prompt_tokens_beside`
tokens: few would gain from short gaps, many wait.

There is no deadlock: the oldest request may take the blocks of all others, and one request alone
always fits.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence

from flyweight.engine.kv_cache import BlockPool, digests
from flyweight.engine.pace import Pace
from flyweight.engine.request import Request, State
from flyweight.engine.states import StatePool
from flyweight.engine.work import Budget, LongPrompts, StateUse, Work
from flyweight.errors import OptionError

# rows of logits a step makes at most for prompts whose logprobs are wanted: 0.6 GB for 152k tokens
PROMPT_LOGITS = 1024
# steps of more answers take longer, since linears of more rows are other kernels, and so do passes
# with attention to more cached tokens: there passes are smaller by a quarter, where both is so by
# half, and gaps hardly grow
MANY_ANSWERS = 64
MANY_CACHED = 2048
# requests that wait, at least and for each that is answered: with more, long passes cost nothing.
# Answers with no more than `BEGUN` tokens do not count: they came with those that wait
BURST = 4
BURST_SHARE = 0.75
BEGUN = 16


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prompt_tokens_beside: int | None = None,
    ):
        if max_num_batched_tokens < max_num_seqs:
            raise OptionError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_num_seqs "
                f"({max_num_seqs}), or some answers would never move"
            )
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prompt_tokens_beside = prompt_tokens_beside or max_num_batched_tokens
        self.pace: Pace | None = None  # a server's: bounds the share by time as well
        # a server's: answers and prompts in steps of their own, prompts in passes of so many tokens
        self.turn_tokens: int | None = None
        self.prompts_next = False  # whose turn it is
        # of blocks, in the last step that answers had a part in: then nobody new may come in
        self.short = False
        self.long_prompts: LongPrompts | None = None  # of models whose rope differs for them
        self.states: StatePool | None = None  # of models whose layers keep states
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def finish(self, request: Request, reason: str, stop_reason: str | int | None = None) -> None:
        """End a request, whatever its state, and give its blocks back at once."""
        if request.finished:
            return
        (self.running if request.state is State.RUNNING else self.waiting).remove(request)
        self._release(request)
        request.state, request.finish_reason, request.stop_reason = (
            State.FINISHED,
            reason,
            stop_reason,
        )

    def schedule(self, drafts: Mapping[int, Sequence[int]] | None = None) -> list[Work]:
        """Choose the next step's work and count it as computed: run it before calling this again.

        `drafts`: by request number, guesses of what comes next. They take what is free of tokens
        and blocks, and never another request's place; `settle` such work before the next step.
        """
        if self.states is not None:
            self.states.begin_step()
        answering = any(request.missing == 1 and not request.complete for request in self.running)
        if self.turn_tokens is not None and answering and not drafts:
            return self._take_turns(self.turn_tokens)
        beside = (
            self.pace.tokens(self.prompt_tokens_beside) if self.pace else self.prompt_tokens_beside
        )
        return self._fill(beside if answering else self.max_num_batched_tokens, drafts or {})

    def _take_turns(self, most: int) -> list[Work]:
        """A pass of prompts, if it is their turn and one waits, or a step of all answers."""
        works = self._fill(self._pass_tokens(most), {}, answers=False) if self.prompts_next else []
        self.prompts_next = not works
        return works or self._fill(0, {})

    def _pass_tokens(self, most: int) -> int:
        """Of prompts: as many as hardly hold up answers; after a burst a long pass."""
        reading = [request for request in self.running if request.missing > 1]
        coming = list(itertools.islice(self.waiting, self.max_num_seqs - len(self.running)))
        many = len(self.running) > MANY_ANSWERS  # a prompt that is being read may answer behind it
        long_ago = any(request.computed > MANY_CACHED for request in reading)
        most -= (many + long_ago) * most // 4
        unread = reading + coming
        tokens = sum(request.missing for request in unread)
        settled = sum(one.missing <= 1 and one.generated > BEGUN for one in self.running)
        if tokens >= 4 * most and len(unread) >= max(BURST, BURST_SHARE * settled):
            return max(most, self.prompt_tokens_beside)
        return most

    def _fill(
        self, prompt_tokens: int, drafts: Mapping[int, Sequence[int]], *, answers: bool = True
    ) -> list[Work]:
        """A step with so many tokens of prompts at most; not `answers`: with them alone."""
        budget = Budget(self.max_num_batched_tokens, prompt_tokens, PROMPT_LOGITS)
        works: list[Work] = []
        resting = (
            set()
            if answers
            else {request.number for request in self.running if request.missing == 1}
        )
        scheduled = set(resting)  # nobody's victims
        self.short = self.short and not answers
        missing = [(request.missing > 1, request) for request in self.running]
        # answers first; by arrival within each
        ordered = [request for more, request in missing if not more] + [
            request for more, request in missing if more
        ]
        plain = self.long_prompts is None and self.states is None
        for request in ordered:
            if request.state is not State.RUNNING or request.complete or request.number in resting:
                continue
            if not (count := budget.room(request)):
                continue
            guesses = drafts.get(request.number, ())
            if plain and count == 1 and (work := self._next_token(request, guesses, budget)):
                scheduled.add(request.number)
                works.append(work)
                budget.take(work)
                continue
            if self._outgrown(request):
                self._preempt(request)
                continue
            while not self._extend(request, count):
                self.short = True
                victim = next(
                    other for other in reversed(self.running) if other.number not in scheduled
                )
                if victim is request:  # waits for the older ones with what it has
                    break
                self._preempt(victim)
            else:
                scheduled.add(request.number)
                works.append(self._work(request, count, self._fitting(request, guesses, budget)))
                budget.take(works[-1])
        while (
            self.waiting
            and prompt_tokens
            and not self.short
            and len(self.running) < self.max_num_seqs
        ):
            if self.waiting[0].pending or not (work := self._admit(self.waiting[0], budget)):
                break
            self.waiting.popleft()
            works.append(work)
            budget.take(work)
        return works

    def _next_token(self, request: Request, drafts: Sequence[int], budget: Budget) -> Work | None:
        """What most of a busy engine's work is: one more token of an answer, with its guesses,
        within the blocks that it has.
        """
        start = request.computed
        count = 1 + len(drafts)
        length = request.length
        if length - start != 1 or start + count > len(request.blocks) * self.pool.block_size:
            return None
        if drafts and (count > budget.tokens or length + count > request.limit):
            return None
        request.computed = start + count
        self._register(request)
        return Work(request, start, count, True, drafts)

    def _admit(self, request: Request, budget: Budget) -> Work | None:
        if not budget.room(request):
            return None
        self._choose_rope(request)
        self._hash(request, len(request.tokens))
        # The last token is computed in any case: its logits are wanted.
        reusable = request.digests[: (len(request.tokens) - 1) // self.pool.block_size]
        found = self.pool.find(reusable) if request.params.prompt_logprobs is None else []
        source = -1
        if self.states is not None:
            count, source = self.states.find(request.digests[: len(found)])
            found = found[:count]
        free = self.pool.available - sum(self.pool.references[block] == 0 for block in found)
        if self.pool.blocks_for(len(request.tokens)) - len(found) > free:
            # room for the whole prompt, though chunks come one by one: else it would soon be a
            # victim
            return None
        if self.states is not None:
            if (slot := self.states.take()) is None:
                return None
            request.state_slot, request.state_source = slot, source
        self.pool.hold(found)
        request.blocks, request.registered, request.computed = (
            found,
            len(found),
            len(found) * self.pool.block_size,
        )
        if request.cached is None:
            request.cached, request.started = request.computed, time.perf_counter()
        count = budget.room(request)
        extended = self._extend(request, count)
        assert extended, "the blocks were counted above"
        request.state = State.RUNNING
        bisect.insort(self.running, request, key=lambda request: request.number)
        return self._work(request, count)

    def _choose_rope(self, request: Request) -> None:
        row = self.long_prompts.row_of(len(request.tokens)) if self.long_prompts else 0
        if row != request.rope_row:
            request.rope_row, request.digests = row, []

    def _outgrown(self, request: Request) -> bool:
        """Whether its next token is the first that needs other frequencies than those before it
        got.
        """
        return (
            self.long_prompts is not None
            and not request.rope_row
            and request.computed >= self.long_prompts.border
        )

    def _extend(self, request: Request, count: int) -> bool:
        """Give the request blocks for `count` more tokens."""
        needed = self.pool.blocks_for(request.computed + count) - len(request.blocks)
        taken = self.pool.take(needed) if needed > 0 else []
        if taken is None:
            return False
        request.blocks.extend(taken)
        return True

    def _fitting(self, request: Request, drafts: Sequence[int], budget: Budget) -> Sequence[int]:
        """As many of the drafts as there is room for. The last token that a request may have needs
        no guess, and each other running request may want a block before this one gets a spare one.
        """
        room = min(len(drafts), budget.tokens - 1, request.limit - request.length - 1)
        if self.long_prompts is not None and not request.rope_row:
            room = min(room, self.long_prompts.border - request.computed - 1)
        spare = len(request.blocks) * self.pool.block_size - request.computed - 1
        if (
            room > spare
            and self.pool.available > len(self.running)
            and self._extend(request, 1 + room)
        ):
            spare = room
        return drafts[: max(0, min(room, spare))]

    def reserve(self, count: int) -> None:
        """Blocks for so many more tokens of each answer, as far as nobody else could want them."""
        for request in self.running:
            if request.missing != 1 or self.pool.available <= 2 * len(self.running):
                continue
            more = min(count, request.limit - request.computed)
            if self.long_prompts is None and more > 0:
                self._extend(request, more)

    def _work(self, request: Request, count: int, drafts: Sequence[int] = ()) -> Work:
        samples = count == request.missing
        work = Work(
            request,
            request.computed,
            count + len(drafts),
            samples,
            drafts,
            self._use_state(request, count),
        )
        request.computed += work.count
        self._register(request)
        return work

    def _use_state(self, request: Request, count: int) -> StateUse | None:
        """Prompts leave a copy at the last border of a block that leaves a token to compute;
        answers leave none.
        """
        if self.states is None:
            return None
        size, source, mark, mark_slot = self.pool.block_size, request.state_source, 0, None
        request.state_source = request.state_slot
        border = min(request.computed + count, len(request.tokens) - 1) // size * size
        if count > 1 and request.salt is not None and border > request.computed:
            self._hash(request, border)
            mark, mark_slot = (
                border - request.computed,
                self.states.keep(request.digests[border // size - 1]),
            )
        if mark_slot is None:
            return StateUse(source, request.state_slot)
        return StateUse(source, request.state_slot, mark, mark_slot)

    def settle(self, work: Work, accepted: int) -> None:
        """So many of the work's drafts were right: the others' slots are free for what comes
        instead.
        """
        if work.request.state is State.RUNNING:  # nobody took its blocks since
            work.request.computed -= len(work.drafts) - accepted

    def _register(self, request: Request) -> None:
        """Make its full blocks findable, as far as their tokens are known."""
        if request.salt is None:
            return
        known = min(request.computed, len(request.tokens))
        if known // self.pool.block_size <= request.registered:
            return
        self._hash(request, known)
        for i in range(request.registered, known // self.pool.block_size):
            self.pool.register(request.blocks[i], request.digests[i])
            request.registered = i + 1

    def _hash(self, request: Request, tokens: int) -> None:
        """Digests of all full blocks among the first `tokens` tokens."""
        if request.salt is None:
            return
        size, known = self.pool.block_size, len(request.digests)
        if tokens // size > known:
            # keys turned by other frequencies are other keys
            parent = (
                request.digests[-1] if known else request.salt + b"long" * bool(request.rope_row)
            )
            request.digests += digests(parent, request.tokens[known * size : tokens], size)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.state, request.preemptions = State.WAITING, request.preemptions + 1
        later = next(
            (i for i, other in enumerate(self.waiting) if other.number > request.number),
            len(self.waiting),
        )
        self.waiting.insert(later, request)

    def _release(self, request: Request) -> None:
        self._register(request)
        self.pool.release(request.blocks)
        request.blocks, request.registered, request.computed = [], 0, 0
        if self.states is not None and request.state_slot >= 0:
            self.states.release(request.state_slot)
            request.state_slot = -1

    def check_integrity(self) -> None:
        self.pool.check_integrity([request.blocks for request in self.running])
        if any(request.blocks for request in self.waiting):
            raise AssertionError("a waiting request holds blocks")
        if self.states is not None:
            self.states.check_integrity([request.state_slot for request in self.running])
