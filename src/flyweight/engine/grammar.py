"""Answers that must fit a JSON schema or another grammar: which tokens may come next, from
llguidance.

A grammar becomes an automaton over the bytes of the vocabulary once; each sample walks a copy of
it. `grammar_kinds.py` says which kinds there are.

Grammars are strangers' programs: what one may cost is found out in a process apart
(`grammar_limits.py`), and compiling lets go of the interpreter lock, so that a thread beside the
step loop may do it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy
import torch
from torch import Tensor

from flyweight.engine.grammar_kinds import missing, translate
from flyweight.engine.grammar_limits import LEAST_BYTES, GrammarCache, GrammarLimits, Trials
from flyweight.engine.request import Constraint
from flyweight.errors import RequestError

Constraints = Callable[[], "GrammarConstraint"]  # makes one for each sample


class Grammars:
    """Compiles grammars for one vocabulary. `Grammars(…)(schema)` gives a maker of constraints, one
    for each sample.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocabulary: int,
        end_ids: Iterable[int],
        *,
        limits: GrammarLimits | None = None,
    ):
        try:
            import llguidance.hf
        except ImportError as error:
            raise missing() from error
        self.vocabulary = vocabulary
        self.end_ids = sorted(end_ids)
        self.matcher = llguidance.LLMatcher
        self.tokens = llguidance.hf.from_tokenizer(
            tokenizer, n_vocab=vocabulary, eos_token=self.end_ids
        )
        limits = limits or GrammarLimits()
        self.trials = Trials(limits, vocabulary=vocabulary, special=special_names(tokenizer))
        self.cache = GrammarCache(limits)

    def __call__(self, schema: str) -> Constraints:
        """From any thread."""
        return self.known(schema) or self._offer(self._compile(schema))

    def known(self, schema: str) -> Constraints | None:
        """The same where there is nothing to compile any more, in no time; None elsewhere."""
        found = self.cache.get(schema)
        return None if found is None else self._offer(found)

    def _offer(self, found: Any) -> Constraints:
        if isinstance(found, RequestError):
            raise RequestError(str(found)) from found
        return lambda: GrammarConstraint(found, self.vocabulary, self.end_ids)

    def _compile(self, schema: str) -> Any:
        """A matcher, or why there is none; both are remembered, since the same few come again and
        again.
        """
        kind, grammar = translate(schema)
        found: Any
        try:
            size = self.trials.measure(grammar)
            found = self.matcher(self.tokens, grammar, log_level=0)
            if found.is_error():
                raise RequestError(found.get_error().strip().splitlines()[0])
        except RequestError as error:
            size = max(LEAST_BYTES, len(schema))
            found = RequestError(f"{kind} cannot be followed: {error}")
        self.cache.put(schema, found, size)
        return found


def special_names(tokenizer: Any) -> list[str]:
    """Tokens that a grammar may call by their names."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return [token.content for token in added.values() if token.special]


class GrammarConstraint(Constraint):
    def __init__(self, compiled: Any, vocabulary: int, end_ids: Sequence[int]):
        self.compiled = compiled
        self.vocabulary, self.end_ids = vocabulary, end_ids
        # this sample's own copy, made when it runs: one that waits holds no memory
        self.matcher: Any = None
        self.consumed = 0
        self.error: str | None = None

    def advance(self, generated: Sequence[int]) -> bool:
        """Take what the answer has got since the last time; whether the grammar still says what may
        follow.
        """
        if self.matcher is None:
            self.matcher = self.compiled.deep_copy()
        self.matcher.consume_tokens(list(generated[self.consumed :]))
        self.consumed = len(generated)
        return self.follows()

    def follows(self) -> bool:
        """Unless it outgrew its limits: then this answer ends, rather than the step that others
        share.
        """
        if not self.matcher.is_error():
            return True
        reason = self.matcher.get_error().strip().splitlines()[0]
        self.error = f"the grammar cannot be followed any further: {reason}"
        return False

    def allowed(self, generated: Sequence[int]) -> Tensor:
        """Bool [vocabulary]; when the answer is complete, only its end."""
        bits = self.masks([(self, generated)])[0]
        return torch.from_numpy(
            numpy.unpackbits(bits, bitorder="little")[: self.vocabulary].astype(bool)
        )

    @classmethod
    def masks(cls, asked: Sequence[tuple[Constraint, Sequence[int]]]) -> Sequence[numpy.ndarray]:
        """Side by side, by threads of llguidance's own."""
        own = cast(Sequence[tuple[GrammarConstraint, Sequence[int]]], asked)
        return list(mask_bits(own))


@functools.cache
def executor() -> Any:
    """Threads that make masks side by side, without the interpreter lock."""
    import llguidance

    return llguidance.LLExecutor()


def mask_bits(asked: Sequence[tuple[GrammarConstraint, Sequence[int]]]) -> numpy.ndarray:
    """What may follow each answer: uint8 [answers, bytes], a bit a token, the lowest first."""
    words = (max(constraint.vocabulary for constraint, _ in asked) + 31) // 32
    bits = numpy.zeros((len(asked), words), dtype=numpy.uint32)
    going = []
    for row, (constraint, generated) in enumerate(asked):
        if constraint.advance(generated):
            going.append((constraint.matcher, row))
            continue
        for end in constraint.end_ids:
            bits[row, end // 32] |= numpy.uint32(1 << end % 32)
    if len(going) == 1:  # threads would only cost
        matcher, row = going[0]
        matcher.unsafe_compute_mask_ptr(bits[row].ctypes.data, 4 * words)
    elif going:
        executor().unsafe_compute_mask_ptr(going, bits.ctypes.data, 4 * words, len(bits))
    for _, row in going:
        asked[row][0].follows()  # a mask may outgrow them as well: it then has the end alone
    return bits.view(numpy.uint8)
